"""What keeps ranks alike: models compared, failures named, parameters watched, buffers equal."""

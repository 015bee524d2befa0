"""Search for the best training plan."""

"""What a person is shown: the page of a run, its plots, two runs side by side, progress."""

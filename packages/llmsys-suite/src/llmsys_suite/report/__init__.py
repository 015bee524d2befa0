"""Reports for readers: the page of a run, and comparisons of runs."""

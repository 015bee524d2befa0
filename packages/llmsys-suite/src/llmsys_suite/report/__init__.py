"""Reports for readers: the page of a run, comparison of runs, and generated text."""

"""The HTML report about a table of runs."""

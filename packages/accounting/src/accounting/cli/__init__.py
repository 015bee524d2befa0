"""Command line that prints cost reports, the best plan, inference estimates and comparisons."""

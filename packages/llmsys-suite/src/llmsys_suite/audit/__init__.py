"""Hold what a run says against second sources, and the checks against planted defects."""

"""Hold what a run says against second sources that share nothing with it."""

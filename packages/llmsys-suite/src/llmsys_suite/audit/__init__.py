"""Check a run's numbers against independent sources, and the checks on planted defects."""

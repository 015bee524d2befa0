"""IsoFLOP fits: the valleys of all budgets, and the power law through their bottoms."""

"""Stages 1 and 2: each rank keeps the optimizer state, and the sums, of its share."""

"""A decoder-only transformer for all families, built from a module in memory or a checkpoint."""

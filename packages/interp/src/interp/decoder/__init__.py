"""A decoder-only transformer for all supported families, built from a module or a checkpoint."""

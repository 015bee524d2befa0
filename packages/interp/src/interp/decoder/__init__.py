"""A decoder-only transformer for all families, with descriptions, checkpoints and folding."""

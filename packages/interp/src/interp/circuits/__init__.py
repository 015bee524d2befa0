"""Heads as algebra: thin matrices, patterns, composition, token to token, and induction whole."""

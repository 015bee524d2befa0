"""Circuits of attention heads: low-rank matrices, patterns, composition and induction."""

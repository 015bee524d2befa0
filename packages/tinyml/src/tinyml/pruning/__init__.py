"""Weights and channels that a model can do without, and how much each layer can lose."""

"""Pruning of weights and channels, and the sensitivity of each layer to it."""

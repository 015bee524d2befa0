"""Weights as palettes or on even grids, and products of whole numbers."""

"""Palettes, even grids and integer products of weights."""

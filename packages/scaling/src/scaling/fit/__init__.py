"""Fits of laws: variable projection, Newton's method and the search for the global minimum."""

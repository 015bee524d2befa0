"""Visualization: one self-contained HTML file, and figures for matplotlib."""

from interp.view.page import figure, view

__all__ = ["figure", "view"]

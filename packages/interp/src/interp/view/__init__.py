"""Visualization: one self-contained HTML file."""

from interp.view.page import view

__all__ = ["view"]

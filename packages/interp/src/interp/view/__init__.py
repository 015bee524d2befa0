"""One page, one file: what heads look at, what layers say, who deserves the credit."""

from interp.view.page import figure, view

__all__ = ["figure", "view"]

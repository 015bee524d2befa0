"""One model that is split over ranks: by rows, by blocks and inside each block."""

from __future__ import annotations

from llmsys_suite.config import Layout, build_possible_layouts
from llmsys_suite.splits.split_model import SplitModel

__all__ = ["Layout", "SplitModel", "build_possible_layouts"]

"""Time collectives beside the backend's own, in turns (python -m collectives.bench)."""

from collectives.bench.rows import bench, main, table
from collectives.bench.turns import Times, ratios, time_in_turns

__all__ = ["Times", "bench", "main", "ratios", "table", "time_in_turns"]

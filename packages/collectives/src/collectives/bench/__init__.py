"""Time collectives beside the backend's own, in turns (python -m collectives.bench)."""

from collectives.bench.rows import bench, main, table
from collectives.bench.turns import Times, time_in_turns

__all__ = ["Times", "bench", "main", "table", "time_in_turns"]

"""Time and count each stage beside its peers, in turns (python -m zero.bench)."""

from zero.bench.rows import bench, main, table

__all__ = ["bench", "main", "table"]

"""Benchmark of all stages against torch's implementations: `python -m zero.bench`."""

from zero.bench.rows import bench, main, table

__all__ = ["bench", "main", "table"]

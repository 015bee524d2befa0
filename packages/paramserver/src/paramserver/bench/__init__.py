"""Time pulls, pushes and steps beside peers, in turns (python -m paramserver.bench.rows)."""

from paramserver.bench.rows import bench, main, table

__all__ = ["bench", "main", "table"]

"""Benchmark of pushes and pulls, interleaved with peers (`python -m paramserver.bench`)."""

from paramserver.bench.rows import bench, main, table

__all__ = ["bench", "main", "table"]

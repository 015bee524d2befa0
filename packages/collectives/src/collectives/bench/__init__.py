"""Interleaved benchmark against the backend's own collectives (python -m collectives.bench)."""

from collectives.bench.interleaved import Times, time_interleaved
from collectives.bench.rows import bench, table, main

__all__ = ["Times", "bench", "table", "main", "time_interleaved"]

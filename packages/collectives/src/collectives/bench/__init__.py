"""Interleaved benchmark against the backend's own collectives (python -m collectives.bench)."""

from collectives.bench.interleaved import Times, time_interleaved
from collectives.bench.rows import bench, main, table

__all__ = ["Times", "bench", "main", "table", "time_interleaved"]

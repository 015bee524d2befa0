"""Benchmark of this package's designs and torch's DDP: `python -m ddp.bench`."""

from ddp.bench.measure import bench

__all__ = ["bench"]

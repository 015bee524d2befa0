"""What this package's designs cost beside torch's own: `python -m ddp.bench`."""

from ddp.bench.measure import bench

__all__ = ["bench"]

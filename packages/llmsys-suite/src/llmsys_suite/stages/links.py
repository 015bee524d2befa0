"""Times of three collectives between the ranks, by algorithm and message size."""

from __future__ import annotations

import collectives.bench

from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Links, Skipped

#: Message sizes in bytes. Latency dominates the smallest, and bandwidth the largest.
SIZES = (1 << 10, 64 << 10, 1 << 20)


def run(run: Run) -> Links | Skipped:
    """Time the collectives of `collectives`, and of gloo or NCCL, in this process group."""
    if run.world < 2:
        return Skipped("one rank has no link to another rank")
    rows = collectives.bench.bench(device=run.device.type, quick=True, sizes=SIZES)
    return Links(rows)

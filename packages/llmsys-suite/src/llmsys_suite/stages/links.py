"""The links between the ranks: times of all-reduces by algorithm and size."""

from __future__ import annotations

import collectives.bench

from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Links, Skipped

#: Message sizes in bytes: latency dominates, latency and bandwidth matter, bandwidth dominates.
SIZES = (1 << 10, 64 << 10, 1 << 20)


def run(run: Run) -> Links | Skipped:
    """Run the benchmark of collectives in this process group, together with gloo or NCCL."""
    if run.world < 2:
        return Skipped("one rank has no link")
    rows = collectives.bench.bench(device=run.device.type, quick=True, sizes=SIZES)
    return Links(rows)

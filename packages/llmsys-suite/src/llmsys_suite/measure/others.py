"""What other programs take of the cores while the ranks train.

A rank that waits for a core may wait for one of its own run's threads: gloo's, autograd's, the
other rank's. Only what the kernel counts for the whole machine tells those from a neighbor.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from itertools import pairwise

from llmsys_suite.folder import Sample


def clocks() -> dict[str, float]:
    """Core seconds until now, of this process and of the whole machine; nothing where unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, *interrupts = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return {}
    ticks = user + nice + system + sum(interrupts)
    return {"process_s": time.process_time(), "machine_s": ticks / os.sysconf("SC_CLK_TCK")}


def shares(samples: list[Sample]) -> dict[int, float]:
    """Step -> the share of the machine's work, since the step before, that no rank did.

    `samples` are whole steps of one variant that all ranks train, on one machine.
    """
    ends: dict[int, dict[int, Sample]] = defaultdict(dict)
    for s in samples:
        if "machine_s" in s:
            ends[s["step"]][s["rank"]] = s
    found = {}
    for (_, begin), (step, end) in pairwise(sorted(ends.items())):
        ours = sum(s["process_s"] - begin[rank]["process_s"] for rank, s in end.items())
        machine = _machine(end) - _machine(begin)
        found[step] = 1 - ours / machine if machine > 0 else 0.0
    return found


def _machine(ranks: dict[int, Sample]) -> float:
    return max(float(s["machine_s"]) for s in ranks.values())

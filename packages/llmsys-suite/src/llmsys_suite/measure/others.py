"""Use of the cores by other programs while the ranks train.

A rank that waits for a core may wait for a thread of the same run: a thread of gloo, of autograd or
of another rank. Only the kernel's counters for the whole machine distinguish the threads of the run
from other programs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from itertools import pairwise

from llmsys_suite.folder import Sample


def clocks() -> dict[str, float]:
    """Return the busy core seconds of this process and of the whole machine, or {} if unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, *interrupts = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return {}
    ticks = user + nice + system + sum(interrupts)
    return {"process_s": time.process_time(), "machine_s": ticks / os.sysconf("SC_CLK_TCK")}


def shares(samples: list[Sample]) -> dict[int, float]:
    """Return, for each step but the first, the fraction of CPU time that other programs used.

    The CPU time is the busy time of all cores since the previous step of the same variant.
    `samples` are whole steps of one variant on one machine.
    """
    ends: dict[int, dict[int, Sample]] = defaultdict(dict)
    for s in samples:
        if "machine_s" in s:
            ends[s["step"]][s["rank"]] = s
    fractions = {}
    for (_, begin), (step, end) in pairwise(sorted(ends.items())):
        ours = sum(s["process_s"] - begin[rank]["process_s"] for rank, s in end.items())
        machine = _machine(end) - _machine(begin)
        fractions[step] = 1 - ours / machine if machine > 0 else 0.0
    return fractions


def _machine(ranks: dict[int, Sample]) -> float:
    return max(float(s["machine_s"]) for s in ranks.values())

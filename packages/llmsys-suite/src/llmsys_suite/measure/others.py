"""Use of the cores by other programs while the ranks train.

A rank that waits for a core may wait for a thread of the same run: a thread of gloo, of autograd or
of another rank. Only the kernel's counters for the whole machine distinguish the threads of the run
from other programs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from llmsys_suite.config import count_ranks_on_this_host
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import CORE_WAIT

#: A step is disturbed if its rank waited for a core for more than the fraction DISTURBED of the
#: step, and other programs used more than the fraction CROWDED of the busy CPU time.
DISTURBED, CROWDED = 0.05, 0.1


def read_busy_clocks(world: int) -> dict[str, float]:
    """Return the busy core seconds of this process and of the whole machine.

    The result is {} if the kernel does not count them, or if the ranks run on several machines.
    """
    if count_ranks_on_this_host(world) != world:
        return {}
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, *interrupts = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return {}
    ticks = user + nice + system + sum(interrupts)
    return {"process_s": time.process_time(), "machine_s": ticks / os.sysconf("SC_CLK_TCK")}


def compute_foreign_cpu_fractions(samples: list[Sample]) -> dict[int, float]:
    """Return, for each step but the first, the fraction of CPU time that other programs used.

    The CPU time is the busy time of all cores since the previous step of the same variant.
    `samples` are whole steps of one variant on one machine. Steps without clocks are left out.
    """
    by_step: dict[int, dict[int, Sample]] = defaultdict(dict)
    for s in samples:
        if "machine_s" in s:
            by_step[s["step"]][s["rank"]] = s
    fractions = {}
    for (_, before), (step, after) in pairwise(sorted(by_step.items())):
        run_seconds = sum(s["process_s"] - before[rank]["process_s"] for rank, s in after.items())
        machine_seconds = _get_machine_seconds(after) - _get_machine_seconds(before)
        fractions[step] = 1 - run_seconds / machine_seconds if machine_seconds > 0 else 0.0
    return fractions


def find_disturbed_rounds(steps: Iterable[Sample], fractions: Mapping[int, float]) -> set[int]:
    """Return the indices of the steps that other programs disturbed on any rank.

    `fractions` is the result of `compute_foreign_cpu_fractions`. Without a fraction, only the wait
    counts.
    """
    return {
        s["step"]
        for s in steps
        if s.get(CORE_WAIT, 0.0) > DISTURBED * s["seconds"]
        and fractions.get(s["step"], 1.0) > CROWDED
    }


def _get_machine_seconds(ranks: dict[int, Sample]) -> float:
    """Return the latest reading of the machine's clock among the samples of a step, by rank."""
    return max(float(s["machine_s"]) for s in ranks.values())

"""The short measurement behind algorithm="auto": a few all-reduces, timed, fitted, shared.

It runs once for a group that spans hosts, in its first automatic call. The algorithms take turns,
and the least time of each counts: what a busy machine adds to a time is never below zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from collectives.cost import CostModel, Sample, candidates

SIZES = (1 << 10, 32 << 10, 1 << 20)
REPEATS = 8


def tune(
    all_reduce: Callable[[str, Tensor], None], hosts: Sequence[int], store: Store, rank: int
) -> CostModel:
    """Time `all_reduce(algorithm, tensor)` and fit a model; every rank returns the same one."""
    samples, algorithms = [], candidates("all_reduce", hosts, shared=False)
    for size in SIZES:
        flat, times = torch.zeros(size // 4), {algorithm: float("inf") for algorithm in algorithms}
        # The first round pays for the connections.
        for counts in (False, *[True] * REPEATS):
            for algorithm in algorithms:
                start = time.perf_counter()
                all_reduce(algorithm, flat)
                if counts:
                    times[algorithm] = min(times[algorithm], time.perf_counter() - start)
        samples += [Sample("all_reduce", a, size, tuple(hosts), t) for a, t in times.items()]
    # One rank's clock decides, or ranks could choose differently.
    if rank == 0:
        store.set("model", json.dumps(asdict(CostModel.fit(samples))))
    return CostModel(**json.loads(store.get("model")))

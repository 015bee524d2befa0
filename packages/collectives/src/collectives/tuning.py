"""The short measurement behind algorithm="auto": a few all-reduces, timed, fitted, shared.

It runs once for a group that spans hosts, in its first automatic call.
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
REPEATS = 3


def tune(
    all_reduce: Callable[[str, Tensor], None], hosts: Sequence[int], store: Store, rank: int
) -> CostModel:
    """Time `all_reduce(algorithm, tensor)` and fit a model; every rank returns the same one."""
    samples = []
    for algorithm in candidates("all_reduce", hosts, shared=False):
        for size in SIZES:
            flat, times = torch.zeros(size // 4), []
            for _ in range(1 + REPEATS):
                start = time.perf_counter()
                all_reduce(algorithm, flat)
                times.append(time.perf_counter() - start)
            # The first one pays for the connection.
            middle = sorted(times[1:])[REPEATS // 2]
            samples.append(Sample("all_reduce", algorithm, size, tuple(hosts), middle))
    # One rank's clock decides, or ranks could choose differently.
    if rank == 0:
        store.set("model", json.dumps(asdict(CostModel.fit(samples))))
    return CostModel(**json.loads(store.get("model")))

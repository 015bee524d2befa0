"""One small product of matrices, timed beside whatever else is timed.

Notable: on a CPU by the clock of this thread, which stands still while another program has the
core; what a busy neighbor costs in shared caches, the yardstick pays too.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

_SIDE = {"cpu": 192, "cuda": 4096}


def clock(device: torch.device) -> float:
    """Seconds of this thread on a CPU, of the wall on a GPU, once it has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def queued_seconds() -> float:
    """For how long this process's first thread has been ready to run while others had its core."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def core_seconds(device: torch.device, tries: int = 3) -> float:
    """Return the smallest time of one product, in seconds."""
    a = _matrix(device)
    found = []
    for _ in range(tries):
        begin = clock(device)
        a @ a
        found.append(clock(device) - begin)
    return min(found)


def flops(device: torch.device) -> int:
    """Of one product."""
    return int(2 * _SIDE[device.type] ** 3)


@cache
def _matrix(device: torch.device) -> Tensor:
    n = _SIDE[device.type]
    return torch.randn(n, n, device=device, generator=torch.Generator(device).manual_seed(0))

"""A small matrix product that is timed beside other measurements as a reference.

On a CPU it is timed by the clock of this thread, which stops while another program has the core.
Contention for shared caches slows the reference matmul and the measurement alike.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor

_SIDE = {"cpu": 192, "cuda": 4096}


def clock(device: torch.device) -> float:
    """Return thread seconds on a CPU, or wall seconds after synchronizing a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def queued_seconds() -> float:
    """Return the seconds that the first thread of this process has waited for a core."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def core_seconds(device: torch.device, tries: int = 3) -> float:
    """Return the smallest time of one product, in seconds."""
    a = _matrix(device)
    seconds = []
    for _ in range(tries):
        begin = clock(device)
        a @ a
        seconds.append(clock(device) - begin)
    return min(seconds)


def flops(device: torch.device) -> int:
    """Return the FLOPs of one product."""
    return int(2 * _SIDE[device.type] ** 3)


@cache
def _matrix(device: torch.device) -> Tensor:
    n = _SIDE[device.type]
    return torch.randn(n, n, device=device, generator=torch.Generator(device).manual_seed(0))

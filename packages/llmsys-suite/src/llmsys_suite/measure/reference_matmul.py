"""The best rate of matrix products, and a small reference matmul timed with other measurements.

On a CPU the reference matmul is timed by the clock of this thread, which stops while another
program has the core. Contention for shared caches slows the reference matmul and the measurement
alike.
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


def product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Return the best rate of a large matrix product in FLOPs per second, as in a linear layer.

    In float16 a CPU without hardware support takes 25 times as long for a @ b as for a @ b.mT.
    """
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        begin = clock(device)
        a @ b.mT
        best = max(best, 2 * n**3 / (clock(device) - begin))
    return best


@cache
def _matrix(device: torch.device) -> Tensor:
    n = _SIDE[device.type]
    return torch.randn(n, n, device=device, generator=torch.Generator(device).manual_seed(0))

"""Core wait time and matmul throughput."""

from __future__ import annotations

import time
from functools import partial

import torch

from llmsys_suite.measure.interleaved import read_clock


def read_core_wait_seconds() -> float:
    """Return the seconds that the main thread of this process has waited for a core.

    The result is 0 if the kernel does not count these seconds.
    """
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def measure_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Return the highest rate, in FLOPs per second, of large matrix products within `seconds`.

    The clock is the CPU time of this thread, or on a CUDA device the wall time after synchronizing.
    The product is a @ b.mT, which linear layers compute. In float16, a CPU without hardware support
    takes 25 times as long for a @ b.
    """
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best_rate = 0.0
    read_seconds = partial(read_clock, device) if device.type == "cuda" else time.thread_time
    stop_time = time.perf_counter() + seconds
    while best_rate == 0.0 or time.perf_counter() < stop_time:
        start_time = read_seconds()
        a @ b.mT
        best_rate = max(best_rate, 2 * n**3 / (read_seconds() - start_time))
    return best_rate

"""Measurement of the time and memory of a run, on a GPU or a CPU."""

import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def measure_ms(run: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of one run: the median of `do_bench` on a GPU, one run on a CPU."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=5, rep=20, return_mode="median"))
    return measure_mean_ms(run)


def measure_graph_ms(run: Callable[[], Any]) -> float:
    """Return the median milliseconds of one run in a replayed CUDA graph."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(run, rep=20, return_mode="median"))


def measure_mean_ms(run: Callable[[], Any], passes: int = 1) -> float:
    """Return the mean milliseconds of several runs on a CPU."""
    start = time.perf_counter()
    for _ in range(passes):
        run()
    return 1e3 * (time.perf_counter() - start) / passes


def measure_peak_extra_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """Return the peak of allocated bytes during a run, minus the bytes allocated before.

    On a CPU the profiler counts every allocation and release, including those inside torch's
    kernels, so the result is reproducible.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    changes: list[int] = [
        e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(0, *itertools.accumulate(changes, initial=0))


def read_cpu_name() -> str:
    """Return the processor's name in /proc/cpuinfo, or the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

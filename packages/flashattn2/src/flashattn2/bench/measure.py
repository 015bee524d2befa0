"""Time and memory of a run, on a GPU or a CPU."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def time_ms(run: Callable[[], Any], device: str) -> float:
    """One turn: the median that Triton's do_bench finds on a GPU, one run elsewhere."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=5, rep=20, return_mode="median"))
    return elapsed_ms(run, 1, device)


def elapsed_ms(run: Callable[[], Any], passes: int, device: str) -> float:
    """All passes together."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(passes):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def peak_extra_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that torch's allocator gives out during a run beyond what it had before.

    Counted, not sampled: on a CPU every allocation and release that the profiler sees, those inside
    torch's own kernels among them.  So it is the same number every time.
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


def held_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, and the output."""
    held: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        keep(run().detach())
    return sum(held.values())


def memory_bytes(device: str) -> int:
    """What a GPU has, or half of what this machine has free."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return 1024 * int(line.split()[1]) // 2
    raise RuntimeError("/proc/meminfo has no MemAvailable; this bench needs Linux")

"""Time and memory of a run, on a GPU or a CPU."""

import ctypes
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
    """The most memory that a run holds beyond what was held before it.

    On a CPU (Linux) the growth of the resident set, whose high-water mark the kernel lets us reset.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    run()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmHWM")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory needs Linux")


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

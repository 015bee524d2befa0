"""The peak bytes of torch's allocator in a training step, from any code.

`memory_report` sees what operators allocate. This module sees every call to the allocator, so
that torch's DDP and FSDP2, whose buckets are allocated in C++, are counted in the same way as
this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from zero.memory import collect_tensors

STEPS = 2


def measure_peak_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]
) -> int:
    """Return the peak bytes of a training step after the first.

    The result is the bytes that persist between steps, each storage once, plus the peak of a
    step's allocations. On a GPU the latter is the CUDA allocator's peak. On a CPU it is the
    profiler's record of every allocation and release by this thread, not of resident pages. A
    tensor whose last reference is dropped by a backend's thread counts until its address is
    reused; the minimum of two steps excludes most of those.
    """
    loss(model).backward()
    optimizer.step()
    storages = {StorageWeakRef(s): s.nbytes() for s in _list_storages(model, optimizer)}
    optimizer.zero_grad()
    # Gradients are freed now, except those that are views of buckets.
    persistent = sum(nbytes for storage, nbytes in storages.items() if not storage.expired())

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    measure = _measure_cuda_peak if next(model.parameters()).is_cuda else _measure_cpu_peak
    return persistent + min(measure(step) for _ in range(STEPS))


def _measure_cpu_peak(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    options: dict[str, Any] = {"activities": activities, "acc_events": True}
    with torch.profiler.profile(**options, profile_memory=True) as profile:
        step()
    # A trace in JSON, from which the same events can be read, takes longer than the step.
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    memory = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            memory.append((event.start_time_ns, event.extra_fields))
    memory.sort(key=lambda entry: entry[0])
    return compute_peak((fields.ptr, fields.alloc_size) for _, fields in memory)


def compute_peak(events: Iterable[tuple[int, int]]) -> int:
    """Return the peak of live bytes in a sequence of (address, bytes).

    A release has negative bytes.
    """
    live: dict[int, int] = {}
    total = 0
    peak = 0
    for address, size in events:
        # An address that is allocated twice was released by another thread in between.
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        peak = max(peak, total)
    return peak


def _measure_cuda_peak(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _list_storages(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[torch.UntypedStorage]:
    """Return the storages of model, gradients and optimizer state, each once."""
    tensors = [t for kind in collect_tensors(model, optimizer).values() for t in kind]
    # ZeroRedundancyOptimizer keeps its state in the optimizer that it wraps.
    wrapped = getattr(optimizer, "optim", optimizer)
    state = [v for values in wrapped.state.values() for v in values.values()]
    tensors += [value for value in state if isinstance(value, Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {id(storage): storage for storage in (t.untyped_storage() for t in local)}
    return list(storages.values())

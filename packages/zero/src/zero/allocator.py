"""The most bytes that torch's own allocator held in a step, whoever allocated them and from where.

Unlike `memory_report`, which sees what operators make, this sees every call to the allocator, so
that torch's DDP and FSDP2, whose buckets are made in C++, are counted as ours are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero.memory import held_tensors

STEPS = 2


def peak_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]
) -> int:
    """The most bytes held at any time of a training step after the first.

    What lasts between steps is added up, each storage once. A step's own allocations are, on a GPU,
    the CUDA allocator's peak; on a CPU the profiler's record of every allocation and release by
    this thread, not of resident pages. A tensor that a thread of the backend lets go of last counts
    until its address is used again; the least of two steps leaves out most of those.
    """
    loss(model).backward()
    optimizer.step()
    kept = {StorageWeakRef(s): s.nbytes() for s in _storages(model, optimizer)}
    optimizer.zero_grad()
    # Gradients go, but for those that lie in buckets.
    lasting = sum(nbytes for storage, nbytes in kept.items() if not storage.expired())

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    cuda = next(model.parameters()).is_cuda
    return lasting + min((_cuda if cuda else _cpu)(step) for _ in range(STEPS))


def _cpu(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    options: dict[str, Any] = {"activities": activities, "acc_events": True}
    with torch.profiler.profile(**options, profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    return most_at_once((e["args"]["Addr"], e["args"]["Bytes"]) for e in memory)


def most_at_once(events: Iterable[tuple[int, int]]) -> int:
    """The most bytes live at once, of (address, bytes) in order; a release has negative bytes."""
    live: dict[int, int] = {}
    now = most = 0
    for address, size in events:
        # An address that is given out again was released unseen.
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            now += size
        most = max(most, now)
    return most


def _cuda(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _storages(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.UntypedStorage]:
    """Of everything that model and optimizer keep, and of gradients."""
    held = [t for tensors in held_tensors(model, optimizer).values() for t in tensors]
    # ZeroRedundancyOptimizer's state is in the optimizer that it wraps.
    wrapped = getattr(optimizer, "optim", optimizer)
    state = [v for values in wrapped.state.values() for v in values.values()]
    held += [value for value in state if isinstance(value, Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    return [*{id(s): s for s in (t.untyped_storage() for t in local)}.values()]

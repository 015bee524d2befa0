"""The most bytes that torch's own allocator held in a step, whoever allocated them and from where.

Unlike `memory_report`, which sees what operators make, this sees every call to the allocator, so
that torch's DDP and FSDP, whose buckets are made in C++, are counted as ours are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
BEGIN = "zero: counted from here"


def peak_bytes(
    build: Callable[[], T], step: Callable[[T], None], *, device: torch.device | str = "cpu"
) -> int:
    """The most bytes held in the second of two `step(build())`, what `build` made among them.

    The first step makes the optimizer's state. On a CPU this is an exact count of the allocations
    of this thread, not of resident pages; on a GPU the CUDA allocator's own.
    """
    if torch.device(device).type == "cuda":
        return _cuda(build, step)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as life:
        held = build()
        step(held)
        with torch.profiler.record_function(BEGIN):
            step(held)
    del held
    return _largest_total(_events(life))


def _cuda(build: Callable[[], T], step: Callable[[T], None]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    held = build()
    step(held)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(held)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _events(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _largest_total(events: list[dict[str, Any]]) -> int:
    """The largest running total after the mark; totals are since the process began to count."""
    begin = next(event["ts"] for event in events if event.get("name") == BEGIN)
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    first = memory[0]["args"]
    start = first["Total Allocated"] - max(first["Bytes"], 0)
    return int(max(e["args"]["Total Allocated"] for e in memory if e["ts"] >= begin) - start)

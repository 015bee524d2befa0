"""Operators of one profiled step and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmsys_suite.measure.interleaved import read_clock

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
SHOWN = 10


def profile_phases(
    phases: Mapping[str, Callable[[], None]], device: torch.device
) -> list[dict[str, Any]]:
    """Profile each phase of a step once; return a row per phase with its operators and fractions.

    `timer_ms` is the wall time of the phase, including the overhead of the profiler.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    rows = []
    for name, phase in phases.items():
        with profile(activities=activities, acc_events=True) as profiler:
            start_time = read_clock(device)
            phase()
            seconds = read_clock(device) - start_time
        summary = summarize(profiler.key_averages(), device.type)
        rows.append({"phase": name, "timer_ms": seconds * 1e3} | summary)
    return rows


def summarize(events: Any, device_type: str) -> dict[str, Any]:
    """Return the `SHOWN` operators with the largest self time, and the fraction of time per kind.

    Attention is recognized by its batched products, which no other part of the model uses.
    """
    # On a GPU the kernels are events too. They are excluded, because their time is also the device
    # time of the operators that launched them.
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    by_key = {event.key: event for event in operators if not event.is_user_annotation}
    if device_type == "cuda":
        self_us = {key: event.self_device_time_total for key, event in by_key.items()}
    else:
        # Exclude ranges such as "Optimizer.step", which are not operators.
        self_us = {k: e.self_cpu_time_total for k, e in by_key.items() if k.startswith("aten::")}
    total = sum(self_us.values()) or 1.0
    order = sorted((key for key in self_us if self_us[key]), key=lambda key: -self_us[key])[:SHOWN]
    softmax = sum(us for key, us in self_us.items() if "softmax" in key.lower())
    attention = sum(us for key, us in self_us.items() if "bmm" in key)
    products = sum(us for key, us in self_us.items() if key in PRODUCTS or "gemm" in key)
    return {
        "total_ms": total / 1e3,
        "product_share": products / total,
        "attention_product_share": attention / total,
        "softmax_share": softmax / total,
        "top": [
            {
                "operator": key.removeprefix("aten::"),
                "calls": by_key[key].count,
                "ms": self_us[key] / 1e3,
                "share": self_us[key] / total,
            }
            for key in order
        ],
    }

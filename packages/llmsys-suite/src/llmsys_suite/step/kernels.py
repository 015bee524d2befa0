"""Which operators take a step's time: one profiled step, beside what it takes unprofiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from llmsys_suite.measure.turns import now
from llmsys_suite.step.case import Case
from llmsys_suite.step.training import Step

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
SHOWN = 10


def by_phase(step: Step, trace: Path | None = None) -> list[dict[str, Any]]:
    """Return a row per phase of a warmed-up step: its operators and their fractions.

    `timer_ms` spans the profiler too. `trace` is where Chrome's trace of the step goes.
    """
    activities = [ProfilerActivity.CPU]
    if step.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    rows = []
    for phase, part in step.parts.items():
        with profile(activities=activities, acc_events=True) as seen:
            begin = now(step.device)
            part()
            seconds = now(step.device) - begin
        summary = summarize(seen.key_averages(), step.device.type)
        rows.append({"phase": phase, "timer_ms": seconds * 1e3} | summary)
    if trace is not None:
        with profile(activities=activities) as whole:
            step.timed()
        whole.export_chrome_trace(str(trace))
    rows[0] |= attention_flops(step.case)
    return rows


def summarize(events: Any, device_type: str) -> dict[str, Any]:
    """Return the operators with the largest self time, and the time per kind.

    Products of attention are those of batches of matrices, which nothing else here multiplies.
    """
    found = {event.key: event for event in events}
    if device_type == "cuda":
        own = {key: event.self_device_time_total for key, event in found.items()}
    else:
        # Ranges such as "Optimizer.step" are no operators.
        own = {k: e.self_cpu_time_total for k, e in found.items() if k.startswith("aten::")}
    total = sum(own.values()) or 1.0
    order = sorted((key for key in own if own[key]), key=lambda key: -own[key])[:SHOWN]
    softmax = sum(us for key, us in own.items() if "softmax" in key.lower())
    attention = sum(us for key, us in own.items() if "bmm" in key)
    products = sum(us for key, us in own.items() if key in PRODUCTS or "gemm" in key)
    return {
        "total_ms": total / 1e3,
        "top_operator": order[0],
        "top_calls": found[order[0]].count,
        "top_share": own[order[0]] / total,
        "product_share": products / total,
        "attention_product_share": attention / total,
        "softmax_share": softmax / total,
        "top": [
            {
                "operator": key.removeprefix("aten::"),
                "calls": found[key].count,
                "ms": own[key] / 1e3,
                "share": own[key] / total,
            }
            for key in order
        ],
    }


def attention_flops(case: Case) -> dict[str, Any]:
    """FLOPs of softmax and of attention's two products over all layers, scores held whole.

    Softmax takes five operations a score: maximum, difference, exponential, sum, quotient.
    """
    config = case.model
    scores = case.rows * config.num_heads * config.context**2 * config.num_layers
    head_dim = config.d_model // config.num_heads
    return {"softmax_flops": 5 * scores, "attention_product_flops": 4 * scores * head_dim}

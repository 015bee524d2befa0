"""Statistics of the raw training samples: step times, ratios, losses and phases."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from llmsys_suite.folder import Sample

#: Value of `phase` in the sample of a complete step.
WHOLE_STEP = "step"
PHASES = ("forward", "backward", "communication", "optimizer")
#: The variant in which rank 0 alone trains on all rows.
SINGLE = "single process"
#: The variant with which all other variants are compared, step by step.
PEER = "torch DDP"
SERVER = "parameter server"
#: Key of the seconds for which a rank waited for a core. The folder's format fixes this name.
CORE_WAIT = "queued_s"
#: Key of the processor seconds of all threads of a rank in a step.
PROCESSOR = "processor_s"
#: Variants in the order in which they run; `variants.VARIANTS` has their classes.
VARIANT_NAMES = (
    SINGLE,
    PEER,
    "ddp naive",
    "ddp flat",
    "ddp overlapped",
    "ddp bucketed",
    "ddp shared memory",
    "zero 1",
    "zero 2",
    "fsdp",
    "torch FSDP2",
    SERVER,
)


def summarize(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return a row per variant: the slowest rank's step time, phases, ratio to the peer, loss."""
    by_variant = compute_step_seconds(samples)
    losses = compute_loss_curves(samples)
    rows = []
    for name, steps in by_variant.items():
        row: dict[str, Any] = {"variant": name, "step_ms": statistics.median(steps.values()) * 1e3}
        row |= compute_ratio_row(steps, by_variant.get(PEER, {}))
        fractions = compute_phase_fractions(samples, name)
        row |= {f"{phase}_share": fractions.get(phase, 0.0) for phase in PHASES}
        row["final_loss"] = losses[name][-1]
        received = compute_received_bytes(samples, name)
        if received is not None:
            row["wire_bytes"] = received
        rows.append(row)
    return rows


def count_ranks(variant: str, world: int) -> int:
    """Return the number of ranks that train a variant."""
    return 1 if variant == SINGLE else world


def compute_utilization(flops_causal: int, peak: float, step_ms: float, ranks: int) -> float:
    """Return causal FLOPs per second and rank, divided by `peak`, the rate of a matrix product."""
    return float(flops_causal / (step_ms / 1e3) / (ranks * peak))


def compute_received_bytes(samples: list[Sample], variant: str) -> float | None:
    """Return the mean bytes per step that sockets received on the rank that received the most.

    The result is None if sockets are not counted.
    """
    by_rank: dict[int, list[int]] = defaultdict(list)
    for s in samples:
        if s["variant"] == variant and "received" in s and not s["warmup"]:
            by_rank[s["rank"]].append(s["received"])
    return max((statistics.mean(counts) for counts in by_rank.values()), default=None)


def compute_step_seconds(samples: list[Sample]) -> dict[str, dict[int, float]]:
    """Return the seconds of the slowest rank by variant and step, without warm-up steps."""
    slowest: dict[str, dict[int, float]] = defaultdict(dict)
    for s in samples:
        if s["phase"] == WHOLE_STEP and not s["warmup"]:
            steps = slowest[s["variant"]]
            steps[s["step"]] = max(steps.get(s["step"], 0.0), s["seconds"])
    return dict(slowest)


def compute_needed_seconds(step: Sample) -> float:
    """Return the duration of a step minus the time for which its rank waited for a core.

    The result is at least a hundredth of the duration, because the counter of waits is read before
    and after the step and may include waits outside of it.
    """
    seconds: float = step["seconds"]
    return max(seconds - step[CORE_WAIT], 0.01 * seconds)


def compute_loss_curves(samples: list[Sample]) -> dict[str, list[float]]:
    """Return the mean loss over ranks of each step by variant, including warm-up steps."""
    parts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if s["phase"] == WHOLE_STEP:
            parts[s["variant"]][s["step"]].append(s["loss"])
    return {
        name: [statistics.mean(steps[step]) for step in sorted(steps)]
        for name, steps in parts.items()
    }


def compute_ratio_row(steps: dict[int, float], peer: dict[int, float]) -> dict[str, float]:
    """Return the median, p10 and p90 of time / peer's time over the common steps, {} if none."""
    ratios = sorted(steps[step] / peer[step] for step in steps if step in peer)
    if not ratios:
        return {}
    return {
        "ratio_p50": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
    }


def compute_phase_fractions(samples: list[Sample], variant: str) -> dict[str, float]:
    """Return the fraction of the step time in each phase, over all ranks and measured steps."""
    totals: dict[str, float] = defaultdict(float)
    for s in samples:
        if s["variant"] == variant and not s["warmup"]:
            totals[s["phase"]] += s["seconds"]
    step_total = totals.pop(WHOLE_STEP)
    return {phase: seconds / step_total for phase, seconds in totals.items()}

"""Checks that can fail: each number of a report held against a second way of getting it.

Every check is a pure function of what was predicted and what was recorded, so that a tampered
record is caught when the report is made again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.samples import WHOLE_STEP, loss_curves, step_seconds, utilisation
from llmsys_suite.stages.train import SINGLE, VARIANTS

#: Sums in another order move a float32 loss in its last digits (1e-7); Adam divides small gradients
#: by their own size and lets that grow over the steps. A wrong gradient is far beyond this.
LOSS_TOLERANCE = 2e-4
#: Shards of equal length may carry a few elements of padding.
PADDING_TOLERANCE = 1e-4
#: What a step spends outside its phases: Python between them.
PHASES_TOLERANCE = 0.05

#: What operators take for the length of their run is not predicted; a CPU's kernels take more.
PEAK_TOLERANCE = {"cpu": 0.10, "gpu": 0.05}


@dataclass(frozen=True)
class Check:
    """Two numbers that must agree: `actual` within `tolerance` (relative) of `expected`."""

    name: str
    expected: float
    actual: float
    tolerance: float
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values, for checks.json."""
        return asdict(self)


def equal(name: str, expected: float, actual: float, tolerance: float = 0.0) -> Check:
    """`actual` is `expected`, to a relative tolerance."""
    passed = abs(actual - expected) <= tolerance * abs(expected)
    return Check(name, expected, actual, tolerance, passed and math.isfinite(actual))


def at_most(name: str, limit: float, actual: float) -> Check:
    """`actual` lies above zero and not above `limit`."""
    return Check(name, limit, actual, 0.0, 0.0 < actual <= limit)


def audit(
    config: RunConfig, plan: dict[str, Any], train: dict[str, Any], samples: list[Sample]
) -> list[Check]:
    """All checks of a run, in the order of a report."""
    samples = [s for s in samples if s["stage"] == "train"]
    return [
        equal("predicted parameters = the model's", plan["parameters"], plan["actual_parameters"]),
        equal("analytic FLOPs = counted FLOPs", plan["step_flops_full"], plan["counted_flops"]),
        equal(
            "predicted peak memory = a real step's",
            plan["training_peak_bytes"],
            plan["measured_peak_bytes"],
            PEAK_TOLERANCE["cpu" if config.device == "cpu" else "gpu"],
        ),
        *_tokens(config, samples),
        *_completeness(config, train, samples),
        *_gradient_bytes(plan, train),
        *_times(train, samples),
        *_utilisation(config, plan, train),
        *_losses(samples),
    ]


def _tokens(config: RunConfig, samples: list[Sample]) -> Iterator[Check]:
    steps = config.warmup + config.steps
    for name in _variants(samples):
        seen = sum(s["tokens"] for s in samples if _is_step(s, name))
        yield equal(
            f"{name}: tokens = steps x global batch",
            steps * config.rows * config.context,
            seen,
        )


def _completeness(
    config: RunConfig, train: dict[str, Any], samples: list[Sample]
) -> Iterator[Check]:
    for row in train["rows"]:
        name = row["variant"]
        ranks = 1 if VARIANTS[name].alone else config.world
        expected = ranks * (config.warmup + config.steps)
        found = {(s["rank"], s["step"]) for s in samples if _is_step(s, name)}
        yield equal(f"{name}: no rank's samples are missing", expected, len(found))


def _gradient_bytes(plan: dict[str, Any], train: dict[str, Any]) -> Iterator[Check]:
    for name, handed in train["gradient_bytes"].items():
        yield equal(
            f"{name}: predicted gradient bytes = bytes handed to the collective",
            plan["gradient_bytes"],
            handed,
            PADDING_TOLERANCE,
        )


def _times(train: dict[str, Any], samples: list[Sample]) -> Iterator[Check]:
    whole = step_seconds(samples)
    for row in train["rows"]:
        name = row["variant"]
        slowest = sorted(whole[name].values())
        middle = len(slowest) // 2
        median = (slowest[middle] + slowest[-middle - 1]) / 2
        yield equal(f"{name}: step time = the slowest rank's", median * 1e3, row["step_ms"], 1e-9)
        covered = statistics.median(_covered_by_phases(samples, name))
        yield equal(f"{name}: phases sum to the step", 1.0, covered, PHASES_TOLERANCE)


def _covered_by_phases(samples: list[Sample], variant: str) -> Iterator[float]:
    """The share of each rank's each step that lies in a phase.

    A rank that loses its core between two phases has one such step; a phase that is not recorded
    is missing from all of them.
    """
    steps: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        if sample["variant"] == variant and not sample["warmup"]:
            steps.setdefault((sample["rank"], sample["step"]), []).append(sample)
    for parts in steps.values():
        whole = sum(s["seconds"] for s in parts if s["phase"] == WHOLE_STEP)
        yield sum(s["seconds"] for s in parts if s["phase"] != WHOLE_STEP) / whole


def _utilisation(config: RunConfig, plan: dict[str, Any], train: dict[str, Any]) -> Iterator[Check]:
    for row in train["rows"]:
        ranks = 1 if VARIANTS[row["variant"]].alone else config.world
        mfu = utilisation(plan, row["step_ms"], ranks)
        yield at_most(f"{row['variant']}: MFU in % of the measured peak", 100.0, 100 * mfu)


def _losses(samples: list[Sample]) -> Iterator[Check]:
    curves = loss_curves(samples)
    reference = curves[SINGLE]
    for name, curve in curves.items():
        if name == SINGLE:
            continue
        if len(curve) != len(reference):
            label = f"{name}: as many losses as one process's"
            yield equal(label, len(reference), len(curve))
            continue
        worst = max(zip(reference, curve, strict=True), key=_distance)
        yield equal(f"{name}: every loss = one process's", *worst, LOSS_TOLERANCE)
    yield at_most("the loss falls: last over first", 1.0, reference[-1] / reference[0])


def _distance(pair: tuple[float, float]) -> float:
    expected, actual = pair
    return abs(actual - expected) / abs(expected) if math.isfinite(actual) else math.inf


def _variants(samples: list[Sample]) -> list[str]:
    return list(dict.fromkeys(s["variant"] for s in samples))


def _is_step(sample: Sample, variant: str) -> bool:
    return bool(sample["variant"] == variant and sample["phase"] == WHOLE_STEP)

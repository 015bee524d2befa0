"""Checks of bytes: the plan compared with the counts of packages, shared memory and sockets.

All are pure functions of records, like those of `training`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from llmsys_suite.audit.check import Check, worst_equal
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import LINK_RATE, LOCAL, WHOLE_STEP
from llmsys_suite.stages.results import Plan, Train

#: Smallest fraction of four bits per element that entropy coding leaves.
CODED = 0.5
#: Upper bound on the header bytes per tensor and sending rank.
HEAD_BYTES = 1024


def checks(
    config: RunConfig, plan: Plan, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    """Yield checks of bytes passed to collectives, summed in shared memory and received."""
    counts = dict(train.gradient_bytes)
    if LOCAL in counts:
        yield from _streamed(config, plan.gradient_bytes, counts.pop(LOCAL))
    handed = [(plan.gradient_bytes, b, n) for n, b in counts.items()]
    if handed:
        # Shards of equal length may contain a few elements of padding.
        yield worst_equal(
            "gradient bytes handed over",
            "each package's count",
            "plan",
            handed,
            1e-3 if plan.gradient_bytes < 1e6 else 1e-4,
        )
    for name, probed in evidence["probe"]["variants"].items():
        for rank, (planned, summed) in enumerate(
            zip(probed["planned_shared"], probed["shared"], strict=True)
        ):
            if planned:
                yield Check(
                    f"{name}: bytes summed in shared memory, rank {rank}",
                    "announced in the arena",
                    "plan",
                    planned,
                    summed,
                    planned,
                    1.001 * planned + HEAD_BYTES,
                )
    if not evidence["sockets_count"]:
        return
    yield from _link(config, plan, train, samples, evidence)
    heads = _heads(config, evidence["counted"]["tensors"])
    for name, probed in evidence["probe"]["variants"].items():
        for rank, received in enumerate(probed["received"]):
            low, high = probed["planned_wire"][rank]
            yield Check(
                f"{name}: bytes received, rank {rank}",
                "the kernel's sockets",
                "plan",
                low,
                received,
                0.99 * low - 64,
                1.01 * high + heads,
            )


def _streamed(config: RunConfig, gradient_bytes: int, counted: float) -> Iterator[Check]:
    """Yield the check of DiLoCo: a tenth of the model every fifth step in four bits per element."""
    steps = config.warmup + config.steps
    most = _fragment(gradient_bytes) * (steps // 5) / steps
    yield Check(
        f"{LOCAL}: bytes pushed per step",
        "the worker's count",
        "four bits of 32",
        most,
        counted,
        CODED * most,
        1.01 * most + 64,
    )


def _fragment(gradient_bytes: int) -> float:
    return gradient_bytes / 10 * (1 / 8 + 1 / 1024)


def _heads(config: RunConfig, tensors: int) -> int:
    """Return the bytes of a ring, which passes each tensor on once per other rank, with headers."""
    return HEAD_BYTES * tensors * max(1, config.world - 1)


def _link(
    config: RunConfig, plan: Plan, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    """Compare bytes per step with the probe, and the computing fraction with the samples."""
    pairs, wall = [], defaultdict[tuple[str, str], float](float)
    for s in samples:
        if not s["warmup"]:
            wall[s["variant"], s["phase"]] += s["seconds"]
    for row in train.rows:
        if "link_ms" not in row:
            continue
        name, received = row["variant"], row["wire_bytes"]
        heads = _heads(config, 1 if name == LOCAL else evidence["counted"]["tensors"])
        low = high = max(evidence["probe"]["variants"][name]["received"])
        if name == LOCAL:
            # A pull follows every fifth step; a push to a server may arrive after the step.
            pulls = (config.warmup + config.steps - 1) // 5 - (config.warmup - 1) // 5
            low = CODED * _fragment(plan.gradient_bytes) * pulls / config.steps
            high = _fragment(plan.gradient_bytes) * (config.steps // 5 + 1) / config.steps
            high = high * max(1, config.world - 1) + (not config.warmup) * plan.gradient_bytes
        yield Check(
            f"{name}: bytes received a step of training",
            "the kernel's sockets",
            "four bits of 32" if name == LOCAL else "the probe's",
            high,
            received,
            0.98 * low - heads,
            1.02 * high + heads,
        )
        whole = wall[name, WHOLE_STEP]
        computing = row["step_ms"] / 1e3 * (1 - wall[name, "communication"] / whole)
        fraction = computing / (computing + received / (LINK_RATE / 8))
        pairs.append((fraction, row["link_computing_share"], name))
    if pairs:
        yield worst_equal(
            "computing over a slow link", "summary", "bytes counted, over the rate", pairs, 1e-6
        )

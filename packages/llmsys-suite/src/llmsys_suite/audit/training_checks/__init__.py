"""Checks of `plan` and `train`: pure functions of a `Record`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.training_checks import data, plan, times, weights, wire
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.results import Plan, Train

#: The groups of checks in the order of the report.
GROUPS: tuple[Callable[[Record], Iterator[Check]], ...] = (
    plan.counts,
    plan.memory,
    plan.communication,
    plan.rates,
    data.configuration,
    data.text,
    data.rows,
    weights.initial_weights,
    weights.probed_step,
    weights.final_weights,
    weights.stored_tensors,
    weights.losses,
    times.steps,
    times.reported_times,
    times.rounds,
    times.peers,
    times.phases,
    wire.shared_memory,
    wire.sockets,
)


def checks(
    config: RunConfig, plan: Plan, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    """Yield the check that a record is complete, and all other checks only if it is complete."""
    samples = [s for s in samples if s["stage"] == "train"]
    record = Record(config, plan, train, samples, evidence)
    missing = record.missing()
    yield Sources("records", "the configuration").none("results and samples of every step", missing)
    if not missing:
        for group in GROUPS:
            yield from group(record)

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
    plan.check_counts,
    plan.check_memory,
    plan.check_communication,
    plan.check_rates,
    data.check_configuration,
    data.check_text,
    data.check_rows,
    weights.check_initial_weights,
    weights.check_probed_step,
    weights.check_final_weights,
    weights.check_stored_tensors,
    weights.check_losses,
    times.check_steps,
    times.check_reported_times,
    times.check_rounds,
    times.check_peers,
    times.check_phases,
    wire.check_shared_memory,
    wire.check_sockets,
)


def check_training(
    config: RunConfig, plan: Plan, train: Train, samples: list[Sample], evidence: dict[str, Any]
) -> Iterator[Check]:
    """Yield the check that a record is complete, and all other checks only if it is complete."""
    samples = [s for s in samples if s["stage"] == "train"]
    record = Record(config, plan, train, samples, evidence)
    missing = record.describe_missing()
    records = Sources("records", "the configuration")
    yield records.check_none("results and samples of every step", missing)
    if not missing:
        for group in GROUPS:
            yield from group(record)

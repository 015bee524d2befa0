"""Checks of the text, and of the rows that every rank reads in every step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.config import RunConfig
from llmsys_suite.measure.samples import count_ranks

#: Allowed fraction of held-out windows that occur in the training text. In Python's standard
#: library, none of 64 windows does. Boilerplate can repeat a few.
REPEATED = 0.1


def check_configuration(record: Record) -> Iterator[Check]:
    """Compare config.json with the configuration that the ranks had during the audit."""
    stored = get_json_values(record.config)
    different = [name for name in stored if stored[name] != record.evidence["config"].get(name)]
    yield Sources("config.json", "the ranks' configuration").check_none("configuration", different)


def get_json_values(config: RunConfig) -> dict[str, Any]:
    """Return the fields of a configuration as they are read from a JSON file."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_json()))
    return values


def check_text(record: Record) -> Iterator[Check]:
    """Check the text of every rank, and that few held-out windows occur in the training text."""
    split = record.evidence["split"]
    different = [
        f"{part} text of rank {rank}"
        for rank, digests in enumerate(split["ranks"])
        for part, ours, file in zip(("training", "held-out"), digests, split["files"], strict=True)
        if ours != file
    ]
    tokens = Sources("digests of its tokens", "the files, read again")
    yield tokens.check_none("text of every rank", different)
    fraction = split["repeated"] / split["windows"]
    windows = Sources("the fraction of its windows in the training text", "two disjoint texts")
    name = "held-out text is not training text"
    yield windows.check_between(name, 0.0, fraction, 0.0, REPEATED)


def check_rows(record: Record) -> Iterator[Check]:
    """Compare the variants with those of the audit, and the rows of every step with its sampler."""
    yield compare_rows("variants", record.probes, [row["variant"] for row in record.train.rows])
    foreign: list[str] = []
    for name in record.probes:
        digests: dict[int, list[str]] = defaultdict(list)
        for rank in range(count_ranks(name, record.config.world)):
            for sample in record.steps[name, rank]:
                digests[sample["step"]] += sample["row_digests"]
        for step, expected in enumerate(record.evidence["row_digests"]):
            if digests[step] != expected:
                foreign.append(f"{name} step {step}")
    sampler = Sources("digests of each rank's batches", "the audit's independent sampler")
    yield sampler.check_none("ranks' rows are the global batch", foreign)

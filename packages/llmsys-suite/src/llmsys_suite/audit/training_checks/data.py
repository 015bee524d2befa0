"""Checks of the text, and of the rows that every rank reads in every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import ranks_of

#: Allowed fraction of held-out windows that occur in the training text. In the standard library one
#: in 64 is boilerplate.
REPEATED = 0.1


def text(record: Record) -> Iterator[Check]:
    """Check that every rank has the text of the files, and that the parts are disjoint."""
    split = record.evidence["split"]
    different = [
        f"{part} text of rank {rank}"
        for rank, digests in enumerate(split["ranks"])
        for part, ours, file in zip(("training", "held-out"), digests, split["files"], strict=True)
        if ours != file
    ]
    tokens = Sources("digests of its tokens", "the files, read again")
    yield tokens.none("text of every rank", different)
    fraction = split["repeated"] / split["windows"]
    windows = Sources("windows of it", "those found in the training text")
    yield windows.near("held-out text is not training text", fraction, REPEATED)


def rows(record: Record) -> Iterator[Check]:
    """Compare the rows of every step and rank with those of the independent sampler."""
    yield same_rows("variants", record.probes, [row["variant"] for row in record.train.rows])
    expected = record.evidence["row_digests"]
    missing: list[str] = []
    foreign: list[str] = []
    for row in record.train.rows:
        name = row["variant"]
        for step, by_rank in enumerate(_samples_by_step(record, name)):
            missing += [
                f"{name} step {step} rank {rank}"
                for rank, recorded in enumerate(by_rank)
                if len(recorded) != 1 or recorded[0]["warmup"] != (step < record.config.warmup)
            ]
            first = [recorded[0] for recorded in by_rank if recorded]
            if [digest for s in first for digest in s["row_digests"]] != expected[step]:
                foreign.append(f"{name} step {step}")
    samples = Sources("samples", "the configuration's ranks and steps")
    yield samples.none("every step of every rank", missing)
    sampler = Sources("digests of each rank's batches", "the audit's independent sampler")
    yield sampler.none("ranks' rows are the global batch", foreign)


def _samples_by_step(record: Record, name: str) -> list[list[list[Sample]]]:
    """Return the samples of a variant by step and rank."""
    ranks = range(ranks_of(name, record.config.world))
    by_rank_and_step: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for rank in ranks:
        for s in record.steps[name, rank]:
            by_rank_and_step[rank, s["step"]].append(s)
    steps = range(record.num_steps)
    return [[by_rank_and_step[rank, step] for rank in ranks] for step in steps]

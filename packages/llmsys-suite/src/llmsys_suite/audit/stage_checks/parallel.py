"""Checks of `parallel`: splits against one process in float64, and schedules by their events."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite import results, splits
from llmsys_suite.audit import events, reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import in_float64, on_device
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import (
    CLOCK,
    GRADIENT,
    LOSS,
    REPLAYED_LOSS,
    WEIGHT_CHANGE,
    loss_tolerance,
)
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split import TRAINED
from llmsys_suite.stages import parallel
from llmsys_suite.variants.initial_weights import seeded


@dataclass(frozen=True)
class Exact:
    """Gradients of the first step, weight changes and losses of one process in float64."""

    start: dict[str, Tensor]
    gradients: dict[str, Tensor]
    moved: dict[str, Tensor]
    losses: list[float]


def checks(run: Run, result: results.Parallel | results.Skipped) -> Iterator[Check]:
    """Repeat a step and the training of every split, and check the values that it reports."""
    rows = run.gather(None if isinstance(result, results.Skipped) else result.rows)[0]
    possible = [n for n, split in splits.SPLITS.items() if not split.why_not(run, run.model)]
    if rows is None:
        skipped = Sources("the model and the ranks", "a stage that is skipped")
        yield skipped.none("possible splits", possible if run.world > 1 else ())
        return
    yield same_rows("splits", possible, [row["split"] for row in rows])
    exact = _one_process(run)
    for row in rows:
        name = row["split"]
        # The numbers of a split are checked in float32, even if the run uses another dtype.
        with run.in_float32():
            split = splits.SPLITS[name](run, run.model)
            with events.recorded() as passes:
                split.step(*run.batch(0))
            numbers = list(_numbers(run, name, split, exact))
        yield from numbers
        yield from _schedule(run, name, split, passes)
        yield from _reported(run, row, split, exact)


def _one_process(run: Run) -> Exact:
    """Train in float64 on the whole batch; each rank differentiates a part of the rows."""
    config = run.config
    text, _ = read_parts(config)
    start = trained = in_float64(seeded(run, run.model))
    optimizer = reference.AdamW(start, config.learning_rate)
    losses = []
    gradients = []
    for step in range(TRAINED):
        batch = reference.batch(text, config.rows, config.context, config.seed, step)
        tokens, targets = (part.chunk(run.world)[run.rank] for part in on_device(run, batch))
        part_loss, slopes = reference.gradients(trained, tokens, targets, run.model.num_heads)
        loss = torch.tensor(part_loss, dtype=torch.float64, device=run.device)
        for mean in (loss, *slopes.values()):
            dist.all_reduce(mean)
            mean /= run.world
        trained = optimizer.step(trained, slopes)
        losses.append(float(loss))
        gradients.append(slopes)
    moved = {name: trained[name] - w for name, w in start.items()}
    return Exact(start, gradients[0], moved, losses)


def _numbers(run: Run, name: str, split: splits.Split, exact: Exact) -> Iterator[Check]:
    """Compare the gradients and the trained weights on every rank."""
    first = reference.furthest(split.gradients(), exact.gradients)
    split.train(run)
    after = {n: w.double() - exact.start[n] for n, w in split.weights().items()}
    distances = run.gather((first, reference.furthest(after, exact.moved)))
    every_rank = Sources("every rank", "float64")
    for side, kind, tolerance in (
        (0, "gradients", GRADIENT),
        (1, "weight change of the training", WEIGHT_CHANGE * math.sqrt(TRAINED)),
    ):
        ranks = [(both[side][0], f"rank {r} {both[side][1]}") for r, both in enumerate(distances)]
        yield every_rank.all_near(f"{name}: {kind}", ranks, tolerance)


def _schedule(
    run: Run, name: str, split: splits.Split, passes: list[events.Event]
) -> Iterator[Check]:
    """Compare the passes in flight and the idle slots with the schedule of the same name."""
    stages = len({stage for _, stage, _ in passes})
    by_rank = run.gather((events.most_in_flight(passes), stages))
    microbatches = getattr(split, "microbatches", 1)
    in_flight = []
    for rank, (most, _) in enumerate(by_rank):
        expected = events.expected_in_flight(name, rank, run.world, microbatches)
        if expected is not None:
            in_flight.append((expected, most, f"rank {rank}"))
    if in_flight:
        order = Sources("events of a step", f"the schedule {name.partition('(')[2].rstrip(')')}")
        yield order.all_equal(f"{name}: passes in flight", in_flight)
        per_rank = 2 if "interleaved" in name else 1
        stages_by_rank = [(per_rank, n, f"rank {rank}") for rank, (_, n) in enumerate(by_rank)]
        yield order.all_equal(f"{name}: stages per rank", stages_by_rank)


def _reported(run: Run, row: results.Row, split: splits.Split, exact: Exact) -> Iterator[Check]:
    """Compare the losses, the bubble and the times of a row."""
    name = row["split"]
    in_float64 = Sources("reported", "float64 and AdamW written out")
    for key, expected, tolerance in (
        ("loss", exact.losses[0], REPLAYED_LOSS),
        ("single_loss", exact.losses[0], REPLAYED_LOSS),
        ("trained_loss", exact.losses[-1], LOSS * math.sqrt(TRAINED)),
    ):
        allowed = loss_tolerance(run.config, tolerance)
        yield in_float64.equal(f"{name}: {key}", expected, row[key], allowed)
    slots = Sources("reported", "slots of a schedule written out")
    yield slots.equal(f"{name}: bubble", _bubble(split, run.world), row["bubble"], 1e-9)
    pairs = zip(row["seconds"], row["clocked_s"], strict=True)
    # In some iterations another program takes the core between the two readings.
    ratios = sorted((a / b for a, b in pairs), key=lambda ratio: abs(ratio - 1))
    clock = Sources("iterations", "another clock around each")
    yield clock.equal(f"{name}: time", 1, ratios[len(ratios) // 4], CLOCK)
    median_ms = 1e3 * float(np.median(row["seconds"]))
    numpys = Sources("reported", "numpy's, of all iterations")
    yield numpys.equal(f"{name}: median iteration", median_ms, row["iteration_ms"], 1e-9)
    stage = Sources("reported", "the stage")
    yield stage.equal(f"{name}: iterations", parallel.ITERATIONS, len(row["seconds"]))


def _bubble(split: splits.Split, ranks: int) -> float:
    """Return the fraction of idle slots if each rank starts one slot after the previous rank."""
    if not isinstance(split, splits.PipelineModel):
        return 0.0
    work = split.microbatches * split.stages_per_rank
    busy = [range(rank, rank + work) for rank in range(ranks)]
    slots = max(slots.stop for slots in busy)
    return 1 - sum(map(len, busy)) / (slots * ranks)

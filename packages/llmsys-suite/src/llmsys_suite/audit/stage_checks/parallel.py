"""Checks of `parallel`: splits against one process in float64, schedules by their passes.

GPipe and 1F1B compute the same gradients. They differ only in the order of forward and backward
passes: 1F1B runs a backward pass as soon as it can, so that fewer microbatches are in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import accounting.plain
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from llmsys_suite import results
from llmsys_suite.audit import reference, tolerances
from llmsys_suite.audit.check import Check, Sources, compare_rows, select_clock_ratio
from llmsys_suite.audit.inputs import get_float64_parameters, get_num_heads, move_to_device
from llmsys_suite.audit.probe import RATE
from llmsys_suite.audit.text import read_parts
from llmsys_suite.config import Layout, RunConfig, find_group_size, get_size
from llmsys_suite.folder import RunFolder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split_model import SplitModel
from llmsys_suite.variants.initial_weights import build_seeded_model

#: Number of timed steps of every split.
ITERATIONS = 10
#: Index of the step whose loss is the trained loss of a split.
TRAINED = 2


@dataclass(frozen=True)
class Exact:
    """Initial weights, gradients of the first step and losses of one process in float64."""

    start: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]


def check_records(folder: RunFolder, result: results.Parallel | results.Skipped) -> Iterator[Check]:
    """Check the rows of the table, the bubbles, and the figures that follow from timings."""
    possible = _build_layouts(folder.config)
    if isinstance(result, results.Skipped):
        skipped = Sources("the model and the ranks", "a stage that is skipped")
        yield skipped.check_none("possible splits", possible if folder.config.world > 1 else ())
        return
    yield compare_rows("splits", possible, [row["split"] for row in result.rows])
    for row in result.rows:
        yield from _check_times(folder.config, row, possible[row["split"]])


def _build_layouts(config: RunConfig) -> dict[str, Layout]:
    """Return the layouts that fit the model, independently of the stage's list."""
    size, world = get_size(config.size), config.world
    group = find_group_size(size, world)
    layouts = {
        "pipeline (GPipe)": Layout(pipeline=world, schedule="GPipe"),
        "pipeline (1F1B)": Layout(pipeline=world),
        "tensor (Megatron)": Layout(tensor=world),
    }
    if group > 1:
        layouts["data x tensor"] = Layout(data=world // group, tensor=group)
    return {
        n: layout for n, layout in layouts.items() if not layout.explain_refusal(size, config.rows)
    }


def check_stage(run: Run, result: results.Parallel | results.Skipped) -> Iterator[Check]:
    """Take an SGD step with every split, and check its gradients, schedule and reported losses."""
    rows = run.gather(None if isinstance(result, results.Skipped) else result.rows)[0]
    if rows is None:
        return
    possible = _build_layouts(run.config)
    exact = _train_one_process(run)
    for row in rows:
        name = row["split"]
        layout = possible[name]
        # Gradients of a split are checked in float32, even if the run uses another dtype.
        with run.in_float32(), record_passes() as passes:
            checks = [*_check_first_step(run, name, layout, exact)]
        yield from checks
        yield from _check_schedule(run, name, layout, passes)
        yield from _check_losses(run, row, exact)


def _train_one_process(run: Run) -> Exact:
    """Train in float64 on the global batch; each rank computes gradients of a part of the rows."""
    config = run.config
    text, _ = read_parts(config)
    start = trained = get_float64_parameters(build_seeded_model(run, run.model))
    optimizer = reference.AdamW(start, config.learning_rate)
    losses = []
    gradients = []
    for step in range(1 + TRAINED):
        batch = reference.draw_batch(text, config.rows, config.context, config.seed, step)
        tokens, targets = (part.chunk(run.world)[run.rank] for part in move_to_device(run, batch))
        part_loss, averaged = reference.compute_gradients(
            trained, tokens, targets, get_num_heads(config)
        )
        loss = torch.tensor(part_loss, dtype=torch.float64, device=run.device)
        for tensor in (loss, *averaged.values()):
            dist.all_reduce(tensor)
            tensor /= run.world
        trained = optimizer.step(trained, averaged)
        losses.append(float(loss))
        gradients.append(averaged)
    return Exact(start, gradients[0], losses)


def _check_first_step(run: Run, name: str, layout: Layout, exact: Exact) -> Iterator[Check]:
    """Compare the weights of all ranks, and their change in one SGD step, with one process."""
    # SGD's foreach implementation does not mix DTensors with plain tensors.
    make = partial(torch.optim.SGD, lr=RATE, foreach=False)
    split = SplitModel(run, run.model, layout, make)
    split.step(*split.draw_batch(0))
    # A split that leaves whole weights on every rank computes the same gradients.
    weights = Sources("elements on all ranks", "one process and the layout")
    yield weights.check_equal(
        f"{name}: split weights",
        count_expected_elements(exact.start, layout),
        sum(run.gather(sum(_get_local(p).numel() for p in split.model.parameters()))),
    )
    moved = {n: (exact.start[n] - w.double()) / RATE for n, w in split.gather_weights().items()}
    floor = reference.compute_rounding_floor(exact.gradients)
    distances = run.gather(reference.find_largest_distance(moved, exact.gradients, floor))
    ranks = [(distance, f"rank {rank} {where}") for rank, (distance, where) in enumerate(distances)]
    every_rank = Sources("every rank", "float64")
    yield every_rank.check_distances(
        f"{name}: weight change of one SGD step", ranks, tolerances.GRADIENT
    )


def count_expected_elements(weights: dict[str, Tensor], layout: Layout) -> int:
    """Return the number of elements of the weights on all ranks of a layout.

    Tensor parallelism splits the matrices of the blocks, and replicates the other weights.
    """
    elements = 0
    for name, weight in weights.items():
        is_split = name.startswith("blocks.") and weight.ndim == 2
        elements += weight.numel() * (1 if is_split else layout.tensor)
    return layout.data * elements


def _get_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_schedule(run: Run, name: str, layout: Layout, passes: list[str]) -> Iterator[Check]:
    """Compare the number of passes in flight with the schedule of the same name."""
    microbatches = layout.count_microbatches(run.config.rows // layout.data)
    in_flight = []
    for rank, maximum in enumerate(run.gather(count_max_in_flight(passes))):
        expected = compute_expected_in_flight(name, rank, run.world, microbatches)
        if expected is not None:
            in_flight.append((expected, maximum, f"rank {rank}"))
    if in_flight:
        order = Sources("events of a step", f"the schedule {name.partition('(')[2].rstrip(')')}")
        yield order.check_all_equal(f"{name}: passes in flight", in_flight)


def _check_losses(run: Run, row: results.Row, exact: Exact) -> Iterator[Check]:
    """Compare the losses of a row with those of one process in float64."""
    name = row["split"]
    written_out = Sources("reported", "float64 and AdamW written out")
    for key, expected, tolerance in (
        ("loss", exact.losses[0], tolerances.REPLAYED_LOSS),
        ("single_loss", exact.losses[0], tolerances.REPLAYED_LOSS),
        ("trained_loss", exact.losses[-1], tolerances.LOSS * math.sqrt(1 + TRAINED)),
    ):
        allowed = tolerances.compute_loss_tolerance(run.config, tolerance)
        yield written_out.check_loss(f"{name}: {key}", expected, row[key], allowed)


def _check_times(config: RunConfig, row: results.Row, layout: Layout) -> Iterator[Check]:
    """Compare the bubble and the times of a row with a formula and a second clock."""
    name = row["split"]
    microbatches = layout.count_microbatches(config.rows // layout.data)
    idle_per_work = accounting.plain.bubble_fraction(layout.pipeline, microbatches)
    bubble = idle_per_work / (1 + idle_per_work)
    slots = Sources("reported", "accounting's formula")
    yield slots.check_equal(f"{name}: bubble", bubble, row["bubble"], 1e-9)
    pairs = zip(row["seconds"], row["clocked_s"], strict=True)
    clock = Sources("iterations", "another clock around each")
    yield clock.check_equal(
        f"{name}: time", 1, select_clock_ratio(a / b for a, b in pairs), tolerances.CLOCK
    )
    median_ms = 1e3 * float(np.median(row["seconds"]))
    medians = Sources("reported", "numpy's, of all iterations")
    yield medians.check_equal(f"{name}: median iteration", median_ms, row["iteration_ms"], 1e-9)
    stage = Sources("reported", "the definition of the stage")
    yield stage.check_equal(f"{name}: iterations", ITERATIONS, len(row["seconds"]))


@contextmanager
def record_passes() -> Iterator[list[str]]:
    """Yield a list of "forward" and "backward", the passes of this rank in the `with` statement."""
    events: list[str] = []

    def record(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            events.append(kind)
            return original(*args, **options)

        return call

    methods = {"forward": "forward_one_chunk", "backward": "backward_one_chunk"}
    with ExitStack() as stack:
        for kind, method in methods.items():
            original = getattr(PipelineStage, method)
            stack.enter_context(mock.patch.object(PipelineStage, method, record(kind, original)))
        yield events


def count_max_in_flight(events: list[str]) -> int:
    """Return the largest number of forward passes whose backward passes have not yet run."""
    maximum = 0
    in_flight = 0
    for kind in events:
        in_flight += 1 if kind == "forward" else -1
        maximum = max(maximum, in_flight)
    return maximum


def compute_expected_in_flight(split: str, rank: int, ranks: int, microbatches: int) -> int | None:
    """Return the expected `count_max_in_flight` of a rank; None for a split without pipeline.

    GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2021, section 2.2.1.
    """
    if split == "pipeline (GPipe)":
        return microbatches
    if split == "pipeline (1F1B)":
        return min(microbatches, ranks - rank)
    return None

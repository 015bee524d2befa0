"""The model, split over ranks by layers and inside layers with torch's tools.

Every split starts from the initial weights of the other stages, and its steps are timed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.config import build_possible_layouts
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Parallel, Skipped
from llmsys_suite.splits.split_model import SplitModel
from llmsys_suite.variants.initial_weights import build_seeded_model

#: Number of timed steps, after one untimed step that creates the state of the optimizer.
ITERATIONS = 10
#: Index of the step whose loss is reported as `trained_loss`, which the audit recomputes.
TRAINED = 2


def run(run: Run) -> Parallel | Skipped:
    """Return a row per split: times of `ITERATIONS` steps, its losses, and one process's loss."""
    if run.world < 2:
        return Skipped("splitting a model needs at least two ranks")
    layouts = build_possible_layouts(run.model, run.world, run.config.rows)
    if not layouts:
        return Skipped(f"the model does not split over {run.world} ranks")
    reference = compute_single_loss(run, *run.draw_batch(0))
    rows = []
    for name, layout in layouts.items():
        row = {"split": name, **train_split_model(run, SplitModel(run, run.model, layout))}
        bubble = layout.compute_bubble(run.config.rows // layout.data)
        rows.append(row | {"bubble": bubble, "single_loss": reference})
    return Parallel(rows)


@torch.no_grad()
def compute_single_loss(run: Run, tokens: Tensor, targets: Tensor) -> float:
    """Return the loss of the initial weights in one process, on as many rows at once as a rank."""
    model = build_seeded_model(run, run.model)
    rows = max(1, len(tokens) // run.world)
    total = 0.0
    for part, part_targets in zip(tokens.split(rows), targets.split(rows), strict=True):
        with run.autocast():
            total += float(model.compute_loss(part, part_targets)) * len(part)
    return total / len(tokens)


def train_split_model(run: Run, split: SplitModel) -> dict[str, Any]:
    """Train a split model; return the times of its steps, two losses and the waiting fraction."""
    steps = [take_timed_step(run, split, 0)]
    start_time = time.perf_counter()
    start_processor_time = time.process_time()
    steps += [take_timed_step(run, split, step) for step in range(1, 1 + ITERATIONS)]
    wall_seconds = time.perf_counter() - start_time
    processor_seconds = time.process_time() - start_processor_time
    losses, seconds, clocked_s = zip(*steps, strict=True)
    return {
        "seconds": list(seconds[1:]),
        "iteration_ms": statistics.median(seconds[1:]) * 1e3,
        # The fraction of the wall time in which a rank used no processor.
        "waiting": 1 - average_over_ranks(run, processor_seconds / wall_seconds),
        "loss": losses[0],
        "trained_loss": losses[TRAINED],
        "clocked_s": list(clocked_s[1:]),
    }


def take_timed_step(run: Run, split: SplitModel, step: int) -> tuple[float, float, float]:
    """Take one step; return its loss, and the slowest rank's seconds by each of two clocks."""
    batch = split.draw_batch(step)
    run.barrier()
    # The audit compares this clock with `perf_counter`.
    clock_ns = time.time_ns()
    start_time = time.perf_counter()
    loss = split.step(*batch)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start_time
    clocked_s = (time.time_ns() - clock_ns) / 1e9
    slowest = torch.tensor((seconds, clocked_s), device=run.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return average_over_ranks(run, loss), float(slowest[0]), float(slowest[1])


def average_over_ranks(run: Run, value: float) -> float:
    """Return the mean over ranks; for losses, the mean over rows, as replicas have equal sizes."""
    total = torch.tensor(value, device=run.device, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / run.world

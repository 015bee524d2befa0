"""The model split with torch's tools: by layers, inside layers and by tokens.

Every split computes the loss of one process and trains the same weights; each is timed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Parallel, Skipped
from llmsys_suite.splits import SPLITS, PipelineModel, Split
from llmsys_suite.splits.split import whole_model

ITERATIONS = 10


def run(run: Run) -> Parallel | Skipped:
    """Time ten iterations of each split, compare its loss with one process, and train it."""
    if run.world < 2:
        return Skipped("splitting a model needs at least two ranks")
    possible = {name: make for name, make in SPLITS.items() if not make.why_not(run, run.model)}
    if not possible:
        return Skipped(PipelineModel.why_not(run, run.model))
    tokens, targets = run.batch(0)
    reference = single_loss(run, tokens, targets)
    rows = []
    for name, make in possible.items():
        split = make(run, run.model)
        row = _timed(name, split, tokens, targets) | {"single_loss": reference}
        rows.append(row | {"trained_loss": split.train(run)[-1]})
    return Parallel(rows)


@torch.no_grad()
def single_loss(run: Run, tokens: Tensor, targets: Tensor) -> float:
    """Return the loss of one process, computed on as many rows at once as one rank trains on."""
    model = whole_model(run, run.model)
    rows = max(1, len(tokens) // run.world)
    total = 0.0
    for some, theirs in zip(tokens.split(rows), targets.split(rows), strict=True):
        with run.autocast():
            total += float(model.loss(some, theirs)) * len(some)
    return total / len(tokens)


def _timed(name: str, model: Split, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    loss = model.step(tokens, targets)
    seconds = []
    clocked_s = []
    start_time, worked = time.perf_counter(), time.process_time()
    for _ in range(ITERATIONS):
        dist.barrier()
        # Another clock, which the audit compares with the first one.
        clock_ns = time.time_ns()
        begin = time.perf_counter()
        loss = model.step(tokens, targets)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        ours = time.perf_counter() - begin, (time.time_ns() - clock_ns) / 1e9
        slowest = torch.tensor(ours, device=tokens.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest[0]))
        clocked_s.append(float(slowest[1]))
    passed_s = time.perf_counter() - start_time
    working = torch.tensor((time.process_time() - worked) / passed_s, device=tokens.device)
    dist.all_reduce(working)
    return {
        "split": name,
        "seconds": seconds,
        "iteration_ms": statistics.median(seconds) * 1e3,
        "bubble": model.bubble(),
        "waiting": 1 - float(working) / dist.get_world_size(),
        "loss": loss,
        "clocked_s": clocked_s,
    }

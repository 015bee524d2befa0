"""Checks of one random step of `learn`.

The stage saves checkpoints before and after a step that is drawn at run time. This module repeats
the step in float64 from the first checkpoint, and compares weights and moments with the second. It
reads both with torch.distributed.checkpoint, not with the package `zero` that wrote them.
"""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from llmsys_suite import results
from llmsys_suite.audit import reference, tolerances
from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.inputs import get_num_heads, move_to_device
from llmsys_suite.audit.text import read_parts
from llmsys_suite.learning.state import PROBE
from llmsys_suite.ranks.rank import Run

#: The tensors of a checkpoint by kind (weight, step, exp_avg, exp_avg_sq) and parameter.
Checkpoint = dict[str, dict[str, Tensor]]
#: Name of the entry of a checkpoint that contains the state of the training.
HEADER = "zero"
#: Relative rounding of a float32 weight, which can exceed its change at a small learning rate.
ROUNDING = 2**-23


def check_probed_step(run: Run, result: results.Learn, step: int) -> Iterator[Check]:
    """Repeat one step in float64, and compare its loss, moments and weights with the run's.

    The two checkpoints are deleted as soon as they have been read.
    """
    folder = run.out / PROBE
    before = read_checkpoint(folder / "before")
    after = read_checkpoint(folder / "after")
    shutil.rmtree(folder)
    config = run.config
    loss, weights, expected, optimizer = repeat_step(run, result, before, step)
    where = f"step {step}"
    allowed = tolerances.compute_loss_tolerance(config, tolerances.REPLAYED_LOSS)
    yield Sources("reported", "float64").check_loss(
        "loss of a random step", loss, result.losses[step], allowed, where
    )
    stored = Sources("checkpoint", "float64")
    # A float32 gradient of the logits has an absolute rounding error. Relative to the gradient, the
    # error grows as 1 / loss if the loss is small.
    tolerance = max(
        tolerances.MOMENTS[config.dtype], tolerances.GRADIENT / max(loss, sys.float_info.min)
    )
    for key, moments in (("exp_avg", optimizer.m), ("exp_avg_sq", optimizer.v)):
        floor = reference.compute_rounding_floor(moments)
        distances = [
            (
                reference.compute_distance(after[key][name].to(run.device), moment, floor),
                f"{where} {name}",
            )
            for name, moment in moments.items()
        ]
        yield stored.check_distances(f"{key} after a random step", distances, tolerance)
        if config.dtype == "bf16":
            is_rounded = max(distances)[0] > tolerances.GRADIENT
            yield stored.check_none(f"{key}: rounding of bf16", [] if is_rounded else [where])
    fractions = []
    floor = reference.compute_rounding_floor(optimizer.m)
    for name, w in expected.items():
        moved = w - weights[name]
        change = tolerances.compute_weight_tolerance(config, tolerances.WEIGHT_CHANGE) * (
            1 + floor / optimizer.m[name].norm()
        )
        allowed_distance = change * moved.norm() + ROUNDING * weights[name].norm()
        distance = (after["weight"][name].to(run.device).double() - w).norm()
        fractions.append((float(distance / allowed_distance), f"{where} {name}"))
    rounding = Sources("distance over the allowed distance", "float64")
    yield rounding.check_distances("weights after a random step", fractions, 1.0)


def repeat_step(
    run: Run, result: results.Learn, checkpoint: Checkpoint, step: int
) -> tuple[float, dict[str, Tensor], dict[str, Tensor], reference.AdamW]:
    """Take one step from a checkpoint in float64.

    Return its loss, the weights before the step and after it, and the optimizer after the step.
    """
    config = run.config
    weights = {name: w.to(run.device).double() for name, w in checkpoint["weight"].items()}
    batch = draw_learn_batch(run, result, step)
    loss, gradients = reference.compute_gradients(weights, *batch, get_num_heads(config))
    if config.clip is not None:
        gradients = clip(gradients, config.clip)
    learning_rate = compute_scheduled_rate(result.learning_rate, step, len(result.losses))
    optimizer = reference.AdamW(weights, learning_rate)
    optimizer.t = step
    if step:
        optimizer.m = {n: m.to(run.device).double() for n, m in checkpoint["exp_avg"].items()}
        optimizer.v = {n: v.to(run.device).double() for n, v in checkpoint["exp_avg_sq"].items()}
    return loss, weights, optimizer.step(weights, gradients), optimizer


def draw_learn_batch(run: Run, result: results.Learn, step: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks in a step of `learn`, from the independent sampler."""
    train, _ = read_parts(run.config)
    context, seed = run.config.context, run.config.seed + 1
    return move_to_device(run, reference.draw_batch(train, result.rows, context, seed, step))


def clip(gradients: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Return the gradients scaled to a norm of at most `max_norm` (Pascanu et al. 2013, alg. 1)."""
    # Torch adds 1e-6 to the norm.
    scale = min(1.0, max_norm / (reference.compute_norm(gradients) + 1e-6))
    return {name: scale * g for name, g in gradients.items()}


def compute_scheduled_rate(base: float, step: int, total: int) -> float:
    """Return the learning rate of a step of `learn`, where `base` is the learning rate of `train`.

    The rate is a half-cosine decay from `2 * base` to 5 % of it, multiplied by a linear warm-up
    over about the first 5 % of the steps.
    """
    peak = 2 * base
    warmup_factor = min(1.0, 0.01 + 20 * step / total)
    return peak * warmup_factor * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the weights and the state of AdamW in a checkpoint, by kind and parameter."""
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.zeros(entry.size) for name, entry in stored.items() if hasattr(entry, "size")
    }
    _load_alone(state, reader)
    kinds: Checkpoint = {"weight": {}, "step": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, tensor in state.items():
        if name.startswith("model."):
            kinds["weight"][name.removeprefix("model.")] = tensor
        elif name.startswith("optimizer.state."):
            parameter, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            kinds[kind][parameter] = tensor
    return kinds


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the training that zero stores in the header of a checkpoint."""
    state: dict[str, Any] = {HEADER: {}}
    _load_alone(state, dcp.FileSystemReader(path))
    return dict(state[HEADER]["extra"])


def _load_alone(state: dict[str, Any], reader: dcp.FileSystemReader) -> None:
    """Load into `state` in place, without collectives."""
    # torch warns that this process loads alone, which is intended.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # a BaseException, which would end the audit
            reasons = [repr(reason) for reason, _ in error.failures.values()]
            raise ValueError(f"{reader.path} is damaged: {', '.join(reasons)}") from error

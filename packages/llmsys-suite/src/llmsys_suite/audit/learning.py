"""Checks of the stage `learn`: its steps, its schedule, its batches and one random step.

The stage saves a checkpoint before and after a step that is drawn at run time. This module reads
both, repeats the step in float64 and compares weights and moments. The checkpoints are read with
torch.distributed.checkpoint, not with the package that wrote them.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from llmsys_suite.audit import reference
from llmsys_suite.audit.again import on_device, seeded, weights_of
from llmsys_suite.audit.check import Check, equal, none, worst_distance, worst_equal
from llmsys_suite.audit.rounding import allowed
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.training import GRADIENT, REPLAYED_LOSS, WEIGHT_CHANGE
from llmsys_suite.folder import Sample
from llmsys_suite.ranks.rank import Run
from llmsys_suite.report.generation import MODEL
from llmsys_suite.stages import learn as learn_stage
from llmsys_suite.stages import results
from llmsys_suite.stages.training_state import CHECKPOINT, DEFAULT_STEPS

#: Rounding of a float32 weight, which can exceed the change by a step with a small learning rate.
ROUNDING = 2**-23


def checks(run: Run, result: results.Learn) -> Iterator[Check]:
    """Check the losses, steps, learning rates and rows of the training, and one random step."""
    if run.folder is None:
        return
    yield from _losses(run, result)
    total = len(result.losses)
    if result.begun_at == 0:
        wanted = run.config.learn or DEFAULT_STEPS
        yield equal("steps", "losses", "the configuration", wanted, total)
        base = run.config.learning_rate
        yield equal(
            "base learning rate", "reported", "the configuration", base, result.learning_rate
        )
    samples = [s for s in run.folder.samples() if s["stage"] == "learn" and s["phase"] == "step"]
    yield from _samples(run, result, samples)
    last = read_checkpoint(run.out / CHECKPOINT)
    steps = {int(step) for step in last["step"].values()}
    yield none(
        "steps of the optimizer",
        "step counts in the checkpoint",
        f"{total} losses",
        [f"{step} steps" for step in steps if step != total],
    )
    stored = load_file(run.folder.path / MODEL)
    different = [n for n, w in last["weight"].items() if not torch.equal(stored[n].cpu(), w)]
    yield none("weights of the model file", "each weight", "the checkpoint", different)
    if result.probed_step is not None:
        yield from _probed_step(run, result)


def _losses(run: Run, result: results.Learn) -> Iterator[Check]:
    assert run.folder is not None
    config = run.config
    heads = run.model.num_heads
    train, held_out = read_parts(config.data)
    rows = reference.spread(held_out, learn_stage.HELDOUT_ROWS, config.context)
    stored = load_file(run.folder.path / MODEL)
    weights = {name: w.to(run.device).double() for name, w in stored.items()}
    exact = reference.mean_loss(weights, *on_device(run, rows), heads)
    source = "the file's weights in float64"
    yield equal("held-out loss", "reported", source, exact, result.heldout[-1][1], REPLAYED_LOSS)
    if result.begun_at == 0:
        first = reference.batch(train, config.rows, config.context, config.seed + 1, 0)
        start = weights_of(seeded(run, run.model))
        exact = reference.mean_loss(start, *on_device(run, first), heads)
        replayed = allowed(config, "replayed loss", REPLAYED_LOSS)
        yield equal("first loss", "reported", "float64", exact, result.losses[0], replayed)


def _samples(run: Run, result: results.Learn, samples: list[Sample]) -> Iterator[Check]:
    """Compare learning rates and rows of every step and rank with formula and sampler."""
    config = run.config
    total = len(result.losses)
    by_step: dict[int, dict[int, Sample]] = {step: {} for step in range(result.begun_at, total)}
    for s in samples:
        by_step[s["step"]][s["rank"]] = s
    train, _ = read_parts(config.data)
    rates = []
    missing = []
    foreign = []
    for step, ranks in by_step.items():
        expected = rate(result.learning_rate, step, total)
        rates += [(expected, s["learning_rate"], f"step {step}") for s in ranks.values()]
        if set(ranks) != set(range(run.world)):
            missing.append(f"step {step}")
            continue
        batch = reference.batch(train, result.rows, config.context, config.seed + 1, step)
        rows = [digest for rank in sorted(ranks) for digest in ranks[rank]["row_digests"]]
        if rows != reference.row_digests(batch):
            foreign.append(f"step {step}")
    yield none("every step of every rank", "samples", "the number of losses", missing)
    yield worst_equal("learning rates", "read from the optimizer", "the schedule", rates, 1e-9)
    yield none(
        "ranks' rows", "digests of their batches", "the audit's independent sampler", foreign
    )


def rate(base: float, step: int, total: int) -> float:
    """Return the learning rate of a step.

    The rate is a half-cosine decay from `2 * base` to 5 % of it, multiplied by a linear warm-up
    over about the first 5 % of the steps.
    """
    peak = 2 * base
    warm = min(1.0, 0.01 + 20 * step / total)
    return peak * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))


def _probed_step(run: Run, result: results.Learn) -> Iterator[Check]:
    """Repeat one step in float64 from the checkpoint before it."""
    folder = run.out / learn_stage.PROBE
    before = read_checkpoint(folder / "before")
    after = read_checkpoint(folder / "after")
    shutil.rmtree(folder)
    config = run.config
    step = result.probed_step
    assert step is not None
    train, _ = read_parts(config.data)
    batch = reference.batch(train, result.rows, config.context, config.seed + 1, step)
    weights = {name: w.to(run.device).double() for name, w in before["weight"].items()}
    loss, gradients = reference.gradients(weights, *on_device(run, batch), run.model.num_heads)
    optimizer = reference.AdamW(weights, rate(result.learning_rate, step, len(result.losses)))
    optimizer.t = step
    if step:
        optimizer.m = {name: m.to(run.device).double() for name, m in before["exp_avg"].items()}
        optimizer.v = {name: v.to(run.device).double() for name, v in before["exp_avg_sq"].items()}
    expected = optimizer.step(weights, gradients)
    where = f"step {step}"
    yield equal(
        "loss of a random step",
        "reported",
        "float64",
        loss,
        result.losses[step],
        allowed(config, "replayed loss", REPLAYED_LOSS),
        where,
    )
    for key, moments in (("exp_avg", optimizer.m), ("exp_avg_sq", optimizer.v)):
        distances = [
            (reference.distance(after[key][name].to(run.device), moment), f"{where} {name}")
            for name, moment in moments.items()
        ]
        yield worst_distance(
            f"{key} after a random step",
            "checkpoint",
            "float64",
            distances,
            allowed(config, "gradient", GRADIENT),
        )
    off = []
    for name, w in expected.items():
        moved = w - weights[name]
        change = allowed(config, "weight change", WEIGHT_CHANGE)
        limit = change * moved.norm() + ROUNDING * weights[name].norm()
        distance = (after["weight"][name].to(run.device).double() - w).norm()
        off.append((float(distance / limit), f"{where} {name}"))
    yield worst_distance(
        "weights after a random step", "change, over the rounding", "float64", off, 1.0
    )


def read_checkpoint(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return the weights and the state of AdamW in a checkpoint by kind and parameter."""
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.zeros(entry.size) for name, entry in stored.items() if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        # torch warns that this process loads alone, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, storage_reader=reader, no_dist=True)
    kinds: dict[str, dict[str, Tensor]] = {
        "weight": {},
        "step": {},
        "exp_avg": {},
        "exp_avg_sq": {},
    }
    for name, tensor in state.items():
        if name.startswith("model."):
            kinds["weight"][name.removeprefix("model.")] = tensor
        elif name.startswith("optimizer.state."):
            parameter, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            kinds[kind][parameter] = tensor
    return kinds

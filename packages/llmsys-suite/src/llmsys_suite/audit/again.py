"""Helpers that several audit modules share: models with the run's weights, batches and clocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, worst_equal
from llmsys_suite.config import RunConfig
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run

#: Sums of two to sixteen numbers in float32 beside float64: 1e-7. Times ten.
SUMS = 1e-6


def clock_checks(interleaved: Interleaved, medians_ms: dict[str, float]) -> Iterator[Check]:
    """Compare the sum of all timings with another clock, and reported medians with the timings."""
    rounds, clocked = interleaved.seconds, interleaved.clocked_s
    total = sum(map(sum, rounds.values()))
    yield Check(
        "time of all rounds",
        "their sum",
        "another clock",
        clocked,
        total,
        0.8 * clocked,
        1.001 * clocked,
    )
    pairs = [(1e3 * float(np.median(rounds[n])), ms, n) for n, ms in medians_ms.items()]
    if pairs:
        yield worst_equal("reported times", "medians in ms", "numpy's, of the rounds", pairs, 1e-9)


def ratio_checks(
    interleaved: Interleaved, peer: str, reported: dict[str, float], *, inverted: bool
) -> Iterator[Check]:
    """Recompute the median ratio to `peer` per round; with `inverted`, the peer's to each."""
    rounds, pairs = interleaved.seconds, []
    for name, value in reported.items():
        over = np.array(rounds[name]) / np.array(rounds[peer])
        pairs.append((float(np.median(1 / over if inverted else over)), value, name))
    yield worst_equal("reported ratios", "pairs of one round", "numpy's medians", pairs, 0.05)


def on_device(run: Run, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets on the device of the run."""
    return batch[0].to(run.device), batch[1].to(run.device)


def seeded(run: Run, config: ModelConfig, seed: int | None = None) -> Decoder:
    """Return a model with the initial weights of the run."""
    torch.manual_seed(run.config.seed if seed is None else seed)
    return Decoder(config).to(run.device)


def initial_weights(run: Run) -> dict[str, Tensor]:
    """Return the initial weights of every variant."""
    return {name: p.detach() for name, p in seeded(run, run.model).named_parameters()}


def global_batch(text: bytes, config: RunConfig, step: int) -> tuple[Tensor, Tensor]:
    """Return the rows that all variants read in a step, from the independent sampler."""
    draw = reference.epoch_batch if config.epochs else reference.batch
    return draw(text, config.rows, config.context, config.seed, step)


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """Return the parameters by name, in float64."""
    return {name: p.detach().double() for name, p in model.named_parameters()}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return nats per token, computed in float64."""
    z = logits.double()
    target_logits = z.gather(-1, targets[..., None])[..., 0]
    mean: Tensor = (torch.logsumexp(z, -1) - target_logits).mean()
    return mean

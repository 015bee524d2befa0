"""The probe: two SGD steps of every variant, the first compared with one process in float64.

Adam would hide a wrong scale, because it divides a gradient by its own magnitude. The weight change
of an SGD step, divided by the learning rate, is the gradient that the optimizer received, however
it was communicated. The bytes that are announced in shared memory are counted in the second step.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.audit import reference
from llmsys_suite.audit.inputs import draw_global_batch, get_num_heads, move_to_device
from llmsys_suite.audit.text import read_parts
from llmsys_suite.measure import network
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants import VARIANTS, list_variants
from llmsys_suite.variants.initial_weights import draw_initial_weights
from llmsys_suite.variants.single import Variant

#: Learning rate of the probe, large enough that rounding of the weights hides no gradient.
RATE = 16.0

Weights = dict[str, Tensor]


def probe(run: Run) -> dict[str, Any]:
    """Probe every variant on all ranks; return {variant: {kind of evidence: [value per rank]}}."""
    start = {name: w.double() for name, w in draw_initial_weights(run).items()}
    # One row per rank is enough, because an error in summing shows for any number of rows.
    batch = reference.draw_batch(
        read_parts(run.config)[0], run.world, run.config.context, run.config.seed, 0
    )
    _, exact = reference.compute_gradients(
        start, *move_to_device(run, batch), get_num_heads(run.config)
    )
    variants = {}
    for name in list_variants(run.device):
        by_rank = run.gather(_probe_variant(run, name, start, exact))
        probed = [evidence for evidence in by_rank if evidence is not None]
        variants[name] = {key: [evidence[key] for evidence in probed] for key in probed[0]}
    return variants


def _probe_variant(run: Run, name: str, start: Weights, exact: Weights) -> dict[str, Any] | None:
    make = partial(torch.optim.SGD, lr=RATE)
    variant = VARIANTS[name](run, run.model, make)
    run.barrier()
    evidence = None
    if not (variant.alone and run.rank):
        batch = run.draw_batch(0, rows=run.world, split=not variant.alone)
        evidence = _take_two_steps(variant, start, exact, *batch)
    variant.close()
    run.barrier()
    return evidence


def _take_two_steps(
    variant: Variant, start: Weights, exact: Weights, tokens: Tensor, targets: Tensor
) -> dict[str, Any]:
    variant.prepare()
    variant.forward_backward(tokens, targets)
    variant.communicate()
    variant.update()
    after = variant.gather_weights()
    moved = {name: (start[name] - after[name].double()) / RATE for name in after}
    with network.record_announcements() as shared:
        variant.step(tokens, targets)
    floor = reference.compute_rounding_floor(exact)
    return {
        "weights": reference.find_largest_distance(moved, exact, floor),
        "digest": compute_weights_digest(variant.gather_weights()),
        "shared": sum(shared),
    }


def compute_weights_digest(weights: Weights) -> str:
    """Return the SHA-256 of the bits of all weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        digest.update(weight.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def replay(run: Run, weights: Weights, steps: int) -> tuple[list[float], dict[str, float]]:
    """Train the reference from `weights` for at most `steps` steps of the run.

    Return the losses and, for each weight, the factor by which the tolerance of its change grows
    because terms of its gradient cancel. See `reference.CANCELLED`.
    """
    config = run.config
    losses = []
    floor = 0.0
    norms = dict.fromkeys(weights, 0.0)
    text, _ = read_parts(config)
    optimizer = reference.AdamW(weights, config.learning_rate)
    for step in range(min(steps, config.warmup + config.steps)):
        batch = draw_global_batch(text, config, step)
        loss, gradients = reference.compute_gradients(
            weights, *move_to_device(run, batch), get_num_heads(config)
        )
        losses.append(loss)
        floor += reference.compute_rounding_floor(gradients)
        for name, gradient in gradients.items():
            norms[name] += float(gradient.norm())
        weights = optimizer.step(weights, gradients)
    return losses, {name: 1 + floor / norm if norm else math.inf for name, norm in norms.items()}

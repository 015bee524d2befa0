"""Sensitivity: the metric of a model in which a single layer is compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyml.conversion import make_dense_copy
from tinyml.layers import PRUNABLE, check_weights, find_layers, put_outputs_first
from tinyml.pruning.magnitude import mask_smallest

Batch = tuple[Any, Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sensitivity:
    """The metric of the unchanged model, and with one layer compressed by one amount."""

    baseline: float
    #: The metric by layer and amount.
    values: dict[str, dict[float, float]]


def prune_weight(weight: Tensor, sparsity: float) -> Tensor:
    """Return the weight with its smallest magnitudes set to zero: the default of `compress`."""
    return weight * mask_smallest(weight.abs(), sparsity)


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    batches: Sequence[Batch],
    metric: Metric,
    *,
    amounts: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    compress: Callable[[Tensor, float], Tensor] = prune_weight,
    layers: Sequence[type[nn.Module]] = PRUNABLE,
    protect: Sequence[str] = (),
) -> Sensitivity:
    """Return the metric of the model with one layer compressed, for every layer and amount.

    `batches` are pairs (inputs, targets), and `metric(outputs, targets)` returns a number for the
    outputs of a dense copy of the model in evaluation mode. Metrics are averaged over the batches,
    weighted by `len(targets)`. `compress(weight, amount)` returns the trial weight. By default, it
    prunes to the sparsity `amount`; another function may round to `amount` bits, for example. The
    first dimension of these weights contains the outputs of the layer.
    """
    batches = list(batches)  # batches and amounts are read several times
    amounts = list(amounts)
    if not batches:
        raise ValueError("expected at least one (inputs, targets) batch, got none")
    model = make_dense_copy(model).eval()
    chosen = find_layers(model, layers, protect)
    check_weights(chosen)
    num_samples = sum(len(targets) for _, targets in batches)

    def compute_mean_metric() -> float:
        total = sum(float(metric(model(x), targets)) * len(targets) for x, targets in batches)
        return total / num_samples

    values: dict[str, dict[float, float]] = {}
    for name, layer in chosen.items():
        weight = layer.get_parameter("weight")
        dense = weight.data
        values[name] = {}
        for amount in amounts:
            # A copy, because `compress` may write into it.
            trial = compress(put_outputs_first(layer, dense).clone(), amount)
            weight.data = put_outputs_first(layer, trial)
            values[name][amount] = compute_mean_metric()
        weight.data = dense
    return Sensitivity(compute_mean_metric(), values)

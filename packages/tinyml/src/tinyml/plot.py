"""Figures: what the weights look like, and what each layer can lose. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tinyml.layers import PRUNABLE
from tinyml.pruning.sensitivity import Sensitivity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@torch.no_grad()
def plot_weights(model: nn.Module, *, bins: int = 128, nonzero: bool = False) -> Figure:
    """A histogram of every layer's weights; `nonzero` leaves pruned ones out."""
    weights = {
        name or type(model).__name__: layer.weight.detach().flatten().float().cpu()
        for name, layer in model.named_modules()
        if isinstance(layer, PRUNABLE) and isinstance(layer.weight, torch.Tensor)
    }
    if not weights:
        raise ValueError(f"{type(model).__name__} has no linear layer or convolution to draw")
    figure = _figure(len(weights))
    for axes, (name, values) in zip(figure.axes, weights.items(), strict=True):
        axes.hist(values[values != 0].numpy() if nonzero else values.numpy(), bins=bins)
        axes.set(title=name, xlabel="weight", ylabel="count", yscale="log")
    return figure


def plot_sensitivity(result: Sensitivity, *, metric: str = "metric") -> Figure:
    """The metric of each layer's trials, and a line at the untouched model's."""
    figure = _figure(len(result.values))
    for axes, (name, values) in zip(figure.axes, result.values.items(), strict=True):
        axes.plot(list(values), list(values.values()), marker="o")
        axes.axhline(result.baseline, linestyle="--", color="gray")
        axes.set(title=name, xlabel="amount", ylabel=metric)
    return figure


def _figure(count: int) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    for number in range(count):
        figure.add_subplot(rows, columns, number + 1)
    return figure

"""Plots by matplotlib: histograms of weights, sensitivities, and quality against size.

Figures need no display. `save` writes the same bytes for the same numbers, so that a plot can be
committed next to its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tinyml.layers import PRUNABLE, find_layers, get_weight
from tinyml.pruning.sensitivity import Sensitivity
from torch import nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: (x, y), or (x, y, low, high) with an interval of y.
Points = Sequence[tuple[float, ...]]


@torch.no_grad()
def plot_weights(model: nn.Module, *, bins: int = 128, nonzero: bool = False) -> Figure:
    """Plot a histogram of every layer's weights; `nonzero` leaves out pruned weights."""
    layers = find_layers(model, PRUNABLE)
    figure, panels = _panels(len(layers))
    for axes, (name, layer) in zip(panels, layers.items(), strict=True):
        values = get_weight(layer).flatten().float().cpu()
        values = values[values != 0] if nonzero else values
        axes.hist(values.numpy(), bins)
        title = f"{name or type(model).__name__}: {len(values):,}"
        axes.set(title=title, xlabel="weight", ylabel="count", yscale="log")
    return figure


def plot_sensitivity(result: Sensitivity, *, metric: str = "metric") -> Figure:
    """Plot the metric of each layer's trials, and a line at the uncompressed model's metric."""
    figure, panels = _panels(len(result.values))
    for axes, (name, values) in zip(panels, result.values.items(), strict=True):
        axes.plot([*values.keys()], [*values.values()], "o-", markersize=4)
        axes.axhline(result.baseline, color="0.6", linestyle="--")
        axes.set(title=name, xlabel="amount", ylabel=metric)
    return figure


def plot_frontier(
    lines: Mapping[str, Points],
    *,
    x: str = "KiB",
    metric: str = "metric",
    level: float | None = None,
    log: bool = True,
) -> Figure:
    """Plot a metric against size, time or width, with one line per method."""
    from matplotlib.ticker import LogFormatter

    figure, (axes,) = _panels(1)
    for name, points in lines.items():
        across, up, *ends = zip(*points, strict=True)
        (line,) = axes.plot(across, up, "o-", markersize=4, label=name)
        if ends:
            axes.vlines(across, *ends, color=line.get_color())
    if level is not None:
        axes.axhline(level, color="0.6", linestyle="--")
    axes.set(xlabel=x, ylabel=metric)
    if log:
        axes.set(xscale="log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 200 instead of 2 x 10^2
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)  # does not cover any point
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as SVG, without the date and with stable identifiers."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tinyml"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panels(count: int) -> tuple[Figure, list[Any]]:
    """Return a figure and its axes, at most three per row."""
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows) if count > 1 else (6, 4))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count]

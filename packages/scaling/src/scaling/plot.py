"""Figures of fits and sweeps, with intervals as bands; needs matplotlib."""

import math
import reprlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scaling.extras import require_module
from scaling.fit.parametric import ParametricFit
from scaling.isoflop.fit import IsoflopFit
from scaling.runs import ScalingWarning
from scaling.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Drawable = ParametricFit | IsoflopFit | Sweep


def plot(result: Drawable, *, up_to: float = 1e24) -> "Figure":
    """Return a figure of a fit or a sweep.

    `up_to` is the compute in FLOPs to which a fit is extrapolated. The panels are:

    - for a parametric fit, N and D over C with the intervals of `optimal` as bands, and residuals;
    - for an IsoFLOP fit, the valleys, and N and D over C;
    - for a sweep, loss over rate, and best rate over batch size.

    Raises `TypeError` for any other object, `ValueError` for a fit to runs that do not identify its
    law, and `ModuleNotFoundError` without matplotlib.
    """
    require_module("matplotlib", "plot")
    from matplotlib.figure import Figure

    drawn = list_panels(result, up_to)
    figure = Figure(figsize=(14, 4.5))
    figure.set_layout_engine("constrained")
    for draw, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        draw(axes)
    return figure


def list_panels(result: Drawable, up_to: float) -> list[Callable[["Axes"], None]]:
    """Return one function per panel of `plot`, which draws the panel on axes."""
    if isinstance(result, ParametricFit | IsoflopFit):
        if result.unidentified:
            raise ValueError(f"expected a fit with an identified law, got {result.unidentified}")
        optima = partial(_plot_optima, fit=result, up_to=up_to)
        if isinstance(result, IsoflopFit):
            return [partial(_plot_valleys, fit=result), optima]
        return [optima, partial(_plot_residuals, fit=result)]
    if isinstance(result, Sweep):
        return [partial(_plot_losses, sweep=result), partial(_plot_best_rates, sweep=result)]
    raise TypeError(
        f"expected the result of fit_parametric, fit_isoflop or a sweep, got {reprlib.repr(result)}"
    )


def _plot_optima(axes: "Axes", fit: ParametricFit | IsoflopFit, up_to: float) -> None:
    """Draw N and D of the optimum over compute, with their bands."""
    compute = np.geomspace(fit.runs.compute.min(), up_to, 40)
    with warnings.catch_warnings():
        # The bands show the uncertainty of which `optimal` warns.
        warnings.simplefilter("ignore", ScalingWarning)
        best = [fit.optimal(c) for c in compute.tolist()]
    for name, color in (("parameters", "C0"), ("tokens", "C1")):
        axes.plot(compute, [getattr(b, name) for b in best], color, label=f"{name}, 95 %")
        intervals = [b.intervals[name] for b in best if b.intervals]
        low = [max(interval.low, 1.0) for interval in intervals]
        high = [min(interval.high, 1e30) for interval in intervals]
        axes.fill_between(compute, low, high, color=color, alpha=0.25, lw=0)
    if isinstance(fit, IsoflopFit):
        c = np.array([valley.compute for valley in fit.valleys])
        axes.plot(c, [valley.parameters for valley in fit.valleys], "C0o", ms=4)
        axes.plot(c, [valley.tokens for valley in fit.valleys], "C1o", ms=4)
    axes.axvline(fit.runs.compute.max(), color="0.6", ls=":", label="largest run")
    axes.set(xscale="log", yscale="log", xlabel="compute (FLOPs)", title="Compute-optimal N and D")
    axes.legend(loc="upper left", fontsize=8)


def _plot_valleys(axes: "Axes", fit: IsoflopFit) -> None:
    """Draw the runs and the curve of each budget, colored by compute on one scale."""
    from matplotlib import colormaps, rcParams
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    compute = [valley.compute for valley in fit.valleys]
    shades = ScalarMappable(LogNorm(min(compute), max(compute)), colormaps["viridis"])
    for valley in fit.valleys:
        n = valley.runs.parameters
        color = shades.to_rgba(np.array(valley.compute))
        axes.plot(n, valley.runs.loss, "o", color=color, ms=3)
        grid = np.geomspace(n.min(), n.max(), 100)
        axes.plot(grid, valley.predict(grid), color=color)
        axes.plot(valley.parameters, valley.loss, "*", color=rcParams["text.color"], ms=7)
    axes.figure.colorbar(shades, ax=axes, label="FLOPs")
    axes.set(xscale="log", xlabel="parameters", ylabel="loss (nats)", title="IsoFLOP valleys")


def _plot_residuals(axes: "Axes", fit: ParametricFit) -> None:
    points = axes.scatter(
        fit.runs.compute, -fit.residuals, c=np.log10(fit.runs.parameters), s=12, cmap="viridis"
    )
    axes.figure.colorbar(points, ax=axes, label="log10 parameters")
    axes.axhline(0, color="0.6", lw=1)
    axes.set(xscale="log", xlabel="compute (FLOPs)", ylabel="log observed - log predicted")
    axes.set_title("Residuals")


def _plot_losses(axes: "Axes", sweep: Sweep) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"](np.linspace(0, 0.9, len(sweep.batch_sizes)))
    for size, curve, best, color in zip(
        sweep.batch_sizes, sweep.loss, sweep.best_rates, colors, strict=True
    ):
        visible = (curve > 0) & (curve < 1e3 * np.nanmin(curve) + 1e-30)
        axes.plot(sweep.rates[visible], curve[visible], color=color, label=f"{size:.0f}")
        axes.axvline(best, color=color, lw=0.5, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="final loss")
    axes.set_title(f"{sweep.task}, {sweep.optimizer}")
    axes.legend(loc="upper left", title="batch size", fontsize=7)


def _plot_best_rates(axes: "Axes", sweep: Sweep) -> None:
    """Draw the best rate over the batch size."""
    bounded = np.array([math.isfinite(interval.high) for interval in sweep.intervals])
    ends = np.array([[interval.low, interval.high] for interval in sweep.intervals])[bounded].T
    bars = np.abs(ends - sweep.best_rates[bounded])
    sizes = sweep.batch_sizes
    axes.plot(sizes, sweep.best_rates, "C0o")
    axes.errorbar(sizes[bounded], sweep.best_rates[bounded], bars, fmt="none", capsize=2)
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="best learning rate")

"""Figures of fits, backtests and sweeps, with intervals as bands; needs matplotlib."""

import math
import reprlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scaling.extras import require_module
from scaling.fit.parametric import ParametricFit
from scaling.isoflop.fit import IsoflopFit
from scaling.law import Optimum
from scaling.runs import ScalingWarning
from scaling.sweeps.sweep import Sweep
from scaling.uncertainty.backtest import BacktestRow
from scaling.uncertainty.posterior import weighted_quantiles
from scaling.uncertainty.quantity import optimum
from scaling.units import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Drawable = ParametricFit | IsoflopFit | Sweep | Sequence[BacktestRow]


def plot(result: Drawable, *, up_to: float = 1e24) -> "Figure":
    """Return a figure of a fit, a sweep or a backtest.

    `up_to` is the compute in FLOPs to which a fit is extrapolated. The panels are:

    - for a parametric fit, N and D over C with their bands, residuals, and two intervals of
      `optimal` at `up_to`: the full interval, and the interval by noise alone;
    - for an IsoFLOP fit, the valleys, and N and D over C;
    - for a sweep, loss over rate, and best rate over batch size;
    - for a backtest, the best size predicted from the runs below each cut, divided by the best size
      that a fit of all runs predicts.

    Raises `TypeError` for any other object, `ValueError` for a fit to runs that do not identify its
    law, and `ModuleNotFoundError` without matplotlib.
    """
    require_module("matplotlib", "plot")
    from matplotlib.figure import Figure

    drawn = panels(result, up_to)
    figure = Figure(figsize=(14, 4.5))
    figure.set_layout_engine("constrained")
    for draw, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        draw(axes)
    return figure


def panels(result: Drawable, up_to: float) -> list[Callable[["Axes"], None]]:
    """Return one function per panel of `plot`, which draws the panel on axes."""
    if isinstance(result, ParametricFit | IsoflopFit):
        if result.unidentified:
            raise ValueError(f"there is no law to draw: {result.unidentified}")
        optima = partial(_plot_optima, fit=result, up_to=up_to)
        if isinstance(result, IsoflopFit):
            return [partial(_plot_valleys, fit=result), optima]
        interval = partial(_plot_interval, fit=result, compute=up_to)
        return [optima, partial(_plot_residuals, fit=result), interval]
    if isinstance(result, Sweep):
        return [partial(_plot_losses, sweep=result), partial(_plot_best_rates, sweep=result)]
    is_sequence = isinstance(result, Sequence)
    if not (is_sequence and result and all(isinstance(row, BacktestRow) for row in result)):
        raise TypeError(
            "expected the result of fit_parametric, fit_isoflop, backtest or a sweep, got"
            f" {reprlib.repr(result)}"
        )
    return [partial(_plot_backtest, rows=result)]


def _plot_optima(axes: "Axes", fit: ParametricFit | IsoflopFit, up_to: float) -> None:
    """Draw N and D of the optimum over compute, with their bands."""
    compute = np.geomspace(fit.runs.compute.min(), up_to, 40)
    best = _optima(fit, compute)
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


def _optima(fit: ParametricFit | IsoflopFit, compute: Array) -> list[Optimum]:
    """Return the optima without the warnings of `optimal`, because the bands show uncertainty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        return [fit.optimal(float(c)) for c in compute]


def _plot_valleys(axes: "Axes", fit: IsoflopFit) -> None:
    """Draw the runs and the curve of each budget, colored by compute on one scale."""
    from matplotlib import colormaps
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
        axes.plot(valley.parameters, valley.loss, "k*", ms=7)
    axes.figure.colorbar(shades, ax=axes, label="FLOPs")
    axes.set(xscale="log", xlabel="parameters", ylabel="loss (nats)", title="IsoFLOP valleys")


def _plot_backtest(axes: "Axes", rows: Sequence[BacktestRow]) -> None:
    """Draw predicted best sizes divided by the size by all runs; a cross marks a missed size."""
    missed_cuts = []
    missed_ratios = []
    all_cuts = [row.cut for row in rows]
    # Automatic limits fail if all cuts are equal within rounding.
    axes.set(xscale="log", yscale="log", xlim=(min(all_cuts) / 1.5, max(all_cuts) * 1.5))
    for i, method in enumerate(dict.fromkeys(row.method for row in rows)):
        of_method = [row for row in rows if row.method == method]
        # Shift the points of each method sideways, because methods may have the same cuts.
        cuts = np.array([row.cut for row in of_method]) * 1.06**i
        full = np.array([row.full_fit_size for row in of_method])
        ratio = np.array([row.size for row in of_method]) / full
        low = np.maximum([row.size_interval.low for row in of_method] / full, 1e-3)
        high = np.minimum([row.size_interval.high for row in of_method] / full, 1e3)
        bars = np.abs([ratio - low, high - ratio])
        axes.errorbar(cuts, ratio, bars, fmt="os^"[i], color=f"C{i}", capsize=3, label=method)
        missed = [k for k, row in enumerate(of_method) if not row.size_covered]
        missed_cuts += cuts[missed].tolist()
        missed_ratios += ratio[missed].tolist()
    if missed_cuts:
        axes.plot(missed_cuts, missed_ratios, "x", color="C3", ms=13, mew=2.5, label="missed")
    axes.axhline(1, color="0.6", lw=1)
    axes.set(xlabel="FLOPs of the largest run fitted")
    axes.set(ylabel="predicted best size / that by all runs", title="Backtest, 95 % intervals")
    axes.legend(loc="upper right", fontsize=8)


def _plot_residuals(axes: "Axes", fit: ParametricFit) -> None:
    points = axes.scatter(
        fit.runs.compute, -fit.residuals, c=np.log10(fit.runs.parameters), s=12, cmap="viridis"
    )
    axes.figure.colorbar(points, ax=axes, label="log10 parameters")
    axes.axhline(0, color="0.6", lw=1)
    axes.set(xscale="log", xlabel="compute (FLOPs)", ylabel="log observed - log predicted")
    axes.set_title("Residuals")


def _plot_interval(axes: "Axes", fit: ParametricFit, compute: float) -> None:
    """Draw the interval of `optimal`, and the posterior with its interval without drift."""
    posterior = fit.posterior
    if len(posterior.weights):
        values: Array = np.log10(posterior.sizes(compute))
        # Without noise all laws are equal up to rounding, but a histogram needs a width.
        low, high = weighted_quantiles(values, posterior.weights, [1e-3, 1 - 1e-3])
        bins = np.linspace(low - 1e-6, high + 1e-6, 51).tolist()
        axes.hist(values, bins, weights=posterior.weights, color="0.8")
    top = axes.get_ylim()[1]
    answer = _optima(fit, np.array([compute]))[0].intervals or {}
    intervals = {
        "answer": answer["parameters"],
        "noise alone": posterior.interval(optimum("parameters", compute)),
    }
    for i, (name, interval) in enumerate(intervals.items()):
        ends = [math.log10(max(interval.low, 1.0)), math.log10(min(interval.high, 1e30))]
        height = top * (1.06 + 0.06 * i)
        axes.plot(ends, [height, height], f"C{i}|-", ms=10, label=f"{name}, 95 %")
    axes.axvline(math.log10(fit.law.optimal(compute).parameters), color="k", lw=1)
    axes.set(xlabel=f"log10 best parameters at {compute:.3g} FLOPs", ylabel="probability")
    axes.set_title("Uncertainty of the best size")
    axes.legend(loc="center right", fontsize=8)


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
    """Draw the best rate over the batch size, with its law and the noise scale."""
    bounded = np.array([math.isfinite(interval.high) for interval in sweep.intervals])
    ends = np.array([[interval.low, interval.high] for interval in sweep.intervals])[bounded].T
    bars = np.abs(ends - sweep.best_rates[bounded])
    sizes = sweep.batch_sizes
    axes.plot(sizes, sweep.best_rates, "C0o", label="swept")
    axes.errorbar(sizes[bounded], sweep.best_rates[bounded], bars, fmt="none", capsize=2)
    # Too few best rates, or rates that neither saturate nor peak, have no law.
    with suppress(ValueError):
        law = sweep.law
        grid = np.geomspace(sizes[0], sizes[-1], 200)
        axes.plot(grid, law.predict(grid), label=f"{law.shape} law")
    if sweep.exact_rates is not None:
        axes.plot(sizes, sweep.exact_rates, "k--", lw=1, label="exact")
    if len(sizes) >= 2 and math.isfinite(sweep.critical_batch_size):
        axes.axvline(sweep.critical_batch_size, color="0.6", ls=":", label="gradient noise scale")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="best learning rate")
    axes.legend(loc="upper left", fontsize=8)

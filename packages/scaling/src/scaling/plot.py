"""Figures of a fit, a backtest or a sweep, intervals drawn as bands; needs matplotlib."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scaling.extras import need
from scaling.fit.parametric import ParametricFit
from scaling.isoflop import IsoflopFit
from scaling.law import Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, ScalingWarning
from scaling.sweeps.sweep import Sweep
from scaling.uncertainty.backtest import Foretold
from scaling.uncertainty.profile import profile
from scaling.uncertainty.quantity import optimum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(
    result: ParametricFit | IsoflopFit | Sweep | Sequence[Foretold], *, up_to: float = 1e24
) -> "Figure":
    """One figure; `up_to` is the compute in FLOPs to which a fit is extrapolated.

    A parametric fit: N and D against C with their band, contours of the loss with the efficient
    frontier, residuals, and the interval of `optimal` at `up_to` beside those of noise alone, by
    bootstrap and by profile. An IsoFLOP fit:
    the valleys, N and D against C. A sweep: loss against rate, best rate against batch size. A
    backtest: what each cut foretold beside what all runs say.
    """
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8) if isinstance(result, ParametricFit) else (14, 4.5))
    figure.set_layout_engine("constrained")
    with warnings.catch_warnings():
        # The fit has said so already; the band shows it.
        warnings.simplefilter("ignore", ScalingWarning)
        if isinstance(result, ParametricFit):
            axes = figure.subplots(2, 2).flat
            _growth(axes[0], result, up_to)
            _contours(axes[1], result, up_to)
            _residuals(axes[2], result)
            _interval(axes[3], result, up_to)
        elif isinstance(result, IsoflopFit):
            axes = figure.subplots(1, 2).flat
            _valleys(axes[0], result)
            _growth(axes[1], result, up_to)
        elif isinstance(result, Sweep):
            axes = figure.subplots(1, 2).flat
            _curves(axes[0], result)
            _best_rates(axes[1], result)
        else:
            _foretold(figure.subplots(), result)
    return figure


def _growth(axes: "Axes", fit: ParametricFit | IsoflopFit, up_to: float) -> None:
    """N and D of the optimum against compute, each in its band."""
    compute = np.geomspace(fit.runs.compute.min(), up_to, 60)
    best: list[Optimum] = [fit.optimal(float(c)) for c in compute]
    for name, color in (("parameters", "C0"), ("tokens", "C1")):
        axes.plot(compute, [getattr(b, name) for b in best], color, label=f"{name}, 95 %")
        bands = [b.intervals[name] for b in best if b.intervals]
        low = [max(i.low, 1.0) for i in bands]
        high = [min(i.high, 1e30) for i in bands]
        axes.fill_between(compute, low, high, color=color, alpha=0.25, lw=0)
    if isinstance(fit, IsoflopFit):
        c = np.array([v.compute for v in fit.valleys])
        axes.plot(c, [v.parameters for v in fit.valleys], "C0o", ms=4)
        axes.plot(c, [v.tokens for v in fit.valleys], "C1o", ms=4)
    axes.axvline(fit.runs.compute.max(), color="0.6", ls=":", label="largest run")
    axes.set(xscale="log", yscale="log", xlabel="compute (FLOPs)", title="Compute-optimal N and D")
    axes.legend(fontsize=8)


def _valleys(axes: "Axes", fit: IsoflopFit) -> None:
    """In one scale of color by compute, since budgets are many and near to each other."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    c = [v.compute for v in fit.valleys]
    shades = ScalarMappable(LogNorm(min(c), max(c)), colormaps["viridis"])
    for valley in fit.valleys:
        n = valley.runs.parameters
        color = shades.to_rgba(np.array(valley.compute))
        axes.plot(n, valley.runs.loss, "o", color=color, ms=3)
        fine = np.geomspace(n.min(), n.max(), 100)
        axes.plot(fine, valley.predict(fine), color=color)
        axes.plot(valley.parameters, valley.loss, "k*", ms=7)
    axes.figure.colorbar(shades, ax=axes, label="FLOPs")
    axes.set(xscale="log", xlabel="parameters", ylabel="loss (nats)", title="IsoFLOP valleys")


def _foretold(axes: "Axes", rows: Sequence[Foretold]) -> None:
    """Best sizes at the top over what all runs say, by the compute of the cut; 1 is right."""
    for i, method in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = [row for row in rows if row.method == method]
        # Beside each other where two methods have one cut.
        cuts = np.array([row.cut for row in mine]) * 1.06**i
        ratio, low, high = np.array(
            [[r.size, r.size_interval.low, r.size_interval.high] for r in mine]
        ).T / np.array([r.size_by_all for r in mine])
        low, high = np.maximum(low, 1e-3), np.minimum(high, 1e3)
        bars = np.abs([ratio - low, high - ratio])
        axes.errorbar(cuts, ratio, bars, fmt="os^"[i], color=f"C{i}", capsize=3, label=method)
    axes.axhline(1, color="0.6", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs of the largest run fitted")
    axes.set(ylabel="foretold best size / that by all runs", title="Backtest, 95 % intervals")
    axes.legend(fontsize=8)


def _contours(axes: "Axes", fit: ParametricFit, up_to: float) -> None:
    """Equal loss over compute and size; the frontier runs through the leftmost point of each."""
    frontier_c = np.geomspace(fit.runs.compute.min(), up_to, 60)
    frontier_n = np.array([fit.law.optimal(float(c)).parameters for c in frontier_c])
    c = np.geomspace(fit.runs.compute.min() / 3, up_to * 3, 120)
    n = np.geomspace(fit.runs.parameters.min() / 3, frontier_n[-1] * 10, 120)
    loss = fit.law.predict(n[:, None], c / (FLOPS_PER_PARAMETER_TOKEN * n[:, None]))
    best = fit.law.predict(frontier_n, frontier_c / (FLOPS_PER_PARAMETER_TOKEN * frontier_n))
    levels = np.unique(best[::6])
    axes.clabel(axes.contour(c, n, loss, levels, cmap="viridis", linewidths=1), fontsize=7)
    axes.plot(frontier_c, frontier_n, "C3", label="efficient frontier")
    axes.plot(fit.runs.compute, fit.runs.parameters, "k.", ms=3, label="runs")
    axes.set(xscale="log", yscale="log", xlabel="compute (FLOPs)", ylabel="parameters")
    axes.set_title("Loss (nats)")
    axes.legend(fontsize=8)


def _residuals(axes: "Axes", fit: ParametricFit) -> None:
    shown = axes.scatter(
        fit.runs.compute, -fit.residuals, c=np.log10(fit.runs.parameters), s=12, cmap="viridis"
    )
    axes.figure.colorbar(shown, ax=axes, label="log10 parameters")
    axes.axhline(0, color="0.6", lw=1)
    axes.set(xscale="log", xlabel="compute (FLOPs)", ylabel="log observed - log predicted")
    axes.set_title("Residuals")


def _interval(axes: "Axes", fit: ParametricFit, compute: float) -> None:
    """Draw the interval of `optimal`, and what noise alone makes of it: resamples and profile."""
    asked = optimum("parameters", compute)
    values: Array = np.log10(asked.of(fit.resampled.constants))
    values = values[np.isfinite(values)]
    # Of runs without noise all resamples agree, to rounding.
    low, high = values.min(), max(values.max(), values.min() + 1e-6)
    axes.hist(values, np.linspace(low, high, 51).tolist(), color="0.8")
    top = axes.get_ylim()[1]
    answer = fit.optimal(compute).intervals or {}
    opinions = {
        "answer": answer["parameters"],
        "noise alone, bootstrap": fit.resampled.interval(asked),
    }
    if len(fit.runs) > 5:
        opinions["noise alone, profile"] = profile(fit, asked).interval
    for i, (name, interval) in enumerate(opinions.items()):
        ends = [math.log10(max(interval.low, 1.0)), math.log10(min(interval.high, 1e30))]
        height = top * (1.06 + 0.06 * i)
        axes.plot(ends, [height, height], f"C{i}|-", ms=10, label=f"{name}, 95 %")
    axes.axvline(math.log10(fit.law.optimal(compute).parameters), color="k", lw=1)
    axes.set(xlabel=f"log10 best parameters at {compute:.3g} FLOPs", ylabel="resamples")
    axes.set_title("How sure")
    axes.legend(fontsize=8)


def _curves(axes: "Axes", sweep: Sweep) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"](np.linspace(0, 0.9, len(sweep.batch_sizes)))
    for size, curve, best, color in zip(
        sweep.batch_sizes, sweep.loss, sweep.best_rates, colors, strict=True
    ):
        kept = (curve > 0) & (curve < 1e3 * np.nanmin(curve) + 1e-30)
        axes.plot(sweep.rates[kept], curve[kept], color=color, label=f"{size:.0f}")
        axes.axvline(best, color=color, lw=0.5, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="final loss")
    axes.set_title(f"{sweep.task}, {sweep.optimizer}")
    axes.legend(title="batch size", fontsize=7)


def _best_rates(axes: "Axes", sweep: Sweep) -> None:
    known = np.array([math.isfinite(i.high) for i in sweep.intervals])
    ends = np.array([[i.low, i.high] for i in sweep.intervals])[known].T
    bars = np.abs(ends - sweep.best_rates[known])
    axes.plot(sweep.batch_sizes, sweep.best_rates, "C0o", label="swept")
    axes.errorbar(sweep.batch_sizes[known], sweep.best_rates[known], bars, fmt="none", capsize=2)
    b = np.geomspace(sweep.batch_sizes[0], sweep.batch_sizes[-1], 200)
    if np.isfinite(sweep.best_rates).sum() >= 5:
        axes.plot(b, sweep.law.predict(b), label=f"{sweep.law.shape} law")
    if sweep.exact_rates is not None:
        axes.plot(sweep.batch_sizes, sweep.exact_rates, "k--", lw=1, label="exact")
    if len(sweep.batch_sizes) >= 2 and math.isfinite(sweep.critical_batch_size):
        axes.axvline(sweep.critical_batch_size, color="0.6", ls=":", label="gradient noise scale")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="best learning rate")
    axes.legend(fontsize=8)

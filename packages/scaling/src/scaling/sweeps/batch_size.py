"""Learning rate against batch size: which rate is best, and how it grows with the batch.

Notable: all rates of a batch size see the same data, so they are columns of one matrix product, and
their curves rise and fall together; for SGD on linear regression the loss is known exactly, and the
sweep is checked against it. (McCandlish et al. 2018; Li et al. 2024, "Surge phenomenon".)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from scaling.law import Interval
from scaling.runs import Array, ScalingWarning
from scaling.sweeps.rate_law import RateLaw, fit_rate_law
from scaling.tables.cells import number
from scaling.tables.source import located

Task = Literal["linear", "mlp"]
Optimizer = Literal["sgd", "adam"]


@dataclass(frozen=True)
class Setting:
    """The defaults of one sweep."""

    rates: tuple[float, float, int]
    """First, last and how many, evenly in the logarithm."""
    batch_sizes: tuple[int, ...]
    seeds: int
    steps: int
    dimension: int
    noise: float


SETTINGS: dict[tuple[Task, Optimizer], Setting] = {
    ("linear", "sgd"): Setting((4e-3, 2.0, 61), (*(2**i for i in range(11)),), 64, 10, 64, 0.0),
    ("linear", "adam"): Setting((1e-2, 1.0, 31), (*(2**i for i in range(10)),), 64, 20, 64, 8.0),
    ("mlp", "sgd"): Setting((3e-3, 0.3, 20), (*(2**i for i in range(7)),), 8, 150, 16, 0.0),
    ("mlp", "adam"): Setting((3e-4, 0.1, 16), (*(2**i for i in range(7)),), 8, 150, 16, 0.0),
}


@dataclass(frozen=True)
class Sweep:
    """Mean final loss of every (batch size, rate), and the rate at the bottom of each curve.

    A minimum at the lowest or highest rate is no optimum: `best_rates` is nan there, and the law
    goes without it.
    """

    task: str
    optimizer: str
    rates: Array
    batch_sizes: Array
    log_loss: Array
    """(batch sizes, rates), the log of the mean loss (of the built-in tasks half the mean squared
    error less label noise, which may be below any float64); inf where it diverged, nan where
    nothing was trained."""
    best_rates: Array
    """(batch sizes,) the bottom of a polynomial through the log losses about the least; nan where
    the rates do not bracket it."""
    intervals: tuple[Interval, ...]
    """95 % of each best rate: by leaving out each seed, or by the scatter about a parabola;
    (0, inf) where there is neither."""
    exact_rates: Array | None
    """The same from theory: SGD on linear regression."""
    gradient_squares: Array
    """(batch sizes,) mean squared norm of the first step's gradient."""
    runs: int

    @property
    def loss(self) -> Array:
        """(batch sizes, rates) of `log_loss`."""
        return np.exp(self.log_loss)

    @property
    def law(self) -> RateLaw:
        """The curve that the best rates follow; ValueError for fewer than five of them."""
        found = np.isfinite(self.best_rates)
        return fit_rate_law(self.batch_sizes[found], self.best_rates[found])

    @property
    def critical_batch_size(self) -> float:
        """The gradient noise scale at the start: see `gradient_noise_scale`."""
        return gradient_noise_scale(self.batch_sizes, self.gradient_squares)


def exact_rate(batch_size: ArrayLike, dimension: int) -> Array:
    """B / (B + d + 1), the best rate of SGD on noiseless linear regression, x ~ N(0, I).

    A step of rate r on half the mean squared error multiplies E|w - w*|^2 by
    1 - 2 r + r^2 (1 + (d + 1) / B), whatever w; that is least at this r.
    """
    b = np.asarray(batch_size, np.float64)
    return b / (b + dimension + 1)


def exact_loss(
    rates: ArrayLike, batch_size: float, dimension: int, *, steps: int, noise: float = 0.0
) -> Array:
    """E|w - w*|^2 / 2 after `steps` of SGD from |w - w*|^2 = d, with label noise of this deviation.

    v' = (1 - 2 r + r^2 (1 + (d + 1) / B)) v + r^2 noise^2 d / B, iterated.
    """
    r = np.asarray(rates, np.float64)
    factor = 1 - 2 * r + r**2 * (1 + (dimension + 1) / batch_size)
    v = np.full_like(r, dimension)
    for _ in range(steps):
        v = factor * v + r**2 * noise**2 * dimension / batch_size
    return v / 2


def gradient_noise_scale(batch_sizes: ArrayLike, gradient_squares: ArrayLike) -> float:
    """tr(S) / |G|^2 in examples: the batch above which averaging more of them stops paying.

    E|g_B|^2 = |G|^2 + tr(S) / B is a line in 1 / B, fitted to squared norms at two batch sizes or
    more (McCandlish et al. 2018, appendix A.1). For linear regression at |w - w*|^2 = d it is
    d + 1 + noise^2, the same d + 1 as in `exact_rate`.
    """
    b = np.asarray(batch_sizes, np.float64)
    squares = np.asarray(gradient_squares, np.float64)
    if len(np.unique(b)) < 2:
        raise ValueError(f"batch sizes {b.tolist()}: a noise scale needs two different ones")
    # Relative errors are alike at all batch sizes, so weigh by the inverse of the square.
    trace, square = np.polyfit(1 / b, squares, 1, w=1 / squares)
    return float(trace / square) if square > 0 else float("inf")


def sweep_learning_rate(
    task: Task | Callable[[float, int, int], float] = "linear",
    optimizer: Optimizer = "sgd",
    *,
    rates: Sequence[float] | None = None,
    batch_sizes: Sequence[int] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    dimension: int | None = None,
    noise: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Sweep:
    """Train at every rate, batch size and seed, on fresh data at every step; needs torch.

    "linear" is regression on x ~ N(0, I) from |w - w*|^2 = d; "mlp" is a network of 64 ReLUs that
    learns another one like it. What is None comes from `SETTINGS`. A task of one's own is a
    function of (rate, batch size, seed) that trains and returns the final loss, nan if it diverged;
    it needs `rates` and `batch_sizes`, and has one seed unless told. ScalingWarning where the least
    loss is at the lowest or highest rate.
    """
    if callable(task):
        return _trained(task, rates, batch_sizes, seeds or 1, seed)
    if (task, optimizer) not in SETTINGS:
        raise ValueError(f"{task!r} with {optimizer!r}: the sweeps are {sorted(SETTINGS)}")
    from scaling.sweeps import training  # torch is only needed here

    default = SETTINGS[task, optimizer]
    grid = np.geomspace(*default.rates) if rates is None else np.sort(np.asarray(rates, np.float64))
    sizes = np.sort(np.asarray(batch_sizes or default.batch_sizes))
    if not (grid > 0).all() or not (sizes > 0).all():
        raise ValueError(
            f"rates and batch sizes must be positive: {grid.tolist()}, {sizes.tolist()}"
        )
    count = default.seeds if seeds is None else seeds
    steps = default.steps if steps is None else steps
    dimension = default.dimension if dimension is None else dimension
    noise = default.noise if noise is None else noise
    by_seed, squares = training.train(
        task,
        optimizer,
        rates=grid,
        batch_sizes=[int(b) for b in sizes],
        seeds=count,
        steps=steps,
        dimension=dimension,
        noise=noise,
        seed=seed,
        device=device,
    )
    exact = None
    if (task, optimizer) == ("linear", "sgd"):
        exact = exact_rate(sizes, dimension)
        if noise:
            fine = np.geomspace(1e-5, 2, 20_001)
            curves = [exact_loss(fine, b, dimension, steps=steps, noise=noise) for b in sizes]
            exact = fine[np.argmin(curves, axis=1)]
    return _swept(task, optimizer, grid, sizes.astype(float), by_seed, exact, squares)


def fit_sweep(source: Any, *, columns: Mapping[str, str] | None = None) -> Sweep:
    """One's own runs: a rate, a batch size and a final loss each, with repetitions as they are.

    `source` is a CSV, JSON, DataFrame, mapping of columns or records, as for `load_runs`; `columns`
    names those of "rate", "batch_size" and "loss" that are not called as usual. Rows without a loss
    are left out, and diverged ones (nan, inf) count as infinitely bad. ValueError names a bad cell.
    """
    table = [(row, r) for row, r in located(source, None) if r]
    if not table:
        raise ValueError("the table holds no runs")
    present = list(dict.fromkeys(name for _, record in table for name in record))
    found = {}
    for ours, usual in SWEPT.items():
        likely = [name for name in present if _plain(name) in usual.split()]
        given = (columns or {}).get(ours)
        if (given not in present) if given is not None else len(likely) != 1:
            raise ValueError(
                f"columns {present}: which is the {ours}? Pass columns={{{ours!r}: '…'}}"
            )
        found[ours] = given if given is not None else likely[0]
    runs: dict[tuple[float, float], list[float]] = {}
    for row, record in table:
        if record.get(found["loss"]) in (None, ""):
            continue
        rate, size, loss = (number(record.get(name), False) for name in found.values())
        for name, value in (("rate", rate), ("batch_size", size)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"column {found[name]!r} must be positive and finite, but row {row}:"
                    f" {record.get(found[name])!r}"
                )
        if loss <= 0:
            raise ValueError(f"column {found['loss']!r} must be positive, but row {row}: {loss}")
        runs.setdefault((size, rate), []).append(loss if math.isfinite(loss) else math.inf)
    if not runs:
        raise ValueError(f"no row has a loss in column {found['loss']!r}")
    sizes, rates = (np.array(sorted({pair[i] for pair in runs})) for i in (0, 1))
    seeds = max(map(len, runs.values()))
    by_seed = np.full((len(sizes), seeds, len(rates)), np.nan)
    for (size, rate), losses in runs.items():
        at = int(np.searchsorted(sizes, size)), int(np.searchsorted(rates, rate))
        by_seed[at[0], : len(losses), at[1]] = np.log(losses)
    return _swept("own", "own", rates, sizes, by_seed)


SWEPT = {
    "rate": "rate lr learningrate maxlr peaklr baselr eta maxlearningrate peaklearningrate",
    "batch_size": "batchsize bs batch b globalbatchsize trainbatchsize tokensperbatch batchtokens",
    "loss": "loss finalloss valloss evalloss testloss validationloss trainloss l",
}


def _plain(name: str) -> str:
    return "".join(c for c in name.rsplit(".")[-1].lower() if c.isalnum())


def _trained(
    task: Callable[[float, int, int], float],
    rates: Sequence[float] | None,
    batch_sizes: Sequence[int] | None,
    seeds: int,
    seed: int,
) -> Sweep:
    if rates is None or batch_sizes is None:
        raise ValueError("a task of your own needs rates and batch_sizes to be tried at")
    grid = np.sort(np.asarray(rates, np.float64))
    sizes = sorted(batch_sizes)
    losses = [
        [[float(task(float(r), b, seed + i)) for r in grid] for i in range(seeds)] for b in sizes
    ]
    found = np.array(losses)
    found[~np.isfinite(found)] = np.inf
    if (found <= 0).any():
        raise ValueError(f"the task's loss is {found.min():g}; it must be positive")
    return _swept(
        getattr(task, "__name__", "own"), "own", grid, np.array(sizes, float), np.log(found)
    )


def _swept(
    task: str,
    optimizer: str,
    rates: Array,
    sizes: Array,
    by_seed: Array,
    exact: Array | None = None,
    squares: Array | None = None,
) -> Sweep:
    """The sweep of (batch sizes, seeds, rates) log losses."""
    log_loss = np.stack([_mean(one) for one in by_seed])
    best = np.array([_bottom(rates, curve) for curve in log_loss])
    _warn_of_edges(rates, sizes, log_loss)
    intervals = tuple(_interval(rates, *pair) for pair in zip(by_seed, best, strict=True))
    if squares is None:
        squares = np.full(len(sizes), np.nan)
    runs = int((~np.isnan(by_seed)).sum())
    return Sweep(task, optimizer, rates, sizes, log_loss, best, intervals, exact, squares, runs)


def _mean(log_losses: Array) -> Array:
    """(rates,) log of the mean loss over the seeds that were trained."""
    count = (~np.isnan(log_losses)).sum(0)
    filled = np.where(np.isnan(log_losses), -np.inf, log_losses)
    mean: Array = np.logaddexp.reduce(filled, axis=0) - np.log(np.maximum(count, 1))
    return np.where(count > 0, mean, np.nan)


def _interval(rates: Array, by_seed: Array, best: float) -> Interval:
    """The jackknife over seeds where there are three or more, else the scatter about a parabola."""
    deviation, freedom = math.inf, 0
    trained = by_seed[~np.isnan(by_seed).all(1)]
    if math.isfinite(best) and len(trained) >= 3:
        every = [_bottom(rates, _mean(np.delete(trained, i, 0))) for i in range(len(trained))]
        logs, freedom = np.log([b for b in every if math.isfinite(b)]), len(trained) - 1
        if len(logs) == len(trained):
            deviation = math.sqrt(freedom / len(logs) * float(((logs - logs.mean()) ** 2).sum()))
    elif math.isfinite(best):
        curve = _mean(trained)
        x = np.log(rates / best)
        near = np.isfinite(curve) & _near(rates, curve)
        freedom = int(near.sum()) - 3
        if freedom > 0:
            (a, b, _), spread = np.polyfit(x[near], curve[near], 2, cov=True)
            if a > 0:
                slope = np.array([b / (2 * a**2), -1 / (2 * a), 0.0])
                deviation = math.sqrt(float(slope @ spread @ slope))
    if not (math.isfinite(deviation) and freedom > 0):
        return Interval(0.0, math.inf)
    half = min(float(stdtrit(freedom, 0.975)) * deviation, 600.0)
    return Interval(best * math.exp(-half), best * math.exp(half))


def _warn_of_edges(rates: Array, batch_sizes: Array, log_loss: Array) -> None:
    if len(rates) < 3:  # Whoever asks for one or two rates looks for no bottom.
        return
    edges = [_edges(curve) for curve in log_loss]
    for side, beyond in ((0, "below"), (1, "above")):
        found = [i for i, (least, *ends) in enumerate(edges) if least == ends[side]]
        if found:
            sizes = ", ".join(f"{batch_sizes[i]:g}" for i in found)
            lowest = rates[edges[found[0]][1 + side]]
            warnings.warn(
                f"the least loss at batch sizes {sizes} is at the edge of the rates: sweep rates"
                f" {beyond} {lowest:.3g} too; these have no best rate",
                ScalingWarning,
                stacklevel=4,
            )


def _edges(log_loss: Array) -> tuple[int, int, int]:
    """Where the least loss is, and the lowest and highest rates that were trained."""
    trained = np.flatnonzero(~np.isnan(log_loss))
    least = int(np.nanargmin(log_loss))
    return least, int(trained[0]), int(trained[-1])


def _near(rates: Array, log_loss: Array) -> NDArray[np.bool_]:
    """The rates within a factor of 1.6 of the best, and two on each side of it."""
    trained = np.flatnonzero(~np.isnan(log_loss))
    best = int(np.nanargmin(log_loss))
    near: NDArray[np.bool_] = np.abs(np.log(rates / rates[best])) < np.log(1.6)
    at = int(np.searchsorted(trained, best))
    near[trained[max(at - 2, 0) : at + 3]] = True
    return near & np.isfinite(log_loss)


def _bottom(rates: Array, log_loss: Array) -> float:
    """The rate at the bottom of a polynomial, in log rate and log loss, about the least loss.

    A quartic over the rates within a factor of 1.6, where the grid is fine; else a parabola over
    five points. nan where the least is at an edge.
    """
    best, *ends = _edges(log_loss)
    if best in ends:
        return math.nan
    near = _near(rates, log_loss)
    if near.sum() < 3:
        return float(rates[best])
    x = np.log(rates) - np.log(rates[best])
    degree = 4 if near.sum() > 6 else 2
    curve = np.polynomial.Polynomial.fit(x[near], log_loss[near], degree)
    fine = np.linspace(x[near][0], x[near][-1], 2001)
    return float(rates[best] * np.exp(fine[np.argmin(curve(fine))]))

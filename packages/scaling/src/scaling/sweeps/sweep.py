"""A sweep: losses by rate, batch size and seed; each batch size's best rate, and how sure it is.

Notable: the best rate is the bottom of a curve in log rate and log loss, not the best rate tried; a
least loss at the edge of the rates is no bottom, and is refused.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from scaling.equality import ComparesArrays
from scaling.law import Interval
from scaling.runs import Array, ScalingWarning
from scaling.sweeps.rate_law import RateLaw, fit_rate_law


@dataclass(frozen=True, eq=False)
class Sweep(ComparesArrays):
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
    diverged: int = 0
    """Number of runs that diverged; a rate at which any run did is not used."""
    explanation: str = ""
    """Which columns of a table were read, and which runs were left out."""

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
        """The gradient noise scale at the start, `gradient_noise_scale`; nan where no gradient was
        seen."""
        if np.isnan(self.gradient_squares).all():
            return math.nan
        return gradient_noise_scale(self.batch_sizes, self.gradient_squares)


def gradient_noise_scale(batch_sizes: ArrayLike, gradient_squares: ArrayLike) -> float:
    """tr(S) / |G|^2 in examples: the batch above which averaging more of them stops paying.

    E|g_B|^2 = |G|^2 + tr(S) / B is a line in 1 / B, fitted to squared norms at two batch sizes or
    more (McCandlish et al. 2018, appendix A.1). For linear regression at |w - w*|^2 = d it is
    d + 1 + noise^2, the same d + 1 as in `exact_rate`.
    """
    b = np.asarray(batch_sizes, np.float64)
    squares = np.asarray(gradient_squares, np.float64)
    if not (np.isfinite([b, squares]).all() and (b > 0).all() and (squares > 0).all()):
        raise ValueError(f"{b.tolist()}, {squares.tolist()}: must be positive and finite")
    if len(np.unique(b)) < 2:
        raise ValueError(f"batch sizes {b.tolist()}: a noise scale needs two different ones")
    # Relative errors are alike at all batch sizes, so weigh by the inverse of the square.
    trace, square = np.polyfit(1 / b, squares, 1, w=1 / squares)
    return float(trace / square) if square > 0 else float("inf")


def tried(rates: Sequence[float] | Array, batch_sizes: Sequence[int]) -> tuple[Array, Array]:
    """Both in order; ValueError unless there are some, all positive and finite."""
    grid, sizes = np.sort(np.asarray(rates, np.float64)), np.sort(np.asarray(batch_sizes))
    for name, values in (("rates", grid), ("batch sizes", sizes)):
        if not (len(values) and (values > 0).all() and np.isfinite(values).all()):
            raise ValueError(f"{name} must be positive and finite: {values.tolist()}")
    return grid, sizes


def swept(
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
    edges = [_edges(curve) for curve in log_loss]
    # Whoever asks for one or two rates looks for no bottom.
    for side, beyond in ((1, "below"), (2, "above")) if len(rates) > 2 else ():
        if found := [i for i, at in enumerate(edges) if at[0] == at[side]]:
            warnings.warn(
                f"the least loss at batch sizes {', '.join(f'{sizes[i]:g}' for i in found)} is at"
                f" the edge of the rates: sweep rates {beyond} {rates[edges[found[0]][side]]:.3g}"
                " too; these have no best rate",
                ScalingWarning,
                stacklevel=3,
            )
    intervals = tuple(_interval(rates, *pair) for pair in zip(by_seed, best, strict=True))
    squares = np.full(len(sizes), np.nan) if squares is None else squares
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
    bottom = float(fine[np.argmin(curve(fine))])
    trained = np.flatnonzero(~np.isnan(log_loss))
    at = int(np.searchsorted(trained, best))
    around = trained[at - 1 : at + 2]
    if not x[around[0]] <= bottom <= x[around[-1]]:
        # The curve is no parabola that far out: the neighbors of the least loss bracket its bottom.
        around = around[np.isfinite(log_loss[around])]
        curve = np.polynomial.Polynomial.fit(x[around], log_loss[around], len(around) - 1)
        fine = np.linspace(x[around[0]], x[around[-1]], 2001)
        bottom = float(fine[np.argmin(curve(fine))])
    return float(rates[best] * np.exp(bottom))

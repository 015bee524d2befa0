"""Learning rate against batch size: which rate is best, and how it grows with the batch.

Notable: all rates of a batch size see the same data, so they are columns of one matrix product, and
their curves rise and fall together; for SGD on linear regression the loss is known exactly, and the
sweep is checked against it. (McCandlish et al. 2018; Li et al. 2024, "Surge phenomenon".)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from scaling.runs import Array, ScalingWarning
from scaling.sweeps.rate_law import RateLaw, fit_rate_law

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

    task: Task
    optimizer: Optimizer
    rates: Array
    batch_sizes: Array
    log_loss: Array
    """(batch sizes, rates), the log of half the mean squared error less label noise; inf where it
    diverged. The loss itself may be below any float64."""
    best_rates: Array
    """(batch sizes,) the bottom of a polynomial through the log losses about the least; nan where
    the rates do not bracket it."""
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
    task: Task = "linear",
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
    learns another one like it. What is None comes from `SETTINGS`. ScalingWarning where the least
    loss is at the lowest or highest rate.
    """
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
    log_loss, squares = training.train(
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
    best = np.array([_bottom(grid, curve) for curve in log_loss])
    _warn_of_edges(grid, sizes, log_loss)
    runs = log_loss.size * count
    return Sweep(task, optimizer, grid, sizes.astype(float), log_loss, best, exact, squares, runs)


def _warn_of_edges(rates: Array, batch_sizes: Array, log_loss: Array) -> None:
    if len(rates) < 3:  # Whoever asks for one or two rates looks for no bottom.
        return
    least = np.argmin(log_loss, axis=1)
    for edge, beyond in ((0, "below"), (len(rates) - 1, "above")):
        if (at := least == edge).any():
            sizes = ", ".join(str(b) for b in batch_sizes[at])
            warnings.warn(
                f"the least loss at batch sizes {sizes} is at the edge of the rates: sweep rates"
                f" {beyond} {rates[edge]:.3g} too; these have no best rate",
                ScalingWarning,
                stacklevel=3,
            )


def _bottom(rates: Array, log_loss: Array) -> float:
    """The rate at the bottom of a polynomial, in log rate and log loss, about the least loss.

    A quartic over the rates within a factor of 1.6, where the grid is fine; else a parabola over
    five points. nan where the least is at an edge.
    """
    best = int(np.argmin(log_loss))
    if best in (0, len(rates) - 1):
        return math.nan
    x = np.log(rates) - np.log(rates[best])
    near = np.abs(x) < np.log(1.6)
    near[max(best - 2, 0) : best + 3] = True
    near &= np.isfinite(log_loss)
    if near.sum() < 3:
        return float(rates[best])
    degree = 4 if near.sum() > 6 else 2
    curve = np.polynomial.Polynomial.fit(x[near], log_loss[near], degree)
    fine = np.linspace(x[near][0], x[near][-1], 2001)
    return float(rates[best] * np.exp(fine[np.argmin(curve(fine))]))

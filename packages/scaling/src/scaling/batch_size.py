"""Learning rate against batch size: which rate is best, and how it grows with the batch.

Notable: all rates of a batch size see the same data, so they are columns of one matrix product, and
their curves rise and fall together; for SGD on linear regression the loss is known exactly, and the
sweep is checked against it. (McCandlish et al. 2018; Li et al. 2024, "Surge phenomenon".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from scaling.rate_law import RateLaw, fit_rate_law
from scaling.runs import Array

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
    """Mean final loss of every (batch size, rate), and the rate at the bottom of each curve."""

    task: Task
    optimizer: Optimizer
    rates: Array
    batch_sizes: Array
    loss: Array
    """(batch sizes, rates), half the mean squared error less label noise; inf where it diverged."""
    best_rates: Array
    """(batch sizes,) the bottom of a polynomial through the log losses about the least."""
    exact_rates: Array | None
    """The same from theory: SGD on linear regression."""
    gradient_squares: Array
    """(batch sizes,) mean squared norm of the first step's gradient."""
    runs: int

    @property
    def law(self) -> RateLaw:
        """The curve that the best rates follow."""
        return fit_rate_law(self.batch_sizes, self.best_rates)

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
    learns another one like it. What is None comes from `SETTINGS`.
    """
    if (task, optimizer) not in SETTINGS:
        raise ValueError(f"{task!r} with {optimizer!r}: the sweeps are {sorted(SETTINGS)}")
    from scaling import training  # torch is only needed here

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
    loss, squares = training.train(
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
    best = np.array([_bottom(grid, curve) for curve in loss])
    runs = loss.size * count
    return Sweep(task, optimizer, grid, sizes.astype(float), loss, best, exact, squares, runs)


def _bottom(rates: Array, loss: Array) -> float:
    """The rate at the bottom of a polynomial, in log rate and log loss, about the least loss.

    A quartic over the rates within a factor of 1.6, where the grid is fine; else a parabola over
    five points.
    """
    best = int(np.argmin(loss))
    x = np.log(rates) - np.log(rates[best])
    near = np.abs(x) < np.log(1.6)
    near[max(best - 2, 0) : best + 3] = True
    near &= np.isfinite(loss) & (loss > 0)
    if best in (0, len(rates) - 1) or near.sum() < 3:
        return float(rates[best])
    degree = 4 if near.sum() > 6 else 2
    curve = np.polynomial.Polynomial.fit(x[near], np.log(loss[near]), degree)
    fine = np.linspace(x[near][0], x[near][-1], 2001)
    return float(rates[best] * np.exp(fine[np.argmin(curve(fine))]))

"""Learning rate against batch size: which rate is best, and how it grows with the batch.

Notable: all rates of a batch size see the same data, so they are columns of one matrix product, and
their curves rise and fall together; for SGD on linear regression the loss is known exactly, and the
sweep is checked against it. (McCandlish et al. 2018; Li et al. 2024, "Surge phenomenon".)
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scaling.extras import need
from scaling.runs import Array
from scaling.sweeps.own import trained
from scaling.sweeps.sweep import Sweep, swept, tried

Task = Literal["linear", "mlp"]
Optimizer = Literal["sgd", "adam"]


class Setting(NamedTuple):
    """The defaults of one sweep; rates are the first, the last and how many, evenly in logs."""

    rates: tuple[float, float, int]
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
        return trained(task, rates, batch_sizes, seeds or 1, seed)
    if (task, optimizer) not in SETTINGS:
        raise ValueError(f"{task!r} with {optimizer!r}: the sweeps are {sorted(SETTINGS)}")
    need("torch", "sweep")
    from scaling.sweeps import training  # torch is only needed here

    default = SETTINGS[task, optimizer]
    usual = np.geomspace(*default.rates)
    grid, sizes = tried(usual if rates is None else rates, batch_sizes or default.batch_sizes)
    asked: dict[str, Any] = {"seeds": seeds, "steps": steps, "dimension": dimension, "noise": noise}
    chosen = default._replace(**{k: v for k, v in asked.items() if v is not None})
    if min(chosen.seeds, chosen.steps, chosen.dimension) < 1 or not chosen.noise >= 0:
        raise ValueError(f"seeds, steps and dimension are one or more, noise not negative: {asked}")
    options = {k: getattr(chosen, k) for k in asked} | {"seed": seed, "device": device}
    counts = [int(b) for b in sizes]
    by_seed, squares = training.train(task, optimizer, rates=grid, batch_sizes=counts, **options)
    exact = None
    if (task, optimizer) == ("linear", "sgd"):
        exact = exact_rate(sizes, chosen.dimension)
        if chosen.noise:
            known: dict[str, Any] = {"steps": chosen.steps, "noise": chosen.noise}
            fine = np.geomspace(1e-5, 2, 20_001)
            curves = [exact_loss(fine, b, chosen.dimension, **known) for b in sizes]
            exact = fine[np.argmin(curves, axis=1)]
    return swept(task, optimizer, grid, sizes.astype(float), by_seed, exact, squares)

"""Sweeps of the learning rate against the batch size, by training many small models at once.

All rates at a batch size use the same data, so they are columns of one matrix product and have the
same noise. For SGD on linear regression, the exact best rate is known: see `exact_rate`. See also
McCandlish et al. 2018, and Li et al. 2024, "Surge phenomenon".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from scaling.extras import require_module
from scaling.sweeps.sweep import (
    Setting,
    Sweep,
    build_sweep,
    sort_distinct_settings,
    sweep_function,
)
from scaling.units import Array

Task = Literal["linear", "mlp"]
Optimizer = Literal["sgd", "adam"]

SETTINGS: dict[tuple[Task, Optimizer], Setting] = {
    ("linear", "sgd"): Setting((4e-3, 2.0, 61), (*(2**i for i in range(11)),), 64, 10, 64, 0.0),
    ("linear", "adam"): Setting((1e-2, 1.0, 31), (*(2**i for i in range(10)),), 64, 20, 64, 8.0),
    ("mlp", "sgd"): Setting((3e-3, 0.3, 20), (*(2**i for i in range(7)),), 8, 150, 16, 0.0),
    ("mlp", "adam"): Setting((3e-4, 0.1, 16), (*(2**i for i in range(7)),), 8, 150, 16, 0.0),
}


def exact_rate(batch_size: ArrayLike, dimension: int) -> Array:
    """Return B / (B + d + 1), the best rate of SGD on noiseless linear regression, x ~ N(0, I).

    Consider a step of rate r on half the mean squared error. For any w, it multiplies E|w - w*|^2
    by 1 - 2 r + r^2 (1 + (d + 1) / B). The returned rate minimizes this factor. Raises `ValueError`
    unless the batch size is positive and finite and `dimension` is a positive integer.
    """
    _require_count("dimension", dimension)
    b = np.asarray(batch_size, np.float64)
    if not ((b > 0).all() and np.isfinite(b).all()):
        raise ValueError(f"expected positive and finite batch_size, got {b.tolist()}")
    return b / (b + dimension + 1)


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
    """Train at every rate, batch size and seed, on fresh data at every step; return the sweep.

    Args:
        task: "linear" is regression on x ~ N(0, I) that starts at `|w - w*|^2 = d`. "mlp" is a
            network of 64 ReLUs that learns the outputs of another such network. A function of
            (rate, batch size, seed) trains and returns the final loss, or nan if the run diverged.
            It requires `rates` and `batch_sizes` and has one seed by default; `steps`, `dimension`
            and `noise` are then errors.
        optimizer: "sgd" or "adam", for the built-in tasks.
        rates, batch_sizes, seeds, steps, dimension, noise: By default, the values in `SETTINGS`.
            `dimension` is the number of inputs, and `noise` the standard deviation of the labels.
        seed: The random seed of a built-in task, or the first seed passed to a function.
        device: The torch device of the built-in tasks.

    Raises:
        ValueError: The task or an option is invalid, or a function returns a loss that is not
            positive.

    Built-in tasks need torch. A `ScalingWarning` reports that the least loss of a batch size is at
    the lowest or highest rate.
    """
    requested = {"seeds": seeds, "steps": steps, "dimension": dimension, "noise": noise}
    options: dict[str, Any] = {k: v for k, v in requested.items() if v is not None}
    for name, value in options.items():
        if name != "noise":
            _require_count(name, value)
        if callable(task) and name != "seeds":
            raise ValueError(
                f"expected no {name} with a function as task, which trains by itself, got {value!r}"
            )
    if callable(task):
        return sweep_function(task, rates, batch_sizes, options.get("seeds", 1), seed)
    if (task, optimizer) not in SETTINGS:
        raise ValueError(f"expected one of {sorted(SETTINGS)}, got {task!r} with {optimizer!r}")
    require_module("torch", "sweep")
    from scaling.sweeps import training  # torch is only needed here

    default = SETTINGS[task, optimizer]
    default_rates = np.geomspace(*default.rates)
    grid, sizes = sort_distinct_settings(
        default_rates if rates is None else rates,
        default.batch_sizes if batch_sizes is None else batch_sizes,
    )
    for size in sizes.tolist():
        _require_count("every batch size", size)
    setting = default._replace(**options)
    if not 0 <= setting.noise < math.inf:
        raise ValueError(f"expected a finite noise >= 0, got {setting.noise}")
    batch_counts = [int(size) for size in sizes]
    by_seed = training.train(task, optimizer, setting, grid, batch_counts, seed, device)
    return build_sweep(task, optimizer, grid, sizes.astype(float), by_seed)


def _require_count(name: str, number: float) -> None:
    """Raise `ValueError` unless a number is a positive integer."""
    if isinstance(number, bool) or not math.isfinite(number) or number < 1 or number != int(number):
        raise ValueError(f"expected {name} to be an integer >= 1, got {number!r}")

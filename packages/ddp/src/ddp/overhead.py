"""What bucketing leaves to wait for after the backward pass, and the bucket size that is best.

With n buckets of s/n bytes each, a link of w bytes per second and o seconds of fixed cost a call,
all but the last bucket travel while the backward pass still computes:

    overhead(n) = s / (n w) + n o,    smallest at s/n = sqrt(s o w), where it is 2 sqrt(s o / w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def overhead_seconds(
    model_bytes: float, bandwidth: float, latency: float, num_buckets: float
) -> float:
    """Seconds between the end of the backward pass and the last gradient: s/(n w) + n o.

    `bandwidth` is in bytes per second, `latency` in seconds a call. Raises ValueError unless all
    are positive.
    """
    _positive(model_bytes=model_bytes, bandwidth=bandwidth, num_buckets=num_buckets)
    return model_bytes / (num_buckets * bandwidth) + num_buckets * latency


def optimal_bucket_bytes(model_bytes: float, bandwidth: float, latency: float) -> float:
    """The bucket size that minimizes `overhead_seconds`: sqrt(s o w) bytes."""
    _positive(model_bytes=model_bytes, bandwidth=bandwidth, latency=latency)
    return math.sqrt(model_bytes * latency * bandwidth)


@dataclass(frozen=True)
class Overhead:
    """A fitted model: bytes per second, seconds a call, and seconds that no bucket size hides."""

    model_bytes: float
    bandwidth: float
    latency: float
    floor: float = 0.0

    def seconds(self, num_buckets: float) -> float:
        """Predicted overhead of `num_buckets` buckets."""
        return self.floor + overhead_seconds(
            self.model_bytes, self.bandwidth, self.latency, num_buckets
        )

    @property
    def bucket_bytes(self) -> float:
        """The predicted best bucket size."""
        return optimal_bucket_bytes(self.model_bytes, self.bandwidth, self.latency)


def fit(model_bytes: float, num_buckets: Sequence[float], seconds: Sequence[float]) -> Overhead:
    """Fit bandwidth, latency and floor to a sweep: `seconds[i]` measured at `num_buckets[i]`.

    Least squares of seconds/measured - 1 on (1, 1/n, n) with no coefficient below zero. Raises
    ValueError when fewer than three bucket counts differ, or when the sweep shows no trade-off.
    """
    counts, measured = np.asarray(num_buckets, float), np.asarray(seconds, float)
    if len(set(counts.tolist())) < 3:
        raise ValueError(f"{len(set(counts.tolist()))} bucket counts cannot fix three terms: use 3")
    rows = np.stack([np.ones_like(counts), 1 / counts, counts], axis=1) / measured[:, None]
    floor, one_call, a_call = _nonnegative_least_squares(rows, np.ones_like(measured))
    if one_call == 0 or a_call == 0:
        raise ValueError(
            "the sweep does not rise at both ends, so it has no optimum: "
            f"{[f'{s:.4g} s at {n:g}' for n, s in zip(counts, measured, strict=True)]}; "
            "measure larger and smaller buckets"
        )
    return Overhead(model_bytes, model_bytes / one_call, a_call, floor)


def _nonnegative_least_squares(rows: np.ndarray, targets: np.ndarray) -> list[float]:
    """Try every set of terms: with three of them there are seven."""
    best, best_error = [0.0, 0.0, 0.0], math.inf
    for subset in range(1, 8):
        columns = [i for i in range(3) if subset >> i & 1]
        solution, *_ = np.linalg.lstsq(rows[:, columns], targets, rcond=None)
        error = float(np.sum((rows[:, columns] @ solution - targets) ** 2))
        if (solution >= 0).all() and error < best_error:
            best, best_error = [0.0, 0.0, 0.0], error
            for column, value in zip(columns, solution, strict=True):
                best[column] = float(value)
    return best


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above zero")

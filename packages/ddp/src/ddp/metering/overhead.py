"""A model of the communication that remains after the backward pass, and the best bucket size.

There are n buckets of s/n bytes each. The bandwidth is w bytes per second, and the latency is o
seconds per call. All buckets except the last are sent while the backward pass computes. The
remaining time is

    overhead(n) = s / (n w) + n o,    minimal at s/n = sqrt(s o w), where it is 2 sqrt(s o / w).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def overhead_seconds(
    model_bytes: float, bandwidth: float, latency: float, num_buckets: float
) -> float:
    """Return the seconds from the end of the backward pass to the last gradient: s/(n w) + n o.

    `bandwidth` is in bytes per second, `latency` in seconds per call. Raises `ValueError` unless
    `model_bytes`, `bandwidth` and `num_buckets` are positive and `latency` is not negative.
    """
    _check_positive(model_bytes=model_bytes, bandwidth=bandwidth, num_buckets=num_buckets)
    if not latency >= 0:
        raise ValueError(f"expected latency >= 0, got latency={latency}")
    return model_bytes / (num_buckets * bandwidth) + num_buckets * latency


def optimal_bucket_bytes(model_bytes: float, bandwidth: float, latency: float) -> float:
    """Return the bucket size that minimizes `overhead_seconds`: sqrt(s o w) bytes.

    Raises `ValueError` unless all arguments are positive.
    """
    _check_positive(model_bytes=model_bytes, bandwidth=bandwidth, latency=latency)
    return math.sqrt(model_bytes * latency * bandwidth)


@dataclass(frozen=True)
class Overhead:
    """A fitted model of the overhead."""

    model_bytes: float
    #: Bytes per second.
    bandwidth: float
    #: Seconds per call.
    latency: float
    #: Seconds of overhead that remain at any bucket size.
    floor: float = 0.0

    def seconds(self, num_buckets: float) -> float:
        """Return the predicted overhead of `num_buckets` buckets."""
        return self.floor + overhead_seconds(
            self.model_bytes, self.bandwidth, self.latency, num_buckets
        )

    @property
    def bucket_bytes(self) -> float:
        """The predicted best bucket size."""
        return optimal_bucket_bytes(self.model_bytes, self.bandwidth, self.latency)


def fit(model_bytes: float, num_buckets: Sequence[float], seconds: Sequence[float]) -> Overhead:
    """Fit bandwidth, latency and floor to a sweep: `seconds[i]` measured at `num_buckets[i]`.

    Minimizes the squared relative errors, with nonnegative terms. Raises `ValueError` if the two
    sequences differ in length, or if fewer than three bucket counts differ. Also raises
    `ValueError` if a value is not positive and finite, or if the sweep shows no trade-off.
    """
    counts = np.asarray(num_buckets, float)
    measured = np.asarray(seconds, float)
    _check_positive(model_bytes=model_bytes)
    if counts.shape != measured.shape or counts.ndim != 1:
        raise ValueError(
            "expected a time per bucket count, got counts of shape "
            f"{counts.shape} and times of shape {measured.shape}"
        )
    values = np.concatenate([counts, measured])
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"expected positive, finite bucket counts and seconds, got {counts.tolist()} and "
            f"{measured.tolist()}; leave out runs that failed"
        )
    num_different = len(set(counts.tolist()))
    if num_different < 3:
        raise ValueError(
            f"expected at least 3 different bucket counts, got {num_different}: three terms cannot "
            "be fitted to fewer"
        )
    rows = np.stack([np.ones_like(counts), 1 / counts, counts], axis=1) / measured[:, None]
    terms = _nonnegative_least_squares(rows, np.ones_like(measured))
    floor, transfer_seconds, latency = terms
    if transfer_seconds == 0 or latency == 0:
        points = [f"{s:.4g} s at {n:g}" for n, s in zip(counts, measured, strict=True)]
        raise ValueError(
            f"the sweep does not rise at both ends, so it has no optimum: {points}; "
            "measure larger and smaller buckets"
        )
    return Overhead(model_bytes, model_bytes / transfer_seconds, latency, floor)


def _nonnegative_least_squares(rows: np.ndarray, targets: np.ndarray) -> list[float]:
    """Solve nonnegative least squares in three unknowns by trying all subsets of columns."""
    best = [0.0, 0.0, 0.0]
    best_error = math.inf
    for subset in range(1, 8):
        columns = [i for i in range(3) if subset >> i & 1]
        solution, *_ = np.linalg.lstsq(rows[:, columns], targets, rcond=None)
        error = float(np.sum((rows[:, columns] @ solution - targets) ** 2))
        if (solution >= 0).all() and error < best_error:
            best = [0.0, 0.0, 0.0]
            best_error = error
            for column, value in zip(columns, solution, strict=True):
                best[column] = float(value)
    return best


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"expected {name} > 0, got {name}={value}")

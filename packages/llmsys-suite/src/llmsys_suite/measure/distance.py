"""Relative distances between tensors, and between two sets of tensors by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def compute_distance(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return |actual - expected| / (|expected| + floor) in the 2-norm.

    The result is infinity if the shapes differ or only the divisor is zero, and 0 for 0 / 0.
    """
    if actual.shape != expected.shape:
        return math.inf
    expected = expected.double()
    error_norm = (actual.detach().to(expected) - expected).norm()
    divisor = expected.norm() + floor
    if divisor > 0:
        return float(error_norm / divisor)
    return 0.0 if error_norm == 0 else math.inf


def compute_distances(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Return, by name, the distance of two tensors and a text with the name and both norms.

    The distance is infinity for a name that is in only one of the two sets.
    """
    by_name = {}
    for name in dict.fromkeys([*expected, *actual]):
        if name not in actual or name not in expected:
            by_name[name] = math.inf, f"{name}: in only one of the two sets"
            continue
        actual_norm = float(actual[name].detach().double().norm())
        expected_norm = float(expected[name].detach().double().norm())
        text = f"{name}: norm {actual_norm:.9g}, expected {expected_norm:.9g}"
        by_name[name] = compute_distance(actual[name], expected[name], floor), text
    return by_name


def find_largest_distance(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> tuple[float, str]:
    """Return the largest of `compute_distances` and its text. NaN counts as the largest."""
    by_name = compute_distances(actual, expected, floor)
    return max(by_name.values(), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])

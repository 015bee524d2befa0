"""Relative distances between tensors, and the largest distance between two sets of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| in the 2-norm.

    The result is infinity if the shapes differ or only `expected` is zero, and 0 if both are zero.
    """
    if actual.shape != expected.shape:
        return math.inf
    expected = expected.double()
    error_norm = (actual.detach().to(expected) - expected).norm()
    expected_norm = expected.norm()
    if expected_norm > 0:
        return float(error_norm / expected_norm)
    return 0.0 if error_norm == 0 else math.inf


def furthest(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest distance, and a text with the tensor's name and both norms.

    NaN counts as the largest distance. The distance is infinity if the sets of names differ.
    """
    unmatched = expected.keys() ^ actual.keys()
    if unmatched:
        return math.inf, f"{min(unmatched)}: in only one of the two sets"
    distances = {name: distance(actual[name], expected[name]) for name in expected}
    name = max(distances, key=lambda n: math.inf if math.isnan(distances[n]) else distances[n])
    actual_norm = float(actual[name].detach().double().norm())
    expected_norm = float(expected[name].detach().double().norm())
    return distances[name], f"{name}: norm {actual_norm:.9g}, expected {expected_norm:.9g}"

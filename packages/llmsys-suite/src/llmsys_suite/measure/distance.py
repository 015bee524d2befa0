"""Relative distances between tensors, and between two sets of tensors by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def distance(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return |actual - expected| / (|expected| + floor) in the 2-norm.

    The result is infinity if the shapes differ or only the divisor is zero, and 0 for 0 / 0.
    """
    if actual.shape != expected.shape:
        return math.inf
    expected = expected.double()
    difference = (actual.detach().to(expected) - expected).norm()
    divisor = expected.norm() + floor
    if divisor > 0:
        return float(difference / divisor)
    return 0.0 if difference == 0 else math.inf


def distances(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Return, by name, the distance of two tensors and a text with the name and both norms.

    The distance is infinity for a name that only one of the two mappings has.
    """
    by_name = {}
    for name in dict.fromkeys([*expected, *actual]):
        if name not in actual or name not in expected:
            by_name[name] = math.inf, f"{name}: on one side only"
            continue
        norms = [float(side[name].detach().double().norm()) for side in (actual, expected)]
        text = f"{name}: norm {norms[0]:.9g} beside {norms[1]:.9g}"
        by_name[name] = distance(actual[name], expected[name], floor), text
    return by_name


def furthest(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> tuple[float, str]:
    """Return the largest of the `distances` and its text. NaN counts as the largest."""
    by_name = distances(actual, expected, floor)
    return max(by_name.values(), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])

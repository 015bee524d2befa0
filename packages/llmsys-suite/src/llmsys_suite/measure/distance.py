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
    away = (actual.detach().to(expected) - expected).norm()
    whole = expected.norm()
    if whole > 0:
        return float(away / whole)
    return 0.0 if away == 0 else math.inf


def furthest(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest distance and a text with its name and both norms.

    NaN counts as the largest. The distance is infinity if the names differ.
    """
    if missing := expected.keys() ^ actual.keys():
        return math.inf, f"{min(missing)}: on one side only"
    distances = {name: distance(actual[name], expected[name]) for name in expected}
    name = max(distances, key=lambda n: math.inf if math.isnan(distances[n]) else distances[n])
    norms = (float(side[name].detach().double().norm()) for side in (actual, expected))
    return distances[name], "{}: norm {:.9g} beside {:.9g}".format(name, *norms)

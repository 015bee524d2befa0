"""One check: two numbers from two named sources, and how far apart they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """`actual` (from `source`) must lie within [low, high], which `against` says.

    `where` names the variant, rank or parameter that is furthest off.
    """

    name: str
    source: str
    against: str
    expected: float
    actual: float
    low: float
    high: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether the two sources agree; NaN never does."""
        # A plain bool: of numpy's numbers it would be numpy's, which no JSON holds.
        return math.isfinite(self.actual) and bool(self.low <= self.actual <= self.high)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for checks.json."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return (
            f"{self.name}: {self.source} says {self.actual:.9g}{place}, "
            f"{self.against} {self.expected:.9g}"
        )


def equal(
    name: str,
    source: str,
    against: str,
    expected: float,
    actual: float,
    tolerance: float = 0.0,
    where: str = "",
) -> Check:
    """`actual` is `expected`, to a relative tolerance."""
    room = tolerance * abs(expected)
    return Check(name, source, against, expected, actual, expected - room, expected + room, where)


def within(
    name: str, source: str, against: str, expected: float, actual: float, band: float,
    where: str = "",
) -> Check:  # fmt: skip
    """`actual` is `expected`, to a factor of `band` either way."""
    low, high = expected / band, expected * band
    return Check(name, source, against, expected, actual, low, high, where)


def near(
    name: str, source: str, against: str, distance: float, tolerance: float, where: str = ""
) -> Check:
    """Return a check that a relative distance between two arrays is at most `tolerance`."""
    return Check(name, source, against, 0.0, distance, 0.0, tolerance, where)


def none(name: str, source: str, against: str, wrong: Iterable[str]) -> Check:
    """Nothing is `wrong`; the first few that are get named."""
    found = list(wrong)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return Check(name, source, against, 0, len(found), 0, 0, ", ".join(found[:3]) + more)


def furthest(
    name: str, source: str, against: str, found: Iterable[tuple[float, str]], tolerance: float
) -> Check:
    """`near` for the largest of many distances; that there is none is a failure."""

    def order(pair: tuple[float, str]) -> float:
        return math.inf if math.isnan(pair[0]) else pair[0]

    distance, where = max(found, key=order, default=(math.nan, "nothing recorded"))
    return near(name, source, against, distance, tolerance, where)


def closest(
    name: str,
    source: str,
    against: str,
    pairs: Iterable[tuple[float, float, str]],
    tolerance: float,
) -> Check:
    """`equal` for the worst of many (expected, actual, where)."""

    def order(pair: tuple[float, float, str]) -> float:
        expected, actual, _ = pair
        if expected == actual:
            return 0.0
        away = abs(actual - expected) / abs(expected) if expected else math.inf
        return math.inf if math.isnan(away) else away

    expected, actual, where = max(pairs, key=order, default=(1.0, math.nan, "nothing recorded"))
    return equal(name, source, against, expected, actual, tolerance, where)

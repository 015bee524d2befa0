"""One check: two numbers from two named sources and the largest allowed difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A check that `actual` lies within [low, high].

    `source` names the origin of `actual`, and `against` the origin of `expected` and the bounds.
    `where` names the variant, rank or parameter with the largest difference.
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
        """True if the two sources agree; NaN and infinity never pass."""
        # A comparison of numpy numbers returns a numpy bool, which cannot be written as JSON.
        return math.isfinite(self.actual) and bool(self.low <= self.actual <= self.high)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `passed` as values that JSON can represent."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        return (
            f"{self.name}: {self.source} says {self.actual:.9g}{location}, "
            f"{self.against} {self.expected:.9g}"
        )


@dataclass(frozen=True)
class Sources:
    """The names of two independent sources, with one method per kind of check between them."""

    source: str
    against: str

    def between(
        self, name: str, expected: float, actual: float, low: float, high: float, where: str = ""
    ) -> Check:
        """Return a check that `actual` lies within [low, high]."""
        return Check(name, self.source, self.against, expected, actual, low, high, where)

    def equal(
        self,
        name: str,
        expected: float,
        actual: float,
        tolerance: float = 0.0,
        where: str = "",
        *,
        scale: float = 0.0,
    ) -> Check:
        """Return a check that `actual` equals `expected` within a relative tolerance.

        The tolerance is relative to |expected|, or to `scale` if that is larger.
        """
        margin = tolerance * max(abs(expected), scale)
        return self.between(name, expected, actual, expected - margin, expected + margin, where)

    def within(self, name: str, expected: float, actual: float, factor: float) -> Check:
        """Return a check that `actual / expected` lies between `1 / factor` and `factor`."""
        return self.between(name, expected, actual, expected / factor, expected * factor)

    def near(
        self, name: str, distance: float, tolerance: float, where: str = "", least: float = 0.0
    ) -> Check:
        """Return a check that a relative distance lies between `least` and `tolerance`."""
        return self.between(name, 0.0, distance, least, tolerance, where)

    def none(self, name: str, wrong: Iterable[str]) -> Check:
        """Return a check that `wrong` is empty; its message names the first three entries."""
        names = list(wrong)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return self.between(name, 0, len(names), 0, 0, ", ".join(names[:3]) + more)

    def all_near(
        self,
        name: str,
        distances: Iterable[tuple[float, str]],
        tolerance: float,
        least: float = 0.0,
    ) -> Check:
        """Return `near` for the pair (distance, where) with the largest distance.

        NaN counts as the largest. The check fails if there are no pairs.
        """

        def order(pair: tuple[float, str]) -> float:
            return math.inf if math.isnan(pair[0]) else pair[0]

        distance, where = max(distances, key=order, default=(math.nan, "nothing recorded"))
        return self.near(name, distance, tolerance, where, least)

    def all_equal(
        self,
        name: str,
        triples: Iterable[tuple[float, float, str]],
        tolerance: float = 0.0,
        *,
        scale: float = 0.0,
    ) -> Check:
        """Return `equal` for the triple (expected, actual, where) with the largest difference.

        The difference is relative, as in `equal`. The check fails if there are no triples.
        """

        def order(triple: tuple[float, float, str]) -> float:
            expected, actual, _ = triple
            if expected == actual:
                return 0.0
            divisor = max(abs(expected), scale)
            difference = abs(actual - expected) / divisor if divisor else math.inf
            return math.inf if math.isnan(difference) else difference

        nothing = (1.0, math.nan, "nothing recorded")
        expected, actual, where = max(triples, key=order, default=nothing)
        return self.equal(name, expected, actual, tolerance, where, scale=scale)


def clock_ratio(ratios: Iterable[float]) -> float:
    """Return the ratio of two clocks' times at the lower quartile of its deviations from 1.

    In some steps another program takes the core between the readings of the two clocks.
    """
    ordered = sorted(ratios, key=lambda ratio: abs(ratio - 1))
    return ordered[len(ordered) // 4]


def same_rows(name: str, expected: Iterable[Any], reported: Iterable[Any]) -> Check:
    """Return a check that a table has each expected row once, and no other row.

    Without this check, a run could hide a bad row by leaving it out.
    """
    missing, more = Counter([*expected]), Counter([*reported])
    wrong = [f"missing: {row}" for row in (missing - more).elements()]
    wrong += [f"not expected: {row}" for row in (more - missing).elements()]
    return Sources("rows of the table", "the configuration").none(name, wrong)

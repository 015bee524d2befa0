"""A check compares a number from one source with bounds from an independent source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

#: Pairs of a distance and its location, for example a rank and a parameter.
Distances = Iterable[tuple[float, str]]
#: The smallest loss, in nats, to which differences of losses are relative. The rounding errors of
#: the logits do not decrease with the loss.
LEAST_LOSS = 1.0


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
        """True if `actual` is finite and lies within the bounds."""
        # A comparison of numpy numbers returns a numpy bool, which cannot be written as JSON.
        return math.isfinite(self.actual) and bool(self.low <= self.actual <= self.high)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `passed` as values that JSON can represent."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        return (
            f"{self.name}: expected {self.expected:.9g} from {self.against}, got {self.actual:.9g} "
            f"from {self.source}{location}; allowed: {self.low:.9g} to {self.high:.9g}"
        )


@dataclass(frozen=True)
class Sources:
    """The names of two independent sources, with a method for each kind of comparison."""

    source: str
    against: str

    def check_between(
        self, name: str, expected: float, actual: float, low: float, high: float, where: str = ""
    ) -> Check:
        """Return a check that `actual` lies within [low, high]."""
        return Check(name, self.source, self.against, expected, actual, low, high, where)

    def check_equal(
        self, name: str, expected: float, actual: float, tolerance: float = 0.0, where: str = ""
    ) -> Check:
        """Return a check that `actual` equals `expected` within a relative tolerance."""
        margin = tolerance * abs(expected)
        return self.check_between(
            name, expected, actual, expected - margin, expected + margin, where
        )

    def check_loss(
        self, name: str, expected: float, actual: float, tolerance: float, where: str = ""
    ) -> Check:
        """Return a check that `compute_loss_difference` is at most `tolerance`."""
        margin = tolerance * max(expected, LEAST_LOSS)
        return self.check_between(
            name, expected, actual, expected - margin, expected + margin, where
        )

    def check_factor(self, name: str, expected: float, actual: float, factor: float) -> Check:
        """Return a check that `actual / expected` lies between `1 / factor` and `factor`."""
        return self.check_between(name, expected, actual, expected / factor, expected * factor)

    def check_none(self, name: str, wrong: Iterable[str]) -> Check:
        """Return a check that `wrong` is empty. Its `where` lists the first three entries."""
        names = list(wrong)
        listed = ", ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        return self.check_between(name, 0, len(names), 0, 0, listed)

    def check_distances(
        self, name: str, distances: Distances, tolerance: float, least: float = 0.0
    ) -> Check:
        """Return a check that the largest distance lies between `least` and `tolerance`.

        NaN counts as the largest. The check fails if there are no distances.
        """
        nothing = (math.nan, "nothing recorded")
        distance, where = max(distances, key=lambda pair: _nan_to_inf(pair[0]), default=nothing)
        return self.check_between(name, 0.0, distance, least, tolerance, where)

    def check_all_equal(
        self, name: str, triples: Iterable[tuple[float, float, str]], tolerance: float = 0.0
    ) -> Check:
        """Return `check_equal` of the (expected, actual, where) with the largest difference.

        The difference is relative to `expected`. The check fails if there are no triples.
        """

        def sort_key(triple: tuple[float, float, str]) -> float:
            expected, actual, _ = triple
            if expected == actual:
                return 0.0
            return _nan_to_inf(abs(actual - expected) / abs(expected)) if expected else math.inf

        nothing = (1.0, math.nan, "nothing recorded")
        expected, actual, where = max(triples, key=sort_key, default=nothing)
        return self.check_equal(name, expected, actual, tolerance, where)


def _nan_to_inf(distance: float) -> float:
    """Return the distance, or inf if it is NaN."""
    return math.inf if math.isnan(distance) else distance


def compute_loss_difference(actual: float, expected: float) -> float:
    """Return the difference of two losses, relative to `expected` or, if larger, `LEAST_LOSS`."""
    return abs(actual - expected) / max(expected, LEAST_LOSS)


def select_clock_ratio(ratios: Iterable[float]) -> float:
    """Return the ratio of two clocks' times whose difference from 1 is the lower quartile.

    The difference is larger in steps in which another program uses the core between the readings of
    the two clocks.
    """
    ordered = sorted(ratios, key=lambda ratio: abs(ratio - 1))
    return ordered[len(ordered) // 4]


def compare_rows(name: str, expected: Iterable[Any], reported: Iterable[Any]) -> Check:
    """Return a check that a table has exactly the expected rows, in any order.

    Without this check, a run could hide a bad row by leaving it out.
    """
    # A Counter of a dict would take the values as counts.
    expected_counts = Counter(list(expected))
    reported_counts = Counter(list(reported))
    wrong = [f"missing: {row}" for row in (expected_counts - reported_counts).elements()]
    wrong += [f"not expected: {row}" for row in (reported_counts - expected_counts).elements()]
    return Sources("rows of the table", "the configuration").check_none(name, wrong)

"""A number that knows how it came about.

Every result of this package is a `Breakdown`: a leaf is a product of named factors, and a node is
the sum of its parts. A total is never stored, so a derivation cannot disagree with the figure it
explains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

Number = int | float | Fraction
Sizes = dict[str, Number]


@dataclass(frozen=True)
class Breakdown:
    """A named total: the sum of `parts`, or for a leaf the product of `factors`."""

    name: str
    unit: str
    parts: tuple[Breakdown, ...] = ()
    factors: tuple[tuple[str, Number], ...] = ()
    note: str = ""

    @cached_property
    def total(self) -> int | float:
        """The figure itself: an `int` whenever it is whole and no factor was a float."""
        if self.factors:
            return plain(math.prod(value for _, value in self.factors))
        return sum(part.total for part in self.parts)

    def __getitem__(self, name: str) -> Breakdown:
        """The part of that name; a path such as `"attention/query"` goes deeper."""
        first, _, rest = name.partition("/")
        for part in self.parts:
            if part.name == first:
                return part[rest] if rest else part
        known = ", ".join(part.name for part in self.parts) or "none: it is a leaf"
        raise KeyError(f"{self.name!r} has no part {first!r}; its parts are {known}")

    def __contains__(self, name: object) -> bool:
        return any(part.name == name for part in self.parts)

    def __iter__(self) -> Iterator[Breakdown]:
        return iter(self.parts)

    def __int__(self) -> int:
        return int(self.total)

    def __float__(self) -> float:
        return float(self.total)

    def leaves(self) -> Iterator[Breakdown]:
        """Every product that the total is made of."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def lines(self, depth: int = 0) -> Iterator[tuple[int, str, int | float, str]]:
        """Each line of the derivation: depth, name, value, and the product that gives the value."""
        product = " × ".join(f"{readable(value)} {name}" for name, value in self.factors)
        yield depth, self.name, self.total, "; ".join(filter(None, (product, self.note)))
        for part in self.parts:
            yield from part.lines(depth + 1)

    def explain(self) -> str:
        """The derivation, line by line, ready to print."""
        rows = [("  " * d + name, readable(value), why) for d, name, value, why in self.lines()]
        left = max(len(name) for name, _, _ in rows)
        right = max(len(value) for _, value, _ in rows)
        text = [f"{name:<{left}}  {value:>{right}}  {why}".rstrip() for name, value, why in rows]
        text[0] = f"{text[0]}  {self.unit}"
        return "\n".join(text)

    __str__ = explain

    def to_dict(self) -> dict[str, object]:
        """Plain dictionaries and numbers, ready for `json.dumps`."""
        result: dict[str, object] = {"name": self.name, "value": self.total, "unit": self.unit}
        if self.factors:
            result["factors"] = {name: float_or_int(value) for name, value in self.factors}
        if self.note:
            result["note"] = self.note
        if self.parts:
            result["parts"] = [part.to_dict() for part in self.parts]
        return result


def product(name: str, unit: str, note: str = "", /, **factors: Number) -> Breakdown:
    """A leaf: the product of the factors, each under the name the derivation prints."""
    return Breakdown(name, unit, factors=tuple(factors.items()), note=note)


def total(name: str, unit: str, *parts: Breakdown | None, note: str = "") -> Breakdown:
    """A node: the sum of those parts that are there and not zero."""
    kept = tuple(part for part in parts if part is not None and part.total != 0)
    return Breakdown(name, unit, parts=kept, note=note)


def plain(value: Number) -> int | float:
    """An exact fraction as an `int` where it is whole, else as a float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def float_or_int(value: Number) -> int | float:
    """A fraction as a number that JSON knows."""
    return float(value) if isinstance(value, Fraction) else value


def readable(value: Number) -> str:
    """12,345 for whole numbers, 7/8 for fractions, four digits for the rest."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:.6g}"
    return f"{int(value):,}"


def binary_size(count: float) -> str:
    """Bytes for a person: `13.3 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"

"""Results that store their derivation.

Most functions return counts, bytes or seconds as a `Breakdown`. A leaf is a product of named
factors, and a node is the sum of its parts. Totals are computed from the leaves, so a derivation
always matches its total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

Number = int | float | Fraction


@dataclass(frozen=True)
class Breakdown:
    """A named total: the sum of `parts`, or the product of `factors` if it is a leaf."""

    name: str
    unit: str
    parts: tuple[Breakdown, ...] = ()
    factors: tuple[tuple[str, Number], ...] = ()
    note: str = ""

    @cached_property
    def total(self) -> int | float:
        """The total; an `int` if each leaf is an integer without float factors."""
        if self.factors:
            return simplify(math.prod(value for _, value in self.factors))
        return sum(part.total for part in self.parts)

    def __getitem__(self, name: str) -> Breakdown:
        """Return the part with this name or path, such as `"attention/query"`.

        Raises `KeyError` with the known names if there is no such part.
        """
        if not isinstance(name, str):
            raise TypeError(f"expected the name of a part of {self.name!r}, got {name!r}")
        first, _, rest = name.partition("/")
        for part in self.parts:
            if part.name == first:
                return part[rest] if rest else part
        known = ", ".join(part.name for part in self.parts) or "none: it is a leaf"
        raise KeyError(f"{self.name!r} has no part {first!r}; its parts are {known}")

    def __contains__(self, name: object) -> bool:
        """Return True if `self[name]` finds a part."""
        first, _, rest = str(name).partition("/")
        return any(part.name == first and (not rest or rest in part) for part in self.parts)

    def __iter__(self) -> Iterator[Breakdown]:
        return iter(self.parts)

    def __float__(self) -> float:
        return float(self.total)

    def leaves(self) -> Iterator[Breakdown]:
        """Yield every leaf of the tree."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def lines(self, depth: int = 0) -> Iterator[tuple[int, str, int | float, str]]:
        """Yield (depth, name, value, derivation) of this node and of all nodes below it."""
        product = " × ".join(f"{format_number(value)} {name}" for name, value in self.factors)
        yield depth, self.name, self.total, "; ".join(filter(None, (product, self.note)))
        for part in self.parts:
            yield from part.lines(depth + 1)

    def explain(self) -> str:
        """Return the derivation as aligned text, one line per part."""
        rows = [
            ("  " * d + name, format_number(value), why) for d, name, value, why in self.lines()
        ]
        left = max(len(name) for name, _, _ in rows)
        right = max(len(value) for _, value, _ in rows)
        text = [f"{name:<{left}}  {value:>{right}}  {why}".rstrip() for name, value, why in rows]
        text[0] = f"{text[0]}  {self.unit}"
        return "\n".join(text)

    __str__ = explain

    def format_shares(self, show: Callable[[float], str]) -> list[str]:
        """Return a line per part, largest first: name, value (formatted by `show`), percentage."""
        whole = float(self.total) or 1.0
        parts = sorted(self.parts, key=lambda part: -float(part.total))
        values = [show(float(part.total)) for part in parts]
        name_width = max([30, *(len(part.name) for part in parts)])
        value_width = max([14, *map(len, values)])
        return [
            f"  {part.name:<{name_width}}{value:>{value_width}} {float(part.total) / whole:>6.1%}"
            for part, value in zip(parts, values, strict=True)
        ]

    def to_dict(self) -> dict[str, object]:
        """Return plain dictionaries and numbers for `json.dumps`."""
        result: dict[str, object] = {"name": self.name, "value": self.total, "unit": self.unit}
        if self.factors:
            result["factors"] = {name: simplify(value) for name, value in self.factors}
        if self.note:
            result["note"] = self.note
        if self.parts:
            result["parts"] = [part.to_dict() for part in self.parts]
        return result


def multiply(name: str, unit: str, note: str = "", /, **factors: Number) -> Breakdown:
    """Return a leaf: the product of named factors, which the derivation prints."""
    return Breakdown(name, unit, factors=tuple(factors.items()), note=note)


def sum_parts(name: str, unit: str, *parts: Breakdown | None, note: str = "") -> Breakdown:
    """Return a node: the sum of all parts that are neither None nor zero."""
    present = tuple(part for part in parts if part is not None and part.total != 0)
    return Breakdown(name, unit, parts=present, note=note)


def simplify(value: Number) -> int | float:
    """Return a `Fraction` as an int if it is whole and as a float otherwise; keep other numbers."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def format_number(value: Number) -> str:
    """Format integers as 12,345, fractions as 7/8 and floats as 1.23457, with six digits.

    A fraction with denominator 1, or a whole float below 1e15, is formatted as an integer.
    """
    if isinstance(value, Fraction) and value.denominator != 1:
        return str(value)
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:.6g}"
    return f"{int(value):,}"


def format_count(number: float, noun: str) -> str:
    """Return a number and its noun, in the plural unless the rounded number is 1."""
    text = f"{number:,.0f}"
    plural = "es" if noun.endswith("ch") else "s"
    return f"{text} {noun}{'' if text == '1' else plural}"


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a binary unit, such as `13.3 GiB`."""
    size = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units = units[1:]
    return f"{size:.4g} {units[0]}"

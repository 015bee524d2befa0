"""Division of work among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


def divide_by_cost(costs: Mapping[Item, float], parts: int) -> list[list[Item]]:
    """Return the items of each part, so that all parts cost about as much.

    Items are assigned from the most to the least expensive, each to the part with the smallest cost
    so far.
    """
    totals = [0.0] * parts
    divided: list[list[Item]] = [[] for _ in range(parts)]
    for item in sorted(costs, key=costs.__getitem__, reverse=True):
        part = totals.index(min(totals))
        totals[part] += costs[item]
        divided[part].append(item)
    return divided

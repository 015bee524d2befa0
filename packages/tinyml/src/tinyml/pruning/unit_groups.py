"""The groups of a graph while it is visited, and the operations by which rules change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import fx

from tinyml.exported import Exported, described
from tinyml.pruning.groups import Along, Group, Product, Slice


class UnitGroups:
    """Groups of units that are created, merged and blocked (Note [Dependency groups])."""

    def __init__(self, graph: Exported) -> None:
        self.graph = graph
        self._merged: dict[Group, Group] = {}
        #: An `Along`, a list of them for a split, or None for each node that was visited.
        self.values: dict[fx.Node, Any] = {}
        #: The groups that rules have created, including those that were merged.
        self.created: list[Group] = []
        #: The product of each weight that is used once, by the weight's name.
        self.products: dict[str, Product] = {}
        self._users: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.name in self.graph.constants:
                key = self.graph.constants[node.name].data_ptr()
                self._users[key] = self._users.get(key, 0) + len(node.users)

    def groups(self) -> list[Group]:
        """Return all groups, including those whose units cannot be removed."""
        return list(dict.fromkeys(self.find(group) for group in self.created))

    def find(self, group: Group) -> Group:
        """Return the group into which this group was merged."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def stop(self, node: fx.Node) -> None:
        """Mark all units that reach this node as not removable."""
        for source in node.all_input_nodes:
            value = self.values[source]
            for along in value if isinstance(value, list) else [value]:
                for group, _ in along.parts if along is not None else ():
                    group = self.find(group)
                    group.blocked_by = group.blocked_by or (
                        "the model returns them" if node.op == "output" else described(node)
                    )

    def name_of(self, node: Any) -> str | None:
        """Return the name of a parameter or buffer that is used exactly once, or None."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.names:
            return None
        is_used_once = self._users[self.graph.constants[node.name].data_ptr()] == 1
        return self.graph.names[node.name] if is_used_once else None

    def add_slices(
        self,
        along: Along,
        tensors: list[tuple[str, int]],
        role: Literal["passer", "reader"],
        times: int = 1,
    ) -> None:
        """Add slices of the tensors, given as (name, axis), to the groups of `along`.

        A tensor has `times` elements per element of the value along the axis.
        """
        start = 0
        for group, extent in along.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * times
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * times

    def coarsened(self, along: Along, count: int) -> Group | None:
        """Merge neighboring units so that each of `count` equal parts contains whole units.

        Return the group, or None if the value has several groups or only one part.
        """
        if len(along.parts) != 1 or count == 1:
            return None
        group = self.find(along.parts[0][0])
        group.coarsen(math.gcd(group.size, count))
        return group

    def merge(self, node: fx.Node, alongs: Sequence[Along], grouped: bool = False) -> Any:
        """Merge the groups of several values that must have the same units, part by part.

        If the parts of two values have different numbers of elements, `node` blocks the units. With
        grouped=True they are merged, because several query heads share a key-value head.
        """
        first = alongs[0]
        for other in alongs[1:]:
            has_same_parts = len(first.parts) == len(other.parts) and all(
                a == b or grouped for (_, a), (_, b) in zip(first.parts, other.parts, strict=True)
            )
            if not has_same_parts:
                return self.stop(node)
            for (target, _), (merged, _) in zip(first.parts, other.parts, strict=True):
                self._merge_groups(self.find(target), self.find(merged))
        return first

    def _merge_groups(self, first: Group, second: Group) -> None:
        if first is not second:
            size = math.gcd(first.size, second.size)
            first.coarsen(size)
            second.coarsen(size)
            first.slices += second.slices
            first.blocked_by = first.blocked_by or second.blocked_by
            self._merged[second] = first

"""Units that several layers share, found by following a model's graph (Note [Dependency groups]).

A `Walk` visits every node once. The rule of its operator returns the dimension of the result that
holds units: `product_rules` create units and read them, `passing_rules` pass them on. Units that
reach an operator without a rule, or an operator that mixes them, cannot be removed;
`Group.blocked_by` names that operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

from torch import fx, nn

from tinyml.exported import Exported, described, exported, operator_name, shape_of
from tinyml.pruning.groups import Along, Group, Product, SizeUse, Slice
from tinyml.pruning.passing_rules import PASSING_RULES
from tinyml.pruning.product_rules import PRODUCT_OPERATORS, PRODUCT_RULES
from tinyml.pruning.size_attributes import SizeReads, Source, size_sources

#: The rule of each operator, called with the walk, the node and the node's arguments.
RULES = PRODUCT_RULES | PASSING_RULES
_SIZED = {"view", "reshape", "_unsafe_view", "unflatten", "expand", "split", "split_with_sizes"}


class Walk:
    """A walk through a graph that merges the groups that have to lose the same units."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.reads = SizeReads()
        self.graph: Exported = exported(model, inputs, self.reads)
        self._merged: dict[Group, Group] = {}
        #: An `Along`, a list of them for a split, or None for each node that was visited.
        self.values: dict[fx.Node, Any] = {}
        #: The groups that rules have created, including those that were merged.
        self.created: list[Group] = []
        #: The product of each weight that is used once, by the weight's name.
        self.products: dict[str, Product] = {}
        #: The uses of each attribute that the code reads as the size of a tensor.
        self.size_uses: dict[Source, list[SizeUse]] = {}
        self._users: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.name in self.graph.constants:
                key = self.graph.constants[node.name].data_ptr()
                self._users[key] = self._users.get(key, 0) + len(node.users)
        for node in self.graph.nodes:
            self.values[node] = self._visit(node)
            self._note_sizes(node, self.values[node])
        for source, use in self.reads.other_uses.items():
            self.size_uses.setdefault(source, []).append(SizeUse(use, ()))

    def _note_sizes(self, node: fx.Node, result: Any) -> None:
        """Record which of the node's sizes count units, for sizes that come from attributes."""
        # One call may become several nodes, as a reshape becomes a copy and a view.
        sized = node.op == "call_function" and operator_name(node) in _SIZED
        for index, sources in size_sources(node).items() if sized else ():
            if isinstance(result, list):
                # A split along another dimension does not count units.
                source, _, *dim = node.args
                pieces = result if index == -1 else result[index : index + 1]
                across = (dim or [0])[0] in (pieces[0].dim, pieces[0].dim - len(shape_of(source)))  # type: ignore[arg-type]
                for piece in pieces:
                    self._note_size(node, sources, piece.parts if across else ())
            else:
                counts = isinstance(result, Along) and result.dim == index
                self._note_size(node, sources, result.parts if counts else ())

    def _note_size(
        self, node: fx.Node, sources: Sequence[Source], parts: tuple[tuple[Group, int], ...]
    ) -> None:
        for source in sources:
            # The result of arithmetic does not determine what the attribute itself counts.
            if not source.derived:
                self.size_uses.setdefault(source, []).append(SizeUse(described(node), parts))
            elif not parts:
                plain = Source(source.module, source.name)
                self.size_uses.setdefault(plain, []).append(SizeUse(described(node), ()))

    def groups(self) -> list[Group]:
        """Return all groups, including those whose units cannot be removed."""
        return list(dict.fromkeys(self.find(group) for group in self.created))

    def find(self, group: Group) -> Group:
        """Return the group into which this group was merged."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "output":
            return self.stop(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            value = self.values[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            return value[operator.index(index)] if isinstance(value, list) else value
        name = operator_name(node)
        rule = RULES.get(name)
        known = any(isinstance(self.values[n], Along) for n in node.all_input_nodes)
        if rule is None or not (known or name in PRODUCT_OPERATORS):
            return self.stop(node)
        arguments: tuple[Any, ...] = node.args
        return rule(self, node, *arguments, **node.kwargs)

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
        """Add the elements of each tensor that pass on or read these units to their groups."""
        start = 0
        for group, extent in along.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * times
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * times

    def coarsened(self, along: Along, count: int) -> Group | None:
        """Merge units so that `count` equal parts of the elements are whole units, if possible."""
        if len(along.parts) != 1 or count == 1:
            return None
        group = self.find(along.parts[0][0])
        group.coarsen(math.gcd(group.size, count))
        return group

    def merge(self, node: fx.Node, alongs: Sequence[Along], grouped: bool = False) -> Any:
        """Merge the groups of several values that have to hold the same units, part by part."""
        first = alongs[0]
        for other in alongs[1:]:
            alike = len(first.parts) == len(other.parts) and all(
                a == b or grouped for (_, a), (_, b) in zip(first.parts, other.parts, strict=True)
            )
            if not alike:
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

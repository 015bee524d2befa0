"""Units that several layers share, found by following a model's graph (Note [Dependency groups]).

A unit is a channel, a feature or a head that can be pruned. A `Walk` visits every node once. The
rule of the node's operator (see `rules`) returns the dimension of the result that contains units.
Units cannot be removed if they reach an operator without a rule, an operator that mixes them, or
the output of the model. `Group.blocked_by` contains the reason.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import fx, nn

from tinyml.exported import described, exported, operator_name, shape_of
from tinyml.pruning.groups import Along, Group, Product, SizeUse, Slice
from tinyml.pruning.size_attributes import SizeReads, Source, size_sources

_OPERATORS_WITH_SIZES = {
    "view", "reshape", "_unsafe_view", "unflatten", "expand", "split", "split_with_sizes",
}  # fmt: skip

#: Operators that may create units even if no input contains units.
PRODUCT_OPERATORS = {
    "linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip


class Walk:
    """A walk through a graph that merges groups whose units must be pruned together.

    `rules` are functions of the walk, a node and the node's arguments, by operator. They create,
    merge and block groups by the methods of the walk.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], rules: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._rules = rules
        self.reads = SizeReads()
        self.graph = exported(model, inputs, self.reads)
        self._merged: dict[Group, Group] = {}
        #: For each visited node: an `Along`, a list of them for a split, or None if no units are
        #: followed past the node.
        self.values: dict[fx.Node, Any] = {}
        #: The groups that rules have created, including those that were merged.
        self.created: list[Group] = []
        #: The product of each weight that is used once, by the weight's name.
        self.products: dict[str, Product] = {}
        self._uses_by_address: Counter[int] = Counter()
        for node in self.graph.nodes:
            if node.name in self.graph.constants:
                self._uses_by_address[self.graph.constants[node.name].data_ptr()] += len(node.users)
        #: The uses of each attribute that the code reads as the size of a tensor.
        self.size_uses: dict[Source, list[SizeUse]] = {}
        for node in self.graph.nodes:
            self.values[node] = self._visit(node)
            self._note_sizes(node, self.values[node])
        for source, use in self.reads.other_uses.items():
            self.size_uses.setdefault(source, []).append(SizeUse(use, ()))

    def groups(self) -> list[Group]:
        """Return all groups, including those whose units cannot be removed."""
        return list(dict.fromkeys(self.find(group) for group in self.created))

    def find(self, group: Group) -> Group:
        """Return the group into which this group was merged."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def block(self, node: fx.Node) -> None:
        """Mark all units that reach this node as not removable."""
        for source in node.all_input_nodes:
            value = self.values[source]
            for along in value if isinstance(value, list) else [value]:
                for group, _ in along.parts if along is not None else ():
                    group = self.find(group)
                    group.blocked_by = group.blocked_by or (
                        "the model returns them" if node.op == "output" else described(node)
                    )

    def name_if_used_once(self, node: Any) -> str | None:
        """Return the name of a parameter or buffer that is used exactly once, or None."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.names:
            return None
        is_used_once = self._uses_by_address[self.graph.constants[node.name].data_ptr()] == 1
        return self.graph.names[node.name] if is_used_once else None

    def add_slices(
        self,
        along: Along,
        tensors: list[tuple[str, int]],
        role: Literal["passer", "reader"],
        times: int = 1,
    ) -> None:
        """Add slices of the tensors, given as (name, axis), to the groups of `along`.

        For each element of the value along its dimension, a tensor has `times` elements along its
        axis.
        """
        start = 0
        for group, extent in along.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * times
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * times

    def coarsen_to_blocks(self, along: Along, count: int) -> Group | None:
        """Merge neighboring units in place so that each unit consists of whole blocks.

        The value is cut into `count` equal blocks. Return the group, or None if the value has
        several groups or `count` is 1.
        """
        if len(along.parts) != 1 or count == 1:
            return None
        group = self.find(along.parts[0][0])
        group.coarsen(math.gcd(group.size, count))
        return group

    def merge(
        self, node: fx.Node, alongs: Sequence[Along], allow_different_sizes: bool = False
    ) -> Any:
        """Merge the groups of several values that must have the same units, part by part.

        If two values differ in the number or the sizes of their parts, `node` blocks the units.
        With `allow_different_sizes`, parts of different sizes are merged too, because several query
        heads share a key-value head. The number of parts must still agree.
        """
        first = alongs[0]
        for other in alongs[1:]:
            has_same_parts = len(first.parts) == len(other.parts) and all(
                a == b or allow_different_sizes
                for (_, a), (_, b) in zip(first.parts, other.parts, strict=True)
            )
            if not has_same_parts:
                return self.block(node)
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

    def _note_sizes(self, node: fx.Node, result: Any) -> None:
        """Record the units that each size counts, if the code reads the size from an attribute."""
        # A reshape may be exported as a copy and a view with its sizes; only the view uses them.
        sized = node.op == "call_function" and operator_name(node) in _OPERATORS_WITH_SIZES
        for index, sources in size_sources(node).items() if sized else ():
            if isinstance(result, list):
                source, _, *dim = node.args
                rank, units = len(shape_of(source)), result[0].dim  # type: ignore[arg-type]
                pieces = result if index == -1 else result[index : index + 1]
                if (dim or [0])[0] not in (units, units - rank):
                    # A split along another dimension counts no units, and may have more pieces.
                    pieces = [Along(units, ())]
                for piece in pieces:
                    self._note_size(node, sources, piece.parts)
            else:
                counts_units = isinstance(result, Along) and result.dim == index
                self._note_size(node, sources, result.parts if counts_units else ())

    def _note_size(
        self, node: fx.Node, sources: Sequence[Source], parts: tuple[tuple[Group, int], ...]
    ) -> None:
        for source in sources:
            # The units of a computed size do not show which units the attribute itself counts.
            if not source.derived or not parts:
                attribute = Source(source.module, source.name)
                self.size_uses.setdefault(attribute, []).append(SizeUse(described(node), parts))

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "output":
            return self.block(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            value = self.values[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            return value[operator.index(index)] if isinstance(value, list) else value
        name = operator_name(node)
        rule = self._rules.get(name)
        has_units = any(isinstance(self.values[n], Along) for n in node.all_input_nodes)
        if rule is None or not (has_units or name in PRODUCT_OPERATORS):
            return self.block(node)
        arguments: tuple[Any, ...] = node.args
        return rule(self, node, *arguments, **node.kwargs)

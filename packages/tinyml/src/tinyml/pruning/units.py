"""Units that several layers share, found by following a model's graph (Note [Dependency groups]).

A unit is a channel, a feature or a head that can be pruned. A `Walk` visits every node once. The
rule of its operator (see `rules`) returns the dimension of the result that contains units. Units
that reach an operator without a rule, or an operator that mixes them, cannot be removed;
`Group.blocked_by` names that operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from tinyml.exported import described, exported, operator_name, shape_of
from tinyml.pruning.groups import Along, Group, SizeUse
from tinyml.pruning.rules import PRODUCT_OPERATORS, RULES
from tinyml.pruning.size_attributes import SizeReads, Source, size_sources
from tinyml.pruning.unit_groups import UnitGroups

_SIZED = {"view", "reshape", "_unsafe_view", "unflatten", "expand", "split", "split_with_sizes"}


class Walk(UnitGroups):
    """A walk through a graph that merges groups whose units must be pruned together."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.reads = SizeReads()
        super().__init__(exported(model, inputs, self.reads))
        #: The uses of each attribute that the code reads as the size of a tensor.
        self.size_uses: dict[Source, list[SizeUse]] = {}
        for node in self.graph.nodes:
            self.values[node] = self._visit(node)
            self._note_sizes(node, self.values[node])
        for source, use in self.reads.other_uses.items():
            self.size_uses.setdefault(source, []).append(SizeUse(use, ()))

    def _note_sizes(self, node: fx.Node, result: Any) -> None:
        """Record, for each size that the code reads from an attribute, the units that it counts."""
        # A reshape may be exported as a copy and a view with its sizes; only the view uses them.
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
            # The units of a computed size do not show which units the attribute itself counts.
            if not source.derived:
                self.size_uses.setdefault(source, []).append(SizeUse(described(node), parts))
            elif not parts:
                plain = Source(source.module, source.name)
                self.size_uses.setdefault(plain, []).append(SizeUse(described(node), ()))

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

"""Units that several layers share, found by following a model's graph (Note [Dependency groups]).

A unit is a channel, a feature or a head that can be pruned. A `Walk` visits every node once. The
rule of the node's operator (see `rules`) returns the units in the result. Units cannot be removed
if they reach an operator without a rule, an operator that mixes them, or the output of the model.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import fx, nn

from tinyml.exported import describe_node, export_graph, get_module_name, get_operator, get_shape
from tinyml.pruning.groups import Group, Product, SizeUse, Slice, Units
from tinyml.pruning.size_attributes import SizeReads, Source, get_size_sources

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

    `rules` maps operators to functions of the walk, a node and the node's arguments. These
    functions create, merge and block groups by the methods of the walk.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], rules: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._rules = rules
        self.reads = SizeReads()
        self.graph = export_graph(model, inputs, self.reads)
        #: Weights whose number of inputs must equal an attribute of the module.
        self.weights_of_fixed_width = {
            f"{path}.{key}".lstrip(".")
            for path, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
            for key in ("in_proj_weight", "q_proj_weight")
        }
        self._merged: dict[Group, Group] = {}
        #: For each visited node: its `Units`, a list of `Units` for a split, or None if no units
        #: are followed past the node.
        self.values: dict[fx.Node, Any] = {}
        #: The groups that rules have created, including those that were merged.
        self.created: list[Group] = []
        #: The product of each weight that is used once, by the weight's name.
        self.products: dict[str, Product] = {}
        #: The reason why the outputs of a layer are not units, by the layer's name.
        self.layers_without_units: dict[str, str] = {}
        # Tied weights have several names but one address.
        self._uses_by_address: Counter[int] = Counter()
        for node in self.graph.nodes:
            if node.name in self.graph.constants:
                self._uses_by_address[self.graph.constants[node.name].data_ptr()] += len(node.users)
        #: The uses of each attribute that the code reads as the size of a tensor.
        self.size_uses: dict[Source, list[SizeUse]] = {}
        for node in self.graph.nodes:
            self.values[node] = self._visit(node)
            self._record_size_uses(node, self.values[node])
        for source, use in self.reads.other_uses.items():
            self.size_uses.setdefault(source, []).append(SizeUse(use, ()))

    def list_groups(self) -> list[Group]:
        """Return all groups, including those whose units cannot be removed."""
        return list(dict.fromkeys(self.find(group) for group in self.created))

    def find(self, group: Group) -> Group:
        """Return the group into which `group` was merged, or `group` itself if it was not."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def block(self, node: fx.Node) -> None:
        """Mark the units of the node's inputs as not removable, with the node as the reason."""
        for source in node.all_input_nodes:
            value = self.values[source]
            for units in value if isinstance(value, list) else [value]:
                for group, _ in units.parts if units is not None else ():
                    group = self.find(group)
                    group.blocked_by = group.blocked_by or (
                        "the model returns them" if node.op == "output" else describe_node(node)
                    )

    def block_product(self, node: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
        """Block a product whose weight or bias is not a parameter that is used once."""
        reason = "its weight or bias is used several times"
        if any(item is not None and item.name not in self.graph.names for item in (weight, bias)):
            reason = (
                "its weight or bias is not a parameter, for example because weight_norm computes it"
            )
        self.layers_without_units[get_module_name(node)] = reason
        self.block(node)

    def find_name_if_used_once(self, node: Any) -> str | None:
        """Return the name of a parameter or buffer that is used exactly once, or None."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.names:
            return None
        is_used_once = self._uses_by_address[self.graph.constants[node.name].data_ptr()] == 1
        return self.graph.names[node.name] if is_used_once else None

    def add_slices(
        self,
        units: Units,
        tensors: list[tuple[str, int]],
        role: Literal["passer", "reader"],
        expansion: int = 1,
    ) -> None:
        """Add slices of the tensors, given as (name, axis), to the groups of `units`.

        A tensor has `expansion` elements along its axis for each element of the value along the
        dimension of the units.
        """
        start = 0
        for group, extent in units.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * expansion
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * expansion

    def coarsen_to_blocks(self, units: Units, num_blocks: int) -> Group | None:
        """Merge neighboring units in place so that each unit consists of whole blocks.

        The dimension of the units is divided into `num_blocks` equal blocks. Return the group, or
        None if the value has several groups or `num_blocks` is 1.
        """
        if len(units.parts) != 1 or num_blocks == 1:
            return None
        group = self.find(units.parts[0][0])
        group.coarsen(math.gcd(group.size, num_blocks))
        return group

    def merge(
        self, node: fx.Node, operands: Sequence[Units], allow_different_sizes: bool = False
    ) -> Any:
        """Merge the groups of several values that must have the same units, part by part.

        Return the units of the first value. If two values differ in the number or the sizes of
        their parts, block the units at `node` and return None. With `allow_different_sizes`, parts
        of different sizes are merged too, because several query heads share a key-value head. The
        number of parts must still agree.
        """
        first = operands[0]
        for other in operands[1:]:
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

    def _record_size_uses(self, node: fx.Node, result: Any) -> None:
        """Record the units that each size of `node` counts, if the size comes from an attribute."""
        # A reshape may be exported as a copy and a view with its sizes; only the view uses them.
        if node.op != "call_function" or get_operator(node) not in _OPERATORS_WITH_SIZES:
            return
        for index, sources in get_size_sources(node).items():
            if isinstance(result, list):
                source, _, *rest = node.args
                split_dim = rest[0] if rest else 0
                rank = len(get_shape(source))  # type: ignore[arg-type]
                unit_dim = result[0].dim
                pieces = result if index == -1 else result[index : index + 1]
                if split_dim not in (unit_dim, unit_dim - rank):
                    # A split along another dimension counts no units, and may have more pieces.
                    pieces = [Units(unit_dim, ())]
                for piece in pieces:
                    self._record_size_use(node, sources, piece.parts)
            else:
                counts_units = isinstance(result, Units) and result.dim == index
                self._record_size_use(node, sources, result.parts if counts_units else ())

    def _record_size_use(
        self, node: fx.Node, sources: Sequence[Source], parts: tuple[tuple[Group, int], ...]
    ) -> None:
        for source in sources:
            # The units of a computed size do not show which units the attribute itself counts.
            if not source.derived or not parts:
                attribute = Source(source.module, source.name)
                use = SizeUse(describe_node(node), parts)
                self.size_uses.setdefault(attribute, []).append(use)

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "output":
            return self.block(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            value = self.values[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            return value[operator.index(index)] if isinstance(value, list) else value
        name = get_operator(node)
        rule = self._rules.get(name)
        has_units = any(isinstance(self.values[n], Units) for n in node.all_input_nodes)
        if rule is None or not (has_units or name in PRODUCT_OPERATORS):
            return self.block(node)
        arguments: tuple[Any, ...] = node.args
        return rule(self, node, *arguments, **node.kwargs)

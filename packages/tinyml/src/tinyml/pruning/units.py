"""Units that several layers share, found by following a model's graph (Note [Dependency groups]).

Each operator has a rule in `_RULES`. Units that reach an operator without a rule, or an operator
that mixes them, cannot be removed; `Group.blocked_by` names that operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx, nn

from tinyml.exported import ELEMENTWISE, Exported, described, exported, module_of, operator_name
from tinyml.pruning.groups import Group, Product, SizeUse, Slice
from tinyml.pruning.size_attributes import SizeReads, Source, size_sources


@dataclass(frozen=True)
class _Along:
    """The dimension of a value that holds units; `parts` are (group, number of elements)."""

    dim: int
    parts: tuple[tuple[Group, int], ...]


class Walk:
    """A walk through a graph that merges the groups that have to lose the same units."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.reads = SizeReads()
        self.graph: Exported = exported(model, inputs, self.reads)
        self._merged: dict[Group, Group] = {}
        self._at: dict[fx.Node, Any] = {}
        self._created: list[Group] = []
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
            self._at[node] = self._visit(node)
            self._note_sizes(node, self._at[node])
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
                across = (dim or [0])[0] in (pieces[0].dim, pieces[0].dim - len(_shape(source)))  # type: ignore[arg-type]
                for piece in pieces:
                    self._note_size(node, sources, piece.parts if across else ())
            else:
                counts = isinstance(result, _Along) and result.dim == index
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
        return list(dict.fromkeys(self.find(group) for group in self._created))

    def find(self, group: Group) -> Group:
        """Return the group into which this group was merged."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "output":
            return self._stop(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            value = self._at[node.args[0]]  # type: ignore[index]
            index: Any = node.args[1]
            return value[operator.index(index)] if isinstance(value, list) else value
        name = operator_name(node)
        rule = _RULES.get(name)
        known = any(isinstance(self._at[n], _Along) for n in node.all_input_nodes)
        if rule is None or not (known or name in _PRODUCTS):
            return self._stop(node)
        arguments: tuple[Any, ...] = node.args
        return rule(self, node, *arguments, **node.kwargs)

    def _stop(self, node: fx.Node) -> None:
        """Mark all units that reach this node as not removable."""
        for source in node.all_input_nodes:
            value = self._at[source]
            for along in value if isinstance(value, list) else [value]:
                for group, _ in along.parts if along is not None else ():
                    group = self.find(group)
                    group.blocked_by = group.blocked_by or (
                        "the model returns them" if node.op == "output" else described(node)
                    )

    # Rules of products: they create new units and read the units that they sum over.

    def _linear(self, node: fx.Node, x: fx.Node, weight: Any, bias: Any = None) -> Any:
        return self._product(node, x, weight, bias, (1, 0), _shape(x), -1)

    def _addmm(self, node: fx.Node, bias: Any, x: fx.Node, weight: Any, **_: Any) -> Any:
        return self._product(node, x, weight, bias, (0, 1), _shape(x), -1)

    def _matmul(self, node: fx.Node, a: fx.Node, b: fx.Node) -> Any:
        if self._name(b) is not None and len(_shape(b)) == 2:
            return self._product(node, a, b, None, (0, 1), _shape(a), -1)
        first, second = self._at[a], self._at[b]
        if first is None or second is None or first.dim != second.dim:
            return self._stop(node)
        if len(_shape(a)) != len(_shape(b)) or first.dim >= len(_shape(a)) - 2:
            return self._stop(node)
        return self._together(node, [first, second])

    def _conv(
        self,
        node: fx.Node,
        x: fx.Node,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        *rest: Any,
    ) -> Any:
        transposed = "transpose" in operator_name(node)
        groups = rest[0] if rest and not transposed else 1
        if transposed:  # (x, weight, bias, stride, padding, output_padding, groups, dilation)
            groups = rest[0] if rest else 1
        if groups == 1:
            axes = (0, 1) if transposed else (1, 0)
            return self._product(node, x, weight, bias, axes, _shape(x), 1)
        along = self._at[x]
        names = [self._name(item) for item in (weight, bias) if item is not None]
        if along is None or along.dim != 1 or None in names:
            return self._stop(node)
        outputs = _shape(node)[1]
        if groups == _shape(x)[1] and not transposed:
            times = outputs // groups  # a depthwise convolution: `times` filters per channel
            self._note(along, [(str(name), 0) for name in names], "passer", times)
            return _Along(1, tuple((group, extent * times) for group, extent in along.parts))
        # A unit is one or several groups of the convolution, with their inputs and outputs.
        if (unit := self._coarsened(along, groups)) is None:
            return self._stop(node)
        for name, elements in zip(names, (_shape(weight)[0], outputs), strict=False):
            unit.slices.append(Slice(str(name), 0, 0, elements // unit.size, "passer"))
        return _Along(1, ((unit, outputs),))

    def _coarsened(self, along: _Along, count: int) -> Group | None:
        """Merge units so that `count` equal parts of the elements are whole units, if possible."""
        if len(along.parts) != 1 or count == 1:
            return None
        group = self.find(along.parts[0][0])
        group.coarsen(math.gcd(group.size, count))
        return group

    def _group_norm(
        self, node: fx.Node, x: fx.Node, groups: int, weight: Any = None, bias: Any = None, *_: Any
    ) -> Any:
        along = self._at[x]
        names = [self._name(item) for item in (weight, bias) if item is not None]
        if along.dim != 1 or None in names or self._coarsened(along, groups) is None:
            return self._stop(node)
        self._note(along, [(str(name), 0) for name in names], "passer")
        return along

    def _product(
        self,
        node: fx.Node,
        x: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        axes: tuple[int, int],
        shape: tuple[int, ...],
        dim: int,
    ) -> Any:
        dim = dim % len(shape)
        along = self._at[x]
        name = self._name(weight)
        added = None if bias is None else self._name(bias)
        if name is None or (bias is not None and added is None):
            return self._stop(node)
        if along is not None and along.dim == dim:
            self._note(along, [(name, axes[0])], "reader")
        else:
            self._stop(node)
        self.products[name] = Product(node, x, dim, axes, added, bias is not None, module_of(node))
        size = _shape(weight)[axes[1]]
        group = Group(size, [Slice(name, axes[1], 0, 1, "writer")])
        if added is not None:
            group.slices.append(Slice(added, 0, 0, 1, "writer"))
        self._created.append(group)
        return _Along(dim, ((group, size),))

    def _name(self, node: Any) -> str | None:
        """Return the name of a parameter or buffer that is used exactly once, or None."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.names:
            return None
        is_used_once = self._users[self.graph.constants[node.name].data_ptr()] == 1
        return self.graph.names[node.name] if is_used_once else None

    def _note(
        self,
        along: _Along,
        tensors: list[tuple[str, int]],
        role: Literal["passer", "reader"],
        times: int = 1,
    ) -> None:
        start = 0
        for group, extent in along.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * times
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * times

    def _batch_norm(self, node: fx.Node, x: fx.Node, *rest: Any, **_: Any) -> Any:
        along = self._at[x]
        names = [self._name(item) for item in rest[:4] if item is not None]
        if along.dim != 1 or None in names:
            return self._stop(node)
        self._note(along, [(str(name), 0) for name in names], "passer")
        return along

    # Rules of operators that pass units on: they act on elements or mix other dimensions only.

    def _elementwise(self, node: fx.Node, *_: Any, **__: Any) -> Any:
        return self._broadcast(node, node.all_input_nodes, _shape(node))

    def _prelu(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> Any:
        along, name = self._at[x], self._name(weight)
        if math.prod(_shape(weight)) > 1:
            if along.dim != 1 or name is None:
                return self._stop(node)
            self._note(along, [(name, 0)], "passer")
        return along

    def _broadcast(self, node: fx.Node, sources: Sequence[fx.Node], shape: tuple[int, ...]) -> Any:
        moved, constant = [], []
        for source in sources:
            along, shift = self._at[source], len(shape) - len(_shape(source))
            if along is not None:
                moved.append(_Along(along.dim + shift, along.parts))
            else:
                constant.append((source, shift))
        dim = moved[0].dim
        if any(along.dim != dim for along in moved):
            return self._stop(node)
        for source, shift in constant:
            if dim < shift or _shape(source)[dim - shift] == 1:
                continue
            name = self._name(source)
            if name is None or _shape(source)[dim - shift] != shape[dim]:
                return self._stop(node)
            self._note(moved[0], [(name, dim - shift)], "passer")
        return self._together(node, moved)

    def _together(self, node: fx.Node, alongs: Sequence[_Along], grouped: bool = False) -> Any:
        """Merge the groups of several values that have to hold the same units, part by part."""
        first = alongs[0]
        for other in alongs[1:]:
            alike = len(first.parts) == len(other.parts) and all(
                a == b or grouped for (_, a), (_, b) in zip(first.parts, other.parts, strict=True)
            )
            if not alike:
                return self._stop(node)
            for (target, _), (merged, _) in zip(first.parts, other.parts, strict=True):
                self._merge(self.find(target), self.find(merged))
        return first

    def _merge(self, first: Group, second: Group) -> None:
        if first is not second:
            size = math.gcd(first.size, second.size)
            first.coarsen(size)
            second.coarsen(size)
            first.slices += second.slices
            first.blocked_by = first.blocked_by or second.blocked_by
            self._merged[second] = first

    def _attention(
        self,
        node: fx.Node,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        mask: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        alongs = [self._at[item] for item in (q, k, v)]
        dims = {along.dim if along is not None else -1 for along in alongs}
        shared = len(_shape(q)) - 3  # (..., heads, tokens, width)
        masked = mask is not None and len(_shape(mask)) > 2 and _shape(mask)[-3] != 1
        if dims != {shared} or masked or any(len(along.parts) != 1 for along in alongs):
            return self._stop(node)
        return self._together(node, alongs, grouped=True)

    def _inner(self, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
        """Pass units through windows over dimensions after the second one."""
        along = self._at[x]
        return along if along.dim <= 1 and len(_shape(x)) > 2 else self._stop(node)

    def _pad(self, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any) -> Any:
        along = self._at[x]
        return along if along.dim < len(_shape(x)) - len(sizes) // 2 else self._stop(node)

    def _softmax(self, node: fx.Node, x: fx.Node, dim: int, *_: Any) -> Any:
        along = self._at[x]
        return self._stop(node) if dim % len(_shape(x)) == along.dim else along

    def _layer_norm(self, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any) -> Any:
        along = self._at[x]
        return along if along.dim < len(_shape(x)) - len(sizes) else self._stop(node)

    def _mean(self, node: fx.Node, x: fx.Node, dims: Any, keepdim: bool = False, **_: Any) -> Any:
        along, rank = self._at[x], len(_shape(x))
        gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        if along.dim in gone:
            return self._stop(node)
        before = 0 if keepdim else sum(d < along.dim for d in gone)
        return _Along(along.dim - before, along.parts)

    def _permute(self, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Any:
        along = self._at[x]
        return _Along([d % len(order) for d in order].index(along.dim), along.parts)

    def _transpose(self, node: fx.Node, x: fx.Node, a: int = 0, b: int = 1) -> Any:
        rank = len(_shape(x))
        swapped = {a % rank: b % rank, b % rank: a % rank}
        along = self._at[x]
        return _Along(swapped.get(along.dim, along.dim), along.parts)

    def _expand(self, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
        return self._broadcast(node, [x], _shape(node))

    def _cat(self, node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> Any:
        parts = [part for part in parts if math.prod(_shape(part))]
        dim = dim % len(_shape(node))
        alongs = [self._at[part] for part in parts]
        if all(along is None or along.dim == dim for along in alongs):
            joined: list[tuple[Group, int]] = []
            for along, part in zip(alongs, parts, strict=True):
                if along is None:
                    extent = _shape(part)[dim]
                    joined.append((Group(1, blocked_by="they are not outputs of a layer"), extent))
                else:
                    joined += along.parts
            return _Along(dim, tuple(joined))
        if None in alongs or len({along.dim for along in alongs}) > 1:
            return self._stop(node)
        return self._together(node, alongs)

    def _slice(self, node: fx.Node, x: fx.Node, dim: int = 0, *_: Any) -> Any:
        along = self._at[x]
        return self._stop(node) if dim % len(_shape(x)) == along.dim else along

    def _split(self, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
        along = self._at[x]
        if dim % len(_shape(x)) != along.dim:
            return [along] * (max(int(user.args[1]) for user in node.users) + 1)  # type: ignore[arg-type]
        total = _shape(x)[along.dim]
        (group, extent), *more = along.parts
        group = self.find(group)
        widths = [sizes] * (total // sizes) if isinstance(sizes, int) else list(sizes)
        plain = not more and group.size == extent and not group.blocked_by
        if not plain or sum(widths) != total or group.layers("reader") or not _alone(x):
            return self._stop(node)
        # A fused matrix, such as queries, keys and values, is split into separate groups.
        pieces, start = [], 0
        for size in widths:
            slices = [Slice(s.tensor, s.axis, s.start + start, 1, s.role) for s in group.slices]
            self._created.append(Group(size, slices))
            pieces.append(_Along(along.dim, ((self._created[-1], size),)))
            start += size
        group.slices = []
        return pieces

    def _view(self, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
        """Return the dimension that starts where the units' dimension started.

        The dimension may have been flattened with the dimensions after it, or split, for example
        into (heads, width); then its leading factor is returned.
        """
        along = self._at[x]
        before = _shape(x)
        after = _shape(node)
        size, lead = before[along.dim], math.prod(before[: along.dim])
        for dim, extent in enumerate(after):
            if math.prod(after[:dim]) == lead and (extent != 1 or size == 1):
                break
        else:
            return self._stop(node)
        inside = [
            math.prod(before[along.dim : end]) for end in range(along.dim + 1, len(before) + 1)
        ]
        outside = [math.prod(after[dim:end]) for end in range(dim + 1, len(after) + 1)]
        if extent in inside:  # unchanged, or flattened with the dimensions after it
            times = extent // size
            return _Along(dim, tuple((group, n * times) for group, n in along.parts))
        if size not in outside or len(along.parts) > 1:
            return self._stop(node)
        group = self.find(along.parts[0][0])  # split, for example into heads
        group.coarsen(math.gcd(group.size, extent))
        return _Along(dim, ((group, extent),))


_PRODUCTS = {
    "linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_WINDOWS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d max_pool2d_with_indices "
    "upsample_nearest2d upsample_bilinear2d"
)
_ELEMENTWISE_TOO = (
    "rsqrt erf log_sigmoid add sub mul div maximum minimum where clone contiguous dropout "
    "feature_dropout _to_copy to alias detach masked_fill"
)
#: The rule of each operator, called with the walk, the node and the node's arguments.
_RULES: dict[str, Callable[..., Any]] = {
    operator: rule
    for rule, operators in (
        (Walk._linear, "linear"),
        (Walk._addmm, "addmm"),
        (Walk._matmul, "matmul mm bmm"),
        (Walk._conv, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
        (Walk._batch_norm, "batch_norm _native_batch_norm_legit_no_training"),
        (Walk._group_norm, "group_norm"),
        (Walk._layer_norm, "layer_norm rms_norm"),
        (Walk._prelu, "prelu"),
        (Walk._attention, "scaled_dot_product_attention"),
        (Walk._inner, _WINDOWS),
        (Walk._pad, "pad constant_pad_nd"),
        (Walk._softmax, "softmax _softmax"),
        (Walk._mean, "mean sum amax amin"),
        (Walk._permute, "permute"),
        (Walk._transpose, "transpose t"),
        (Walk._expand, "expand"),
        (Walk._cat, "cat"),
        (Walk._slice, "slice"),
        (Walk._split, "split split_with_sizes"),
        (Walk._view, "view reshape flatten unflatten _unsafe_view squeeze unsqueeze"),
        (Walk._elementwise, " ".join(sorted(ELEMENTWISE)) + " " + _ELEMENTWISE_TOO),
    )
    for operator in operators.split()
}
_SIZED = {"view", "reshape", "_unsafe_view", "unflatten", "expand", "split", "split_with_sizes"}


def _alone(node: fx.Node) -> bool:
    """Return True if each value from the product to `node` has a single consumer."""
    while operator_name(node) not in _PRODUCTS:
        if len(node.users) > 1 or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return len(node.users) == 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()

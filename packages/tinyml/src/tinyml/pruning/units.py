"""Which channels, hidden units and heads belong together: units followed through a model's graph.

Notable:
- what one layer writes is read by others, through normalization, pooling, residual sums,
  concatenation, heads. The exported graph says which tensors share their units along which axis;
  those lose the same ones, together: a `Group`;
- a unit is what can go alone: a channel; where a width is split into heads, a head of every
  projection; with grouped queries, a head of keys and values and all queries that read it;
- each operator has a rule: products write new units and read those that they sum over, most others
  pass them on. What meets an operation without one, or one that mixes its units, stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from tinyml.exported import ELEMENTWISE, Exported, described, exported, operator_name, place_of
from tinyml.pruning.size_attributes import SizeReads, Source, size_sources


@dataclass
class Slice:
    """Where a tensor holds units: `width` elements each along `axis`, from element `start` on."""

    tensor: str
    axis: int
    start: int
    width: int
    role: Literal["writer", "passer", "reader"]

    @property
    def layer(self) -> str:
        """The module that holds the tensor."""
        return self.tensor.rpartition(".")[0]


@dataclass(eq=False)
class Group:
    """Units that several layers share, so that they go together."""

    size: int
    slices: list[Slice] = field(default_factory=list)
    stays: str = ""
    """Why they have to stay: the operation that they meet."""
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    """The units from most to least important; see `tinyml.pruning.importance`."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """For each reading weight the values of units that never change; nan for the other units."""

    def layers(self, role: str) -> list[str]:
        """Those that write, pass on or read the units, each once."""
        return list(dict.fromkeys(s.layer for s in self.slices if s.role == role))

    @property
    def writers(self) -> list[str]:
        """Layers whose outputs they are."""
        return self.layers("writer")

    def coarsen(self, size: int) -> None:
        """Join neighbors, so that there are `size` units."""
        for each in self.slices:
            each.width *= self.size // size
        self.size = size


@dataclass(frozen=True)
class SizeUse:
    """A use of an attribute: the node, and the groups whose units the size counts.

    Each group comes with the number of elements that it contributes; without groups the attribute
    is something else than a number of units.
    """

    node: str
    parts: tuple[tuple[Group, int], ...]


@dataclass(frozen=True)
class Product:
    """A product of a value with a weight: where the units are that it reads, and its bias."""

    node: fx.Node
    source: fx.Node
    dim: int
    axes: tuple[int, int]
    """The dimensions of the weight for inputs and outputs."""
    bias: str | None
    has_bias: bool
    place: str
    """The module whose forward computes it."""


@dataclass(frozen=True)
class _Along:
    """Which dimension of a value holds units: for each part of it the group and the elements."""

    dim: int
    parts: tuple[tuple[Group, int], ...]


class Walk:
    """Follows units through a graph, merging the groups that meet."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._reads = SizeReads()
        self.graph: Exported = exported(model, inputs, self._reads)
        self._merged: dict[Group, Group] = {}
        self._at: dict[fx.Node, Any] = {}
        self._made: list[Group] = []
        self.products: dict[str, Product] = {}
        """The product of each weight that is used once, by the weight's name."""
        self.size_uses: dict[Source, list[SizeUse]] = {}
        """The uses of each attribute that the code reads as the size of a tensor."""
        self._users: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.name in self.graph.constants:
                key = self.graph.constants[node.name].data_ptr()
                self._users[key] = self._users.get(key, 0) + len(node.users)
        for node in self.graph.nodes:
            self._at[node] = self._visit(node)
            self._note_sizes(node, self._at[node])
        for source, use in self._reads.other_uses.items():
            self.size_uses.setdefault(source, []).append(SizeUse(use, ()))

    def _note_sizes(self, node: fx.Node, result: Any) -> None:
        """Record which of the node's sizes count units, for sizes that come from attributes."""
        # One call may become several nodes, as a reshape becomes a copy and a view.
        sized = node.op == "call_function" and operator_name(node) in _SIZED
        for index, sources in size_sources(node).items() if sized else ():
            if isinstance(result, list):
                # A split along another dimension than that of the units counts something else.
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
            # A unit's part in the result of arithmetic does not say what the attribute counts.
            if not source.derived:
                self.size_uses.setdefault(source, []).append(SizeUse(described(node), parts))
            elif not parts:
                plain = Source(source.module, source.name)
                self.size_uses.setdefault(plain, []).append(SizeUse(described(node), ()))

    def groups(self) -> list[Group]:
        """All of them, also those that have to stay."""
        return list(dict.fromkeys(self.find(group) for group in self._made))

    def find(self, group: Group) -> Group:
        """The group that this one has become a part of."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "output":
            return self._stop(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            held = self._at[node.args[0]]  # type: ignore[index]
            return held[operator.index(node.args[1])] if isinstance(held, list) else held  # type: ignore[arg-type]
        name = operator_name(node)
        rule = getattr(self, f"_{_SAME.get(name, name)}", None)
        known = any(isinstance(self._at[n], _Along) for n in node.all_input_nodes)
        if rule is None or not (known or name in _PRODUCTS):
            return self._stop(node)
        arguments: tuple[Any, ...] = node.args
        return rule(node, *arguments, **node.kwargs)

    def _stop(self, node: fx.Node) -> None:
        """Whatever comes in stays as it is."""
        for source in node.all_input_nodes:
            held = self._at[source]
            for along in held if isinstance(held, list) else [held]:
                for group, _ in along.parts if along is not None else ():
                    group = self.find(group)
                    group.stays = group.stays or (
                        "the model returns them" if node.op == "output" else described(node)
                    )

    # Products write new units and read those along the dimension that they sum over.

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
        self, node: fx.Node, x: fx.Node, weight: Any, bias: Any = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, *rest: Any,
    ) -> Any:  # fmt: skip
        transposed = "transpose" in operator_name(node)
        groups = rest[0] if rest and not transposed else 1
        if transposed:  # (x, weight, bias, stride, padding, output_padding, groups, dilation)
            groups = rest[0] if rest else 1
        if groups == 1:
            axes = (0, 1) if transposed else (1, 0)
            return self._product(node, x, weight, bias, axes, _shape(x), 1)
        along, shape = self._at[x], _shape(weight)
        if transposed or along is None or along.dim != 1 or shape[1] != 1 or groups != _shape(x)[1]:
            return self._stop(node)
        times = shape[0] // groups  # each channel by itself, so many filters each
        names = [self._name(each) for each in (weight, bias) if each is not None]
        if None in names:
            return self._stop(node)
        self._note(along, [(str(name), 0) for name in names], "passer", times)
        return _Along(1, tuple((group, extent * times) for group, extent in along.parts))

    def _product(
        self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None,
        axes: tuple[int, int], shape: tuple[int, ...], dim: int,
    ) -> Any:  # fmt: skip
        dim, along, name = dim % len(shape), self._at[x], self._name(weight)
        added = None if bias is None else self._name(bias)
        if name is None or (bias is not None and added is None):
            return self._stop(node)
        if along is not None and along.dim == dim:
            self._note(along, [(name, axes[0])], "reader")
        else:
            self._stop(node)
        self.products[name] = Product(node, x, dim, axes, added, bias is not None, place_of(node))
        size = _shape(weight)[axes[1]]
        group = Group(size, [Slice(name, axes[1], 0, 1, "writer")])
        if added is not None:
            group.slices.append(Slice(added, 0, 0, 1, "writer"))
        self._made.append(group)
        return _Along(dim, ((group, size),))

    def _name(self, node: Any) -> str | None:
        """The name of a parameter or buffer that is used at one place only."""
        if not isinstance(node, fx.Node) or node.name not in self.graph.names:
            return None
        once = self._users[self.graph.constants[node.name].data_ptr()] == 1
        return self.graph.names[node.name] if once else None

    def _note(
        self, along: _Along, tensors: list[tuple[str, int]],
        role: Literal["passer", "reader"], times: int = 1,
    ) -> None:  # fmt: skip
        start = 0
        for group, extent in along.parts:
            group = self.find(group)
            for name, axis in tensors:
                width = extent // group.size * times
                group.slices.append(Slice(name, axis, start, width, role))
            start += extent * times

    def _batch_norm(self, node: fx.Node, x: fx.Node, *rest: Any, **_: Any) -> Any:
        along, held = self._at[x], [r for r in rest[:4] if r is not None]
        names = [self._name(each) for each in held]
        if along.dim != 1 or None in names:
            return self._stop(node)
        self._note(along, [(str(name), 0) for name in names], "passer")
        return along

    # What works on each element alone, or mixes along other dimensions only, passes units on.

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
        """The same units in several values: from here on one group for each part."""
        first = alongs[0]
        for other in alongs[1:]:
            alike = len(first.parts) == len(other.parts) and all(
                a == b or grouped for (_, a), (_, b) in zip(first.parts, other.parts, strict=True)
            )
            if not alike:
                return self._stop(node)
            for (one, _), (two, _) in zip(first.parts, other.parts, strict=True):
                self._merge(self.find(one), self.find(two))
        return first

    def _merge(self, one: Group, two: Group) -> None:
        if one is not two:
            size = math.gcd(one.size, two.size)
            one.coarsen(size)
            two.coarsen(size)
            one.slices += two.slices
            one.stays = one.stays or two.stays
            self._merged[two] = one

    def _attention(
        self, node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, mask: Any = None, *_: Any,
        **__: Any,
    ) -> Any:  # fmt: skip
        alongs = [self._at[each] for each in (q, k, v)]
        dims = {along.dim if along is not None else -1 for along in alongs}
        shared = len(_shape(q)) - 3  # (..., heads, tokens, width)
        masked = mask is not None and len(_shape(mask)) > 2 and _shape(mask)[-3] != 1
        if dims != {shared} or masked or any(len(along.parts) != 1 for along in alongs):
            return self._stop(node)
        return self._together(node, alongs, grouped=True)

    def _inner(self, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
        """Windows, over the dimensions behind the second one."""
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
                    joined.append((Group(1, stays="they come from elsewhere"), extent))
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
        total, ((group, extent), *more) = _shape(x)[along.dim], along.parts
        group = self.find(group)
        each = [sizes] * (total // sizes) if isinstance(sizes, int) else list(sizes)
        plain = not more and group.size == extent and not group.stays
        if not plain or sum(each) != total or group.layers("reader") or not _alone(x):
            return self._stop(node)
        # One matrix that holds several, as queries, keys and values: from here on apart.
        pieces, start = [], 0
        for size in each:
            slices = [Slice(s.tensor, s.axis, s.start + start, 1, s.role) for s in group.slices]
            self._made.append(Group(size, slices))
            pieces.append(_Along(along.dim, ((self._made[-1], size),)))
            start += size
        group.slices = []
        return pieces

    def _view(self, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
        """The dimension that begins where the units' one began; its rest may be split off."""
        along, before, after = self._at[x], _shape(x), _shape(node)
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
        if extent in inside:  # as it was, or with the dimensions behind it
            times = extent // size
            return _Along(dim, tuple((group, n * times) for group, n in along.parts))
        if size not in outside or len(along.parts) > 1:
            return self._stop(node)
        group = self.find(along.parts[0][0])  # split, as into heads
        group.coarsen(math.gcd(group.size, extent))
        return _Along(dim, ((group, extent),))


_PRODUCTS = {
    "linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_RULES = {
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "matmul": "mm bmm",
    "batch_norm": "_native_batch_norm_legit_no_training",
    "layer_norm": "rms_norm",
    "attention": "scaled_dot_product_attention",
    "pad": "constant_pad_nd",
    "mean": "sum amax amin",
    "transpose": "t",
    "split": "split_with_sizes",
    "view": "reshape flatten unflatten _unsafe_view squeeze unsqueeze",
    "inner": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "max_pool2d_with_indices upsample_nearest2d upsample_bilinear2d",
    "elementwise": "rsqrt erf log_sigmoid add sub mul div maximum minimum where clone "
    "contiguous dropout feature_dropout _to_copy to alias detach masked_fill",
}
_SIZED = {"view", "reshape", "_unsafe_view", "unflatten", "expand", "split", "split_with_sizes"}
_SAME = dict.fromkeys(ELEMENTWISE, "elementwise")
_SAME |= {operator: rule for rule, operators in _RULES.items() for operator in operators.split()}


def _alone(node: fx.Node) -> bool:
    """Whether nobody else reads what was written before it came here."""
    while operator_name(node) not in _PRODUCTS:
        if len(node.users) > 1 or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return len(node.users) == 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()

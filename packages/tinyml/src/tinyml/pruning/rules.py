"""Rules by which operators create units, read them, and pass them on (Note [Dependency groups]).

A rule is called with the walk, the node and the node's arguments. It returns the dimension of the
result that contains units. Products create new units and read the units that they sum over. Other
operators pass units on if they do not mix the dimension of the units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tinyml.exported import ELEMENTWISE, operator_name, shape_of
from tinyml.pruning.groups import Along, Group, Product, Slice
from tinyml.pruning.units import Walk


def _linear(walk: Walk, node: fx.Node, x: fx.Node, weight: Any, bias: Any = None) -> Any:
    return _product(walk, node, x, weight, bias, (1, 0), -1)


def _addmm(walk: Walk, node: fx.Node, bias: Any, x: fx.Node, weight: Any, **_: Any) -> Any:
    return _product(walk, node, x, weight, bias, (0, 1), -1)


def _matmul(walk: Walk, node: fx.Node, a: fx.Node, b: fx.Node) -> Any:
    if walk.name_if_used_once(b) is not None and len(shape_of(b)) == 2:
        return _product(walk, node, a, b, None, (0, 1), -1)
    first, second = walk.values[a], walk.values[b]
    if first is None or second is None or first.dim != second.dim:
        return walk.block(node)
    if len(shape_of(a)) != len(shape_of(b)) or first.dim >= len(shape_of(a)) - 2:
        return walk.block(node)
    return walk.merge(node, [first, second])


def _conv(
    walk: Walk,
    node: fx.Node,
    x: fx.Node,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    *rest: Any,
) -> Any:
    if len(shape_of(x)) != len(shape_of(weight)):  # one image without a batch
        return walk.block(node)
    # In a transposed convolution, `dilation` receives the output padding and `rest` the groups.
    transposed = "transpose" in operator_name(node)
    groups = rest[0] if rest else 1
    if groups == 1:
        axes = (0, 1) if transposed else (1, 0)
        return _product(walk, node, x, weight, bias, axes, 1)
    along = walk.values[x]
    names = [walk.name_if_used_once(item) for item in (weight, bias) if item is not None]
    if along is None or along.dim != 1 or None in names:
        return walk.block(node)
    outputs = shape_of(node)[1]
    if groups == shape_of(x)[1] and not transposed:
        times = outputs // groups  # a depthwise convolution: `times` filters per channel
        walk.add_slices(along, [(str(name), 0) for name in names], "passer", times)
        return Along(1, tuple((group, extent * times) for group, extent in along.parts))
    # A unit is one or several groups of the convolution, with their inputs and outputs.
    if (unit := walk.coarsen_to_blocks(along, groups)) is None:
        return walk.block(node)
    for name, elements in zip(names, (shape_of(weight)[0], outputs), strict=False):
        unit.slices.append(Slice(str(name), 0, 0, elements // unit.size, "passer"))
    return Along(1, ((unit, outputs),))


def _product(
    walk: Walk,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    axes: tuple[int, int],
    dim: int,
) -> Any:
    """Read the units of `x` along `dim`, and create a group for the outputs.

    `axes` are the axes of the weight that contain its inputs and its outputs.
    """
    dim = dim % len(shape_of(x))
    along = walk.values[x]
    name = walk.name_if_used_once(weight)
    added = None if bias is None else walk.name_if_used_once(bias)
    if name is None or (bias is not None and added is None):
        return walk.block(node)
    if along is not None and along.dim == dim:
        walk.add_slices(along, [(name, axes[0])], "reader")
    else:
        walk.block(node)
    walk.products[name] = Product(node, x, dim)
    size = shape_of(weight)[axes[1]]
    group = Group(size, [Slice(name, axes[1], 0, 1, "writer")])
    if added is not None:
        group.slices.append(Slice(added, 0, 0, 1, "writer"))
    walk.created.append(group)
    return Along(dim, ((group, size),))


def _batch_norm(walk: Walk, node: fx.Node, x: fx.Node, *rest: Any, **_: Any) -> Any:
    along = walk.values[x]
    names = [walk.name_if_used_once(item) for item in rest[:4] if item is not None]
    if along.dim != 1 or None in names:
        return walk.block(node)
    walk.add_slices(along, [(str(name), 0) for name in names], "passer")
    return along


def _group_norm(
    walk: Walk,
    node: fx.Node,
    x: fx.Node,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
) -> Any:
    along = walk.values[x]
    names = [walk.name_if_used_once(item) for item in (weight, bias) if item is not None]
    if along.dim != 1 or None in names or walk.coarsen_to_blocks(along, groups) is None:
        return walk.block(node)
    walk.add_slices(along, [(str(name), 0) for name in names], "passer")
    return along


def _elementwise(walk: Walk, node: fx.Node, *_: Any, **__: Any) -> Any:
    return _broadcast(walk, node, node.all_input_nodes, shape_of(node))


def _prelu(walk: Walk, node: fx.Node, x: fx.Node, weight: fx.Node) -> Any:
    along, name = walk.values[x], walk.name_if_used_once(weight)
    if math.prod(shape_of(weight)) > 1:
        if along.dim != 1 or name is None:
            return walk.block(node)
        walk.add_slices(along, [(name, 0)], "passer")
    return along


def _broadcast(
    walk: Walk, node: fx.Node, sources: Sequence[fx.Node], shape: tuple[int, ...]
) -> Any:
    """Merge the units of values that are broadcast to `shape` and combined element by element.

    A value without units must be a parameter with an element per unit, or not vary along the units.
    """
    with_units, without_units = [], []
    for source in sources:
        along, new_dims = walk.values[source], len(shape) - len(shape_of(source))
        if along is not None:
            with_units.append(Along(along.dim + new_dims, along.parts))
        else:
            without_units.append((source, new_dims))
    dim = with_units[0].dim
    if any(along.dim != dim for along in with_units):
        return walk.block(node)
    for source, new_dims in without_units:
        if dim < new_dims or shape_of(source)[dim - new_dims] == 1:
            continue
        name = walk.name_if_used_once(source)
        if name is None or shape_of(source)[dim - new_dims] != shape[dim]:
            return walk.block(node)
        walk.add_slices(with_units[0], [(name, dim - new_dims)], "passer")
    return walk.merge(node, with_units)


def _attention(
    walk: Walk,
    node: fx.Node,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Merge the heads of queries, keys and values (..., heads, tokens, width)."""
    alongs = [walk.values[item] for item in (q, k, v)]
    dims = {along.dim if along is not None else -1 for along in alongs}
    heads = len(shape_of(q)) - 3
    has_mask_per_head = mask is not None and len(shape_of(mask)) > 2 and shape_of(mask)[-3] != 1
    if dims != {heads} or has_mask_per_head or any(len(along.parts) != 1 for along in alongs):
        return walk.block(node)
    return walk.merge(node, alongs, allow_different_sizes=True)


def _inner(walk: Walk, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
    """Pass units on unless a window of the operator, such as that of `max_pool2d`, covers them."""
    along = walk.values[x]
    window_dims = next(int(letter) for letter in operator_name(node) if letter.isdigit())
    return along if along.dim < len(shape_of(x)) - window_dims else walk.block(node)


def _pad(walk: Walk, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any, **__: Any) -> Any:
    along = walk.values[x]
    return along if along.dim < len(shape_of(x)) - len(sizes) // 2 else walk.block(node)


def _other_dim(walk: Walk, node: fx.Node, x: fx.Node, dim: int = 0, *_: Any, **__: Any) -> Any:
    """Pass units on if the operator changes another dimension."""
    along = walk.values[x]
    return walk.block(node) if dim % len(shape_of(x)) == along.dim else along


def _layer_norm(walk: Walk, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any) -> Any:
    along = walk.values[x]
    return along if along.dim < len(shape_of(x)) - len(sizes) else walk.block(node)


def _mean(
    walk: Walk, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False, **_: Any
) -> Any:
    """Pass units on unless they are reduced; without `dims`, all dimensions are."""
    along, rank = walk.values[x], len(shape_of(x))
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    if along.dim in reduced:
        return walk.block(node)
    removed_before = 0 if keepdim else len([dim for dim in reduced if dim < along.dim])
    return Along(along.dim - removed_before, along.parts)


def _permute(walk: Walk, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Any:
    along = walk.values[x]
    return Along([d % len(order) for d in order].index(along.dim), along.parts)


def _transpose(walk: Walk, node: fx.Node, x: fx.Node, a: int = 0, b: int = 1) -> Any:
    rank = len(shape_of(x))
    swapped = {a % rank: b % rank, b % rank: a % rank}
    along = walk.values[x]
    return Along(swapped.get(along.dim, along.dim), along.parts)


def _cat(walk: Walk, node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> Any:
    """Join units that are concatenated, or merge units if another dimension is concatenated."""
    parts = [part for part in parts if math.prod(shape_of(part))]
    dim = dim % len(shape_of(node))
    alongs = [walk.values[part] for part in parts]
    if all(along is None or along.dim == dim for along in alongs):
        joined: list[tuple[Group, int]] = []
        for along, part in zip(alongs, parts, strict=True):
            if along is None:
                extent = shape_of(part)[dim]
                joined.append((Group(1, blocked_by="they are not outputs of a layer"), extent))
            else:
                joined += along.parts
        return Along(dim, tuple(joined))
    if None in alongs or len({along.dim for along in alongs}) > 1:
        return walk.block(node)
    return walk.merge(node, alongs)


def _split(walk: Walk, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Divide the units of a fused matrix, such as queries, keys and values, into a group each."""
    along = walk.values[x]
    if dim % len(shape_of(x)) != along.dim:
        return [along] * (max(int(user.args[1]) for user in node.users) + 1)  # type: ignore[arg-type]
    total = shape_of(x)[along.dim]
    (group, extent), *more = along.parts
    group = walk.find(group)
    widths = [sizes] * (total // sizes) if isinstance(sizes, int) else list(sizes)
    is_single = not more and group.size == extent and {s.width for s in group.slices} == {1}
    is_written_only = not group.blocked_by and not group.layers("reader") and _is_alone(walk, x)
    if not is_single or not is_written_only or sum(widths) != total:
        return walk.block(node)
    pieces, start = [], 0
    for size in widths:
        slices = [Slice(s.tensor, s.axis, s.start + start, 1, s.role) for s in group.slices]
        walk.created.append(Group(size, slices))
        pieces.append(Along(along.dim, ((walk.created[-1], size),)))
        start += size
    group.slices = []
    return pieces


def _chunk(walk: Walk, node: fx.Node, x: fx.Node, count: int, dim: int = 0) -> Any:
    return _split(walk, node, x, -(-shape_of(x)[dim] // count), dim)


def _view(walk: Walk, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
    """Return the dimension of the result that starts at the same element as the units' dimension.

    The dimension may have been flattened with the dimensions after it, or split, for example into
    (heads, width). For a split, the leading factor is returned.
    """
    along = walk.values[x]
    before = shape_of(x)
    after = shape_of(node)
    size, lead = before[along.dim], math.prod(before[: along.dim])
    for dim, extent in enumerate(after):
        if math.prod(after[:dim]) == lead and (extent != 1 or size == 1):
            break
    else:
        return walk.block(node)
    inside = [math.prod(before[along.dim : end]) for end in range(along.dim + 1, len(before) + 1)]
    outside = [math.prod(after[dim:end]) for end in range(dim + 1, len(after) + 1)]
    if extent in inside:  # unchanged, or flattened with the dimensions after it
        times = extent // size
        return Along(dim, tuple((group, n * times) for group, n in along.parts))
    if size not in outside or len(along.parts) > 1:
        return walk.block(node)
    group = walk.find(along.parts[0][0])  # split, for example into heads
    group.coarsen(math.gcd(group.size, extent))
    return Along(dim, ((group, extent),))


def _is_alone(walk: Walk, node: fx.Node) -> bool:
    """Return True if each value with these units, from the products on, has a single consumer."""
    if len(node.users) > 1:
        return False
    if any(product.node is node for product in walk.products.values()):
        return True
    sources = [n for n in node.all_input_nodes if walk.values[n] is not None]
    return all(_is_alone(walk, source) for source in sources)


_WINDOWS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d max_pool2d_with_indices "
    "upsample_nearest2d upsample_bilinear2d"
)
_ELEMENTWISE_TOO = (
    "expand rsqrt erf log_sigmoid add sub mul div maximum minimum where clone contiguous dropout "
    "feature_dropout _to_copy to alias detach masked_fill"
)
#: The rule of each operator.
RULES: dict[str, Callable[..., Any]] = {
    operator: rule
    for rule, operators in (
        (_linear, "linear"),
        (_addmm, "addmm"),
        (_matmul, "matmul mm bmm"),
        (_conv, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
        (_batch_norm, "batch_norm _native_batch_norm_legit_no_training"),
        (_group_norm, "group_norm"),
        (_layer_norm, "layer_norm rms_norm"),
        (_prelu, "prelu"),
        (_attention, "scaled_dot_product_attention"),
        (_inner, _WINDOWS),
        (_pad, "pad constant_pad_nd"),
        (_other_dim, "softmax _softmax slice"),
        (_mean, "mean sum amax amin"),
        (_permute, "permute"),
        (_transpose, "transpose t"),
        (_cat, "cat"),
        (_split, "split split_with_sizes"),
        (_chunk, "chunk"),
        (_view, "view reshape flatten unflatten _unsafe_view squeeze unsqueeze"),
        (_elementwise, " ".join(sorted(ELEMENTWISE)) + " " + _ELEMENTWISE_TOO),
    )
    for operator in operators.split()
}

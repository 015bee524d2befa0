"""Rules by which operators create units, read them, and pass them on (Note [Dependency groups]).

A rule is called with the walk, the node and the node's arguments. It returns the units in the
result, or None if no units are followed past the node. Products create new units and read the
units that they sum over. Other operators pass units on unless they mix or reduce them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tinyml.exported import ELEMENTWISE, get_operator, get_shape
from tinyml.pruning.groups import Group, Product, Slice, Units
from tinyml.pruning.units import Walk


def _follow_addmm(walk: Walk, node: fx.Node, bias: Any, x: fx.Node, weight: Any, **_: Any) -> Any:
    return _follow_product(walk, node, x, weight, bias, (0, 1), -1)


def _follow_matmul(walk: Walk, node: fx.Node, a: fx.Node, b: fx.Node) -> Any:
    if walk.find_name_if_used_once(b) is not None and len(get_shape(b)) == 2:
        return _follow_product(walk, node, a, b, None, (0, 1), -1)
    first, second = walk.values[a], walk.values[b]
    if first is None or second is None or first.dim != second.dim:
        return walk.block(node)
    if len(get_shape(a)) != len(get_shape(b)) or first.dim >= len(get_shape(a)) - 2:
        return walk.block(node)
    return walk.merge(node, [first, second])


def _follow_conv(
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
    if len(get_shape(x)) != len(get_shape(weight)):  # the input has no batch dimension
        return walk.block(node)
    # In a transposed convolution, `dilation` receives the output padding and `rest` the groups.
    transposed = "transpose" in get_operator(node)
    groups = rest[0] if rest else 1
    if groups == 1:
        axes = (0, 1) if transposed else (1, 0)
        return _follow_product(walk, node, x, weight, bias, axes, 1)
    units = walk.values[x]
    names = [walk.find_name_if_used_once(item) for item in (weight, bias) if item is not None]
    if None in names:
        return walk.block_product(node, weight, bias)
    if units is None or units.dim != 1:
        return walk.block(node)
    outputs = get_shape(node)[1]
    if groups == get_shape(x)[1] and not transposed:
        expansion = outputs // groups  # the filters per channel of a depthwise convolution
        walk.add_slices(units, [(str(name), 0) for name in names], "passer", expansion)
        return Units(1, tuple((group, extent * expansion) for group, extent in units.parts))
    # A unit is one or several groups of the convolution, with their inputs and outputs.
    group = walk.coarsen_to_blocks(units, groups)
    if group is None:
        return walk.block(node)
    for name, elements in zip(names, (get_shape(weight)[0], outputs), strict=False):
        group.slices.append(Slice(str(name), 0, 0, elements // group.size, "passer"))
    return Units(1, ((group, outputs),))


def _follow_product(
    walk: Walk,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None = None,
    axes: tuple[int, int] = (1, 0),
    dim: int = -1,
) -> Any:
    """Read the units of `x` along `dim`, and create a group for the outputs.

    `axes` are the axis of the weight that contains its inputs and the axis that contains its
    outputs; the defaults are those of a linear layer. Return the units of the outputs.
    """
    dim = dim % len(get_shape(x))
    units = walk.values[x]
    name = walk.find_name_if_used_once(weight)
    bias_name = None if bias is None else walk.find_name_if_used_once(bias)
    if name is None or (bias is not None and bias_name is None):
        return walk.block_product(node, weight, bias)
    if units is not None and units.dim == dim and name not in walk.weights_of_fixed_width:
        walk.add_slices(units, [(name, axes[0])], "reader")
    else:
        walk.block(node)
    walk.products[name] = Product(node, x, dim)
    size = get_shape(weight)[axes[1]]
    group = Group(size, [Slice(name, axes[1], 0, 1, "writer")])
    if bias_name is not None:
        group.slices.append(Slice(bias_name, 0, 0, 1, "writer"))
    walk.created.append(group)
    return Units(dim, ((group, size),))


def _follow_batch_norm(walk: Walk, node: fx.Node, x: fx.Node, *rest: Any, **_: Any) -> Any:
    units = walk.values[x]
    names = [walk.find_name_if_used_once(item) for item in rest[:4] if item is not None]
    if units.dim != 1 or None in names:
        return walk.block(node)
    walk.add_slices(units, [(str(name), 0) for name in names], "passer")
    return units


def _follow_group_norm(walk: Walk, node: fx.Node, x: fx.Node, groups: int, *rest: Any) -> Any:
    units = walk.values[x]
    if units.dim != 1 or walk.coarsen_to_blocks(units, groups) is None:
        return walk.block(node)
    return _follow_batch_norm(walk, node, x, *rest[:2])


def _follow_prelu(walk: Walk, node: fx.Node, x: fx.Node, weight: fx.Node) -> Any:
    has_one_weight = math.prod(get_shape(weight)) == 1
    return walk.values[x] if has_one_weight else _follow_batch_norm(walk, node, x, weight)


def _follow_elementwise(walk: Walk, node: fx.Node, *_: Any, **__: Any) -> Any:
    """Merge the units of values that are broadcast to one shape and combined element by element.

    A value without units must be a parameter with an element per unit, or constant along the units.
    """
    shape = get_shape(node)
    with_units = []
    without_units = []
    for source in node.all_input_nodes:
        units = walk.values[source]
        new_dims = len(shape) - len(get_shape(source))
        if units is not None:
            with_units.append(Units(units.dim + new_dims, units.parts))
        else:
            without_units.append((source, new_dims))
    dim = with_units[0].dim
    if any(units.dim != dim for units in with_units):
        return walk.block(node)
    for source, new_dims in without_units:
        if dim < new_dims or get_shape(source)[dim - new_dims] == 1:
            continue
        name = walk.find_name_if_used_once(source)
        if name is None or get_shape(source)[dim - new_dims] != shape[dim]:
            return walk.block(node)
        walk.add_slices(with_units[0], [(name, dim - new_dims)], "passer")
    return walk.merge(node, with_units)


def _follow_attention(
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
    operands = [walk.values[item] for item in (q, k, v)]
    dims = {units.dim if units is not None else -1 for units in operands}
    dim_of_heads = len(get_shape(q)) - 3
    has_mask_per_head = mask is not None and len(get_shape(mask)) > 2 and get_shape(mask)[-3] != 1
    has_several_parts = any(units is not None and len(units.parts) != 1 for units in operands)
    if dims != {dim_of_heads} or has_mask_per_head or has_several_parts:
        return walk.block(node)
    return walk.merge(node, operands, allow_different_sizes=True)


def _follow_window(walk: Walk, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
    """Pass units on unless the operator pools or resizes their dimension."""
    units = walk.values[x]
    window_dims = next(int(letter) for letter in get_operator(node) if letter.isdigit())
    return units if units.dim < len(get_shape(x)) - window_dims else walk.block(node)


def _follow_pad(
    walk: Walk, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any, **__: Any
) -> Any:
    units = walk.values[x]
    return units if units.dim < len(get_shape(x)) - len(sizes) // 2 else walk.block(node)


def _follow_other_dim(
    walk: Walk, node: fx.Node, x: fx.Node, dim: int = 0, *_: Any, **__: Any
) -> Any:
    """Pass units on unless they are along `dim`, the dimension that the operator changes."""
    units = walk.values[x]
    return walk.block(node) if dim % len(get_shape(x)) == units.dim else units


def _follow_layer_norm(walk: Walk, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any) -> Any:
    units = walk.values[x]
    return units if units.dim < len(get_shape(x)) - len(sizes) else walk.block(node)


def _follow_mean(
    walk: Walk, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False, **_: Any
) -> Any:
    """Pass units on unless their dimension is reduced; all are reduced if `dims` is None."""
    units = walk.values[x]
    rank = len(get_shape(x))
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    if units.dim in reduced:
        return walk.block(node)
    removed_before = 0 if keepdim else len([dim for dim in reduced if dim < units.dim])
    return Units(units.dim - removed_before, units.parts)


def _follow_permute(walk: Walk, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Any:
    units = walk.values[x]
    return Units([d % len(order) for d in order].index(units.dim), units.parts)


def _follow_transpose(walk: Walk, node: fx.Node, x: fx.Node, a: int = 0, b: int = 1) -> Any:
    rank = len(get_shape(x))
    swapped = {a % rank: b % rank, b % rank: a % rank}
    units = walk.values[x]
    return Units(swapped.get(units.dim, units.dim), units.parts)


def _follow_cat(walk: Walk, node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> Any:
    """Join units that are concatenated, or merge units if another dimension is concatenated."""
    parts = [part for part in parts if math.prod(get_shape(part))]  # an empty cache has no elements
    dim = dim % len(get_shape(node))
    operands = [walk.values[part] for part in parts]
    if all(units is None or units.dim == dim for units in operands):
        joined: list[tuple[Group, int]] = []
        for units, part in zip(operands, parts, strict=True):
            if units is None:
                extent = get_shape(part)[dim]
                joined.append((Group(1, blocked_by="they are not outputs of a layer"), extent))
            else:
                joined += units.parts
        return Units(dim, tuple(joined))
    if None in operands or len({units.dim for units in operands}) > 1:
        return walk.block(node)
    return walk.merge(node, operands)


def _follow_split(walk: Walk, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Divide the units of a fused matrix, such as queries, keys and values, into groups.

    Return the units of each piece. A split of another dimension passes the units on to all pieces.
    """
    units = walk.values[x]
    if dim % len(get_shape(x)) != units.dim:
        return [units] * (max(int(user.args[1]) for user in node.users) + 1)  # type: ignore[arg-type]
    total = get_shape(x)[units.dim]
    (group, extent), *more = units.parts
    group = walk.find(group)
    widths = [sizes] * (total // sizes) if isinstance(sizes, int) else list(sizes)
    is_single = not more and group.size == extent and {s.width for s in group.slices} == {1}
    is_written_only = (
        not group.blocked_by and not group.list_layers("reader") and _has_single_consumers(walk, x)
    )
    if not is_single or not is_written_only or sum(widths) != total:
        return walk.block(node)
    pieces = []
    start = 0
    for size in widths:
        slices = [Slice(s.tensor, s.axis, s.start + start, 1, s.role) for s in group.slices]
        walk.created.append(Group(size, slices))
        pieces.append(Units(units.dim, ((walk.created[-1], size),)))
        start += size
    group.slices = []
    return pieces


def _follow_chunk(walk: Walk, node: fx.Node, x: fx.Node, num_chunks: int, dim: int = 0) -> Any:
    return _follow_split(walk, node, x, -(-get_shape(x)[dim] // num_chunks), dim)


def _follow_glu(walk: Walk, node: fx.Node, x: fx.Node, dim: int = -1) -> Any:
    """Merge the units of the two halves, which are multiplied element by element."""
    if dim % len(get_shape(x)) != walk.values[x].dim:
        return walk.values[x]
    halves = _follow_chunk(walk, node, x, 2, dim)
    return halves if halves is None else walk.merge(node, halves)


def _follow_view(walk: Walk, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
    """Pass units on to the dimension of the result that starts at the same element.

    The dimension of the units may be flattened with the dimensions after it, or split, for example
    into (heads, width). For a split, the units are in the first of these dimensions.
    """
    units = walk.values[x]
    before = get_shape(x)
    after = get_shape(node)
    size = before[units.dim]
    elements_before = math.prod(before[: units.dim])
    for dim, extent in enumerate(after):
        if math.prod(after[:dim]) == elements_before and (extent != 1 or size == 1):
            break
    else:
        return walk.block(node)
    flattened = [math.prod(before[units.dim : end + 1]) for end in range(units.dim, len(before))]
    split = [math.prod(after[dim : end + 1]) for end in range(dim, len(after))]
    if extent in flattened:  # unchanged, or flattened with the dimensions after it
        expansion = extent // size
        return Units(dim, tuple((group, n * expansion) for group, n in units.parts))
    if size not in split or len(units.parts) > 1:
        return walk.block(node)
    group = walk.find(units.parts[0][0])  # split, for example into heads
    group.coarsen(math.gcd(group.size, extent))
    return Units(dim, ((group, extent),))


def _has_single_consumers(walk: Walk, node: fx.Node) -> bool:
    """Return True if `node` and all values before it with its units have a single consumer each."""
    if len(node.users) > 1:
        return False
    if any(product.node is node for product in walk.products.values()):
        return True
    sources = [n for n in node.all_input_nodes if walk.values[n] is not None]
    return all(_has_single_consumers(walk, source) for source in sources)


_WINDOWS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d max_pool2d_with_indices "
    "upsample_nearest2d upsample_bilinear2d"
)
_OTHER_ELEMENTWISE = (
    "expand rsqrt erf log_sigmoid add sub mul div maximum minimum where clone contiguous dropout "
    "feature_dropout _to_copy to alias detach masked_fill"
)
#: The rule of each operator.
RULES: dict[str, Callable[..., Any]] = {
    operator: rule
    for rule, operators in (
        (_follow_product, "linear"),
        (_follow_addmm, "addmm"),
        (_follow_matmul, "matmul mm bmm"),
        (_follow_conv, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
        (_follow_batch_norm, "batch_norm _native_batch_norm_legit_no_training"),
        (_follow_group_norm, "group_norm"),
        (_follow_layer_norm, "layer_norm rms_norm"),
        (_follow_prelu, "prelu"),
        (_follow_attention, "scaled_dot_product_attention"),
        (_follow_window, _WINDOWS),
        (_follow_pad, "pad constant_pad_nd"),
        (_follow_other_dim, "softmax _softmax slice"),
        (_follow_mean, "mean sum amax amin"),
        (_follow_permute, "permute"),
        (_follow_transpose, "transpose t"),
        (_follow_cat, "cat"),
        (_follow_split, "split split_with_sizes"),
        (_follow_chunk, "chunk"),
        (_follow_glu, "glu"),
        (_follow_view, "view reshape flatten unflatten _unsafe_view squeeze unsqueeze"),
        (_follow_elementwise, " ".join(sorted(ELEMENTWISE)) + " " + _OTHER_ELEMENTWISE),
    )
    for operator in operators.split()
}

"""Rules of products: they create new units and read the units that they sum over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tinyml.exported import operator_name, shape_of
from tinyml.pruning.groups import Along, Group, Product, Slice
from tinyml.pruning.unit_groups import UnitGroups


def _linear(walk: UnitGroups, node: fx.Node, x: fx.Node, weight: Any, bias: Any = None) -> Any:
    return _product(walk, node, x, weight, bias, (1, 0), -1)


def _addmm(walk: UnitGroups, node: fx.Node, bias: Any, x: fx.Node, weight: Any, **_: Any) -> Any:
    return _product(walk, node, x, weight, bias, (0, 1), -1)


def _matmul(walk: UnitGroups, node: fx.Node, a: fx.Node, b: fx.Node) -> Any:
    if walk.name_of(b) is not None and len(shape_of(b)) == 2:
        return _product(walk, node, a, b, None, (0, 1), -1)
    first, second = walk.values[a], walk.values[b]
    if first is None or second is None or first.dim != second.dim:
        return walk.stop(node)
    if len(shape_of(a)) != len(shape_of(b)) or first.dim >= len(shape_of(a)) - 2:
        return walk.stop(node)
    return walk.merge(node, [first, second])


def _conv(
    walk: UnitGroups,
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
        return walk.stop(node)
    # In a transposed convolution, `dilation` receives the output padding and `rest` the groups.
    transposed = "transpose" in operator_name(node)
    groups = rest[0] if rest else 1
    if groups == 1:
        axes = (0, 1) if transposed else (1, 0)
        return _product(walk, node, x, weight, bias, axes, 1)
    along = walk.values[x]
    names = [walk.name_of(item) for item in (weight, bias) if item is not None]
    if along is None or along.dim != 1 or None in names:
        return walk.stop(node)
    outputs = shape_of(node)[1]
    if groups == shape_of(x)[1] and not transposed:
        times = outputs // groups  # a depthwise convolution: `times` filters per channel
        walk.add_slices(along, [(str(name), 0) for name in names], "passer", times)
        return Along(1, tuple((group, extent * times) for group, extent in along.parts))
    # A unit is one or several groups of the convolution, with their inputs and outputs.
    if (unit := walk.coarsened(along, groups)) is None:
        return walk.stop(node)
    for name, elements in zip(names, (shape_of(weight)[0], outputs), strict=False):
        unit.slices.append(Slice(str(name), 0, 0, elements // unit.size, "passer"))
    return Along(1, ((unit, outputs),))


def _product(
    walk: UnitGroups,
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
    name = walk.name_of(weight)
    added = None if bias is None else walk.name_of(bias)
    if name is None or (bias is not None and added is None):
        return walk.stop(node)
    if along is not None and along.dim == dim:
        walk.add_slices(along, [(name, axes[0])], "reader")
    else:
        walk.stop(node)
    walk.products[name] = Product(node, x, dim)
    size = shape_of(weight)[axes[1]]
    group = Group(size, [Slice(name, axes[1], 0, 1, "writer")])
    if added is not None:
        group.slices.append(Slice(added, 0, 0, 1, "writer"))
    walk.created.append(group)
    return Along(dim, ((group, size),))


#: Operators that may create units even if no input contains units.
PRODUCT_OPERATORS = {
    "linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
#: For each operator name, the rule by which it reads and creates units.
PRODUCT_RULES: dict[str, Callable[..., Any]] = {
    operator: rule
    for rule, operators in (
        (_linear, "linear"),
        (_addmm, "addmm"),
        (_matmul, "matmul mm bmm"),
        (_conv, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    )
    for operator in operators.split()
}

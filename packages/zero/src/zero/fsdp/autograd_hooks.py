"""Backward hooks, and casts, for any values that a module accepts and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

#: Types of values that certainly have no tensors.
TYPES_WITHOUT_TENSORS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def call_after_gradients(
    values: Any, hook: Callable[[], None], *, before_double_backward: Callable[[], None]
) -> Any:
    """Return `values` with views of their tensors whose gradients are hooked.

    `hook()` is called when backward has computed all these gradients, and
    `before_double_backward()` before a backward through them.
    """
    tensors: dict[int, Tensor] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            tensors[id(leaf)] = leaf
    if not tensors:
        return values
    # A single graph node for all tensors runs when the last gradient has been computed. A repeated
    # tensor stays the same object; the fast path of attention depends on this.
    outputs = _GradientHook.apply(hook, before_double_backward, *tensors.values())
    hooked = dict(zip(tensors, outputs, strict=True))
    return tree_map_only(Tensor, lambda tensor: hooked.get(id(tensor), tensor), values)


def call_before_gradients(values: Any, hook: Callable[[], None], inputs: Any = ()) -> Any:
    """Return `values`, and call `hook()` before backward passes through any of their tensors.

    `inputs` are the values from which a module computed `values`.
    """
    for tensor in find_tensors(values):
        if not tensor.requires_grad:
            continue
        tensor.register_hook(lambda _: hook())
        # An in-place change of a view replaces its graph node by a node of its base, which does not
        # have the hook.
        base = tensor._base
        # If an input is a view of `base`, the module did not compute `base`.
        is_input = any(isinstance(x, Tensor) and x._base is base for x in tree_leaves(inputs))
        if base is not None and base.grad_fn is not None and not is_input:
            base.grad_fn.register_prehook(lambda _: hook())
    return values


def hides_tensors(values: Any) -> bool:
    """Return True if `values` has no visible tensor, but has an object that may contain tensors."""
    is_opaque = any(not isinstance(leaf, TYPES_WITHOUT_TENSORS) for leaf in tree_leaves(values))
    return is_opaque and not find_tensors(values)


def find_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in the containers that torch's pytrees support, and in dataclasses."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += find_tensors([getattr(leaf, field.name) for field in fields(leaf)])
    return tensors


def cast(dtype: torch.dtype, values: Any) -> Any:
    """Return `values` with the floating-point tensors of torch's pytree containers in `dtype`."""

    def cast_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast_tensor, values)


class _GradientHook(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hook: Any, before_double_backward: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.hook = hook
        ctx.before_double_backward = before_double_backward
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.hook()
        if torch.is_grad_enabled():
            # During backward, gradients are enabled only with create_graph=True.
            gradients = call_before_gradients(gradients, ctx.before_double_backward)
        return None, None, *gradients

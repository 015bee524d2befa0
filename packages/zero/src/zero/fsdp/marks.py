"""Calls at moments of backward, and casts, for whatever a module takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def after_gradient(values: Any, call: Callable[[], None], again: Callable[[], None]) -> Any:
    """Return `values`; `call()` once backward has the gradients of all their tensors.

    `again()` before a backward of that backward goes through one of these gradients.

    One node of the graph for all of them, so that it runs when the last is done; and a tensor that
    is given twice stays the same object, which attention asks for.
    """
    given: dict[int, Tensor] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            given[id(leaf)] = leaf
    if not given:
        return values
    marked = dict(zip(given, _Mark.apply(call, again, *given.values()), strict=True))
    return tree_map_only(Tensor, lambda tensor: marked.get(id(tensor), tensor), values)


def before_gradient(values: Any, call: Callable[[], None], given: Any = ()) -> Any:
    """Return `values`; `call()` before backward goes through one of their tensors.

    `given`: what they were made of.
    """

    def attach(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: call())
            base = tensor._base
            # Who changes a view in place gives it another history, of its base, without that hook.
            if base is not None and base.grad_fn is not None and not _bases(given, base):
                base.grad_fn.register_prehook(lambda _: call())
        return tensor

    return tree_map_only(Tensor, attach, values)


def cast(dtype: torch.dtype, values: Any) -> Any:
    """Return `values` with their floating-point tensors in `dtype`."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, to, values)


def _bases(given: Any, base: Tensor) -> bool:
    """Whether one of the tensors given is a view of `base`, which then is not the module's."""
    return any(isinstance(leaf, Tensor) and leaf._base is base for leaf in tree_leaves(given))


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, again: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.again = call, again
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call()
        if torch.is_grad_enabled():
            # create_graph=True
            gradients = before_gradient(gradients, ctx.again)
        return None, None, *gradients

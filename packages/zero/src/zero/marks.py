"""Calls at moments of backward, and casts, for whatever a module takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def after_gradient(values: Any, call: Callable[[], None]) -> Any:
    """Return `values`; `call()` once backward has the gradient of one of their tensors."""

    def mark(tensor: Tensor) -> Tensor:
        return _Mark.apply(tensor, call) if tensor.requires_grad else tensor

    return tree_map_only(Tensor, mark, values)


def before_gradient(values: Any, call: Callable[[], None]) -> Any:
    """Return `values`; `call()` before backward goes through one of their tensors."""

    def attach(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: call())
        return tensor

    return tree_map_only(Tensor, attach, values)


def cast(dtype: torch.dtype, values: Any) -> Any:
    """Return `values` with their floating-point tensors in `dtype`."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, to, values)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None

"""Calls at moments of backward, and casts, for whatever a module takes and returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
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

    def attach(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: call())
            base = tensor._base
            # Who changes a view in place gives it another history, of its base, without that hook.
            if base is not None and base.grad_fn is not None and not _bases(given, base):
                base.grad_fn.register_prehook(lambda _: call())

    for tensor in tensors_in(values):
        attach(tensor)
    return values


def tensors_in(values: Any) -> list[Tensor]:
    """Every tensor in `values`: in containers, and in the attributes of objects of any class."""
    return _walk(values)[0]


def hides_tensors(values: Any) -> bool:
    """Whether there is no tensor in `values`, but what one cannot look into."""
    tensors, opaque = _walk(values)
    return opaque and not tensors


def _walk(values: Any) -> tuple[list[Tensor], bool]:
    opaque = False
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif id(value) in seen or isinstance(value, PLAIN):
            continue
        else:
            # Kept, so that no other object gets its number meanwhile.
            seen[id(value)] = value
            inner = _within(value)
            opaque = opaque or not (inner or isinstance(value, CONTAINERS))
            waiting += inner
    return list(found.values()), opaque


CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
# What holds no tensors of an output.
PLAIN = (str, bytes, int, float, complex, type(None), type, nn.Module, torch.dtype, torch.device,
         FunctionType, MethodType, BuiltinFunctionType, ModuleType)  # fmt: skip


def _within(value: Any) -> list[Any]:
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, CONTAINERS):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        inner += [getattr(value, name) for name in names if hasattr(value, name)]
    return inner


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

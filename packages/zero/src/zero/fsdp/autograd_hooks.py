"""Backward hooks, casts and copies for any values that a module accepts and returns."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

#: Types of values that certainly have no tensors.
TYPES_WITHOUT_TENSORS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
#: Types of containers that a module may change, so that its caller must see the changes.
MUTABLE = (list, deque, dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class MutableArgument:
    """A mutable argument, the copy in which its tensors are replaced, and the entries of both.

    The copy is the argument itself if no tensor is replaced.
    """

    original: Any
    copied: Any
    original_entries: dict[Any, Any]
    copied_entries: dict[Any, Any]

    def write_back(self) -> list[Any]:
        """Apply a module's changes of the copy to the original, and return the added values."""
        entries = _list_entries(self.copied)
        if _are_same(entries, self.copied_entries):
            return []
        originals = {id(v): self.original_entries[key] for key, v in self.copied_entries.items()}
        _set_entries(self.original, {key: originals.get(id(v), v) for key, v in entries.items()})
        return [value for value in entries.values() if id(value) not in originals]


def replace_tensors(
    function: Callable[[Tensor], Tensor], value: Any, mutable: list[MutableArgument]
) -> Any:
    """Return `value` with `function(tensor)` for each tensor in pytrees and dataclasses.

    The mutable containers are appended to the list `mutable`, each after the containers within it.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, TYPES_WITHOUT_TENSORS):
        return value
    if type(value) not in MUTABLE:
        # Flatten one level. torch leaves `is_leaf` in a reference cycle, so it must not refer to
        # `value`, whose memory would only be freed by the garbage collector.
        are_leaves = chain([False], repeat(True))
        children, spec = tree_flatten(value, is_leaf=lambda _: next(are_leaves))
        if not spec.is_leaf():
            changed = [replace_tensors(function, child, mutable) for child in children]
            # A module may change an object of a class that a program has registered.
            is_same = all(a is b for a, b in zip(children, changed, strict=True))
            return value if is_same else tree_unflatten(changed, spec)
        if not _is_dataclass_object(value):
            return value
    entries = _list_entries(value)
    replaced = {key: replace_tensors(function, v, mutable) for key, v in entries.items()}
    copied = value
    if not _are_same(entries, replaced):
        copied = copy.copy(value)
        _set_entries(copied, replaced)
    mutable.append(MutableArgument(value, copied, entries, replaced))
    return copied


def _is_dataclass_object(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type | nn.Module)


def _list_entries(container: Any) -> dict[Any, Any]:
    """Return the entries of a list, a deque, a dictionary or a dataclass by index, key or name."""
    if isinstance(container, list | deque):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    names = [field.name for field in fields(container) if hasattr(container, field.name)]
    return {name: getattr(container, name) for name in names}


def _set_entries(container: Any, entries: dict[Any, Any]) -> None:
    if isinstance(container, list | deque):
        container.clear()
        container.extend(entries.values())
    elif isinstance(container, dict):
        container.clear()
        container.update(entries)
    else:
        for name, value in entries.items():
            # The dataclass may be frozen.
            object.__setattr__(container, name, value)


def _are_same(entries: dict[Any, Any], others: dict[Any, Any]) -> bool:
    """Return True if both have the same objects under the same keys."""
    return entries.keys() == others.keys() and all(entries[key] is others[key] for key in entries)


def call_after_gradients(
    values: Any, mutable: list[MutableArgument], hook: Callable[[], None]
) -> Any:
    """Return `values` with views of their tensors whose gradients are hooked.

    `hook()` is called when the backward pass has computed all these gradients. The mutable
    containers are appended to `mutable`: see `replace_tensors`.
    """
    tensors = {id(tensor): tensor for tensor in find_tensors(values) if tensor.requires_grad}
    hooked: dict[int, Tensor] = {}
    if tensors:
        # A single graph node for all tensors runs when the last gradient has been computed. A
        # repeated tensor stays the same object; the fast path of attention depends on this.
        outputs = _GradientHook.apply(hook, *tensors.values())
        hooked = dict(zip(tensors, outputs, strict=True))
    return replace_tensors(lambda tensor: hooked.get(id(tensor), tensor), values, mutable)


def call_before_gradients(values: Any, hook: Callable[[], None], inputs: Any = ()) -> Any:
    """Register `hook()` to run before backward passes through tensors in `values`; return `values`.

    `inputs` are the values from which a module computed `values`.
    """
    for tensor in find_tensors(values):
        if not tensor.requires_grad:
            continue
        tensor.register_hook(lambda _: hook())
        # An in-place change of a view replaces its graph node with a node of its base, which does
        # not have the hook.
        base = tensor._base
        # If an input is a view of `base`, the module did not compute `base`.
        is_input = any(isinstance(x, Tensor) and x._base is base for x in tree_leaves(inputs))
        if base is not None and base.grad_fn is not None and not is_input:
            base.grad_fn.register_prehook(lambda _: hook())
    return values


def has_hidden_tensors(values: Any) -> bool:
    """Return True if `values` has no visible tensor, but has an object that may contain tensors."""
    is_opaque = any(not isinstance(leaf, TYPES_WITHOUT_TENSORS) for leaf in tree_leaves(values))
    return is_opaque and not find_tensors(values)


def find_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in the containers that torch's pytrees support, and in dataclasses."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _is_dataclass_object(leaf):
            tensors += find_tensors(list(_list_entries(leaf).values()))
    return tensors


def cast(dtype: torch.dtype, values: Any, mutable: list[MutableArgument]) -> Any:
    """Return `values` with floating-point tensors cast to `dtype`, by `replace_tensors`."""

    def cast_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return replace_tensors(cast_tensor, values, mutable)


class _GradientHook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.hook()
        return None, *gradients


def clone_alias(full_parameters: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """Return a clone of a tensor in the memory of full parameters, which is freed with its unit.

    A module may return its weight, for example for a penalty. Other tensors are returned unchanged.
    """
    if not torch._C._has_storage(tensor):
        return tensor
    storage = tensor.untyped_storage()._cdata
    is_alias = any(full.untyped_storage()._cdata == storage for full in full_parameters)
    return tensor.clone() if is_alias else tensor


def refuse_transforms() -> None:
    """Raise RuntimeError within torch.func's transforms, except `vmap` without a backward pass."""
    functorch = torch._C._functorch
    # `vmap` may run within another transform, so check every level of the stack.
    for transform in functorch.get_interpreter_stack() or ():
        if transform.key() != functorch.TransformType.Vmap:
            raise RuntimeError(
                "expected no transform of torch.func around a module of FSDP, got "
                f"{transform.key()}: use torch.autograd.grad, or ShardedOptimizer (stages 1 and 2)"
            )

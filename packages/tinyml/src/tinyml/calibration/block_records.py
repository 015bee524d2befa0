"""Recorded outputs of blocks, and the state that a block may change (Note [Replayed blocks])."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

#: The attributes of every module, which contain its parameters, buffers and hooks.
_ATTRIBUTES_OF_MODULE = frozenset(vars(nn.Module()))
#: Objects whose attributes are not part of the state of a block.
_WITHOUT_STATE = (nn.Module, Tensor, type, ModuleType, FunctionType)
#: The largest number of values in a state. A block whose state has more values runs each time.
_MAX_VALUES = 100_000


class BlockRecord:
    """The outputs of a block, whose tensors are stored in the file at `path`."""

    def __init__(self, outputs: Any, path: Path) -> None:
        self.path = path
        #: The outputs with placeholders for tensors, in memory: other objects may not be picklable.
        self.placeholder = tree_map(_Freed.from_value, outputs)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        torch.save(copy_values(tensors), path)  # a view would be saved with its whole storage

    def load(self) -> Any:
        """Return a copy of the outputs, into which the model may write."""
        tensors = iter(torch.load(self.path, weights_only=False))

        def load_leaf(leaf: Any) -> Any:
            return next(tensors) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

        return tree_map(load_leaf, self.placeholder)


class _Freed(Tensor):
    """A placeholder for a tensor whose values were freed; every operation on it raises an error.

    A plain tensor on the meta device is not sufficient: some operations, such as `index_put_` and
    `add_`, silently ignore it.
    """

    @staticmethod
    def from_value(value: Any) -> Any:
        """Return a placeholder for a tensor, and a copy of any other object."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return torch.empty_like(value, device="meta").as_subclass(_Freed)

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, arguments: Sequence[Any] = (), __: Any = None
    ) -> Any:
        raise ValueError(f"the model calls {function} on the output of a block that was freed")


def copy_values(values: Any) -> Any:
    """Return a copy of nested values, because the model may write into them."""

    def copy_leaf(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copy_leaf, values)


def get_block_state(block: nn.Module, arguments: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the values in a block's arguments and in its modules' attributes, and their stamps.

    A stamp changes if the value is replaced, or if it is a tensor that is modified in place. The
    first list keeps the values alive, so that no new object can have the `id` of one of them.
    """
    attributes = [
        value
        for module in block.modules()
        for key, value in vars(module).items()
        if key not in _ATTRIBUTES_OF_MODULE
    ]
    leaves = _list_leaves([arguments, attributes])
    return leaves, [(id(leaf), _get_version(leaf)) for leaf in leaves]


def _list_leaves(root: Any) -> list[Any]:
    """Return the values in nested containers and in attributes of objects, without the containers.

    The list also contains the objects with attributes. If there are more than `_MAX_VALUES` values,
    the last one is a new object, so that two results are never equal.
    """
    leaves: list[Any] = []
    visited: set[int] = set()
    pending = [root]
    while pending and len(visited) < _MAX_VALUES:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            pending += value
        else:
            leaves.append(value)
        if not isinstance(value, _WITHOUT_STATE):
            pending += getattr(value, "__dict__", {}).values()
    if pending:
        leaves.append(object())
    return leaves


def _get_version(value: Any) -> int:
    """Return the number of modifications of a tensor in place, or 0 if they are not counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0

"""Parameter groups as the caller passes them to a ShardedOptimizer, and checks of them."""

from __future__ import annotations

import gc
from collections.abc import Reversible, Sequence, Set
from itertools import zip_longest
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero.fsdp.shard import find_sharded, replaced_parameters

#: The ShardedOptimizer of each parameter that has one.
_owners = WeakTensorKeyDictionary()


def _find_owner(parameter: Tensor) -> object:
    """Return the ShardedOptimizer of a parameter, or None."""
    owner: object = _owners.get(parameter, lambda: None)()
    return owner


def set_owner(parameter: Tensor, optimizer: object) -> None:
    """Record `optimizer` as the ShardedOptimizer of a parameter."""
    _owners[parameter] = ref(optimizer)


def read_params(params: Any) -> tuple[list[Any], list[Any]]:
    """Return the entries of `params`, with `read_group(group)` for each group, and all members.

    Raise TypeError for a tensor or a set, and ValueError if `params` is empty.
    """
    if isinstance(params, Tensor):
        raise TypeError("params is one tensor: pass model.parameters() or parameter groups")
    check_ordered(params)
    entries = [read_group(entry) if isinstance(entry, dict) else entry for entry in params]
    if not entries:
        raise ValueError("empty parameter list: pass model.parameters() or parameter groups")
    members: list[Any] = []
    for entry in entries:
        members += entry["params"] if isinstance(entry, dict) else [entry]
    return entries, members


def read_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group in which `params`, a tensor or an iterable, is a list.

    Raise TypeError if `params` is a set.
    """
    members = group["params"]
    check_ordered(members)
    return {**group, "params": [members] if isinstance(members, Tensor) else list(members)}


def check_ordered(members: Any) -> None:
    """Raise TypeError for a set, because its order differs between ranks."""
    if isinstance(members, Set) and not isinstance(members, Reversible):
        raise TypeError(
            f"expected parameters in an ordered collection, got a {type(members).__name__}, whose "
            "order differs between ranks: pass a list"
        )


def name_members(members: list[Any]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs; a member without a name is called "number <index>"."""
    return [
        entry if isinstance(entry, tuple) else (f"number {index}", entry)
        for index, entry in enumerate(members)
    ]


def check_in_one_group(named: Sequence[tuple[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if a parameter is in one of `groups` or occurs twice in `named`."""
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    for name, parameter in named:
        if parameter in group_of:
            raise ValueError(
                f"parameter {name}, of shape {tuple(parameter.shape)}, is in groups "
                f"{group_of[parameter]} and {len(groups)}: put each parameter in "
                "one group, once"
            )
        group_of[parameter] = len(groups)


def check_without_owner(named: Sequence[tuple[str, Any]], optimizer: object) -> None:
    """Raise ValueError if a parameter is a shard of FSDP or in another ShardedOptimizer.

    Also raise it if a shard of FSDP has replaced the parameter.
    """
    for name, parameter in named:
        sharded = find_sharded(parameter)
        if sharded is not None:
            raise ValueError(
                f"parameter {sharded.name} is a shard of FSDP: pass fsdp.parameters() to "
                "the optimizer itself, not to ShardedOptimizer"
            )
        check_not_replaced(name, parameter)
        if _find_owner(parameter) is not None:
            # An unreferenced optimizer in a reference cycle is not an owner, so collect it.
            gc.collect()
        if _find_owner(parameter) not in (None, optimizer):
            raise ValueError(
                f"parameter {name}, of shape {tuple(parameter.shape)}, belongs to another "
                "ShardedOptimizer, which averages its gradient too: put each parameter in one "
                "optimizer, or delete the other optimizer first"
            )


def check_not_replaced(name: str, parameter: Tensor) -> None:
    """Raise ValueError if a shard of FSDP has replaced the parameter, so that no module uses it."""
    if parameter in replaced_parameters:
        raise ValueError(
            f"parameter {name}, of shape {tuple(parameter.shape)}, was replaced by a shard of "
            "FSDP, so no module uses it: construct the optimizer after FSDP(module) or "
            "fully_shard(module), from its parameters()"
        )


def check_groups_unchanged(
    groups: Sequence[dict[str, Any]], sharded: Sequence[Sequence[nn.Parameter]]
) -> None:
    """Raise RuntimeError unless each group has the parameters that were sharded, in order."""
    for index, (group, parameters) in enumerate(zip_longest(groups, sharded)):
        if group is None or parameters is None or not is_same_list(group["params"], parameters):
            raise RuntimeError(
                f"expected group {index} to keep its parameters, got others in param_groups, "
                "whose shards would be stepped with the options of their earlier group: freeze a "
                "parameter by requires_grad_(False), add one by add_param_group(), and construct "
                "another ShardedOptimizer for any other change"
            )


def is_same_list(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return True if two lists have the same tensors in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))

"""Parameter groups of optimizers of shards, and checks of their parameters and options."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Reversible, Sequence, Set
from itertools import zip_longest
from numbers import Real
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero.fsdp.shard import find_sharded, replaced_parameters
from zero.process_groups import Communicator

#: The ShardedOptimizer of each parameter that has one.
_owners = WeakTensorKeyDictionary()

#: The number of bits of the checksum of an optimizer's options.
CHECKSUM_BITS = 32


def _owner(parameter: Tensor) -> object:
    """Return the ShardedOptimizer of a parameter, or None."""
    owner: object = _owners.get(parameter, lambda: None)()
    return owner


def set_owner(parameter: Tensor, optimizer: object) -> None:
    """Record `optimizer` as the ShardedOptimizer of a parameter."""
    _owners[parameter] = ref(optimizer)


def read_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with its parameters as a list; they may be one tensor or any iterable.

    Raise TypeError if they are a set.
    """
    members = group["params"]
    check_ordered(members)
    return {**group, "params": [members] if isinstance(members, Tensor) else list(members)}


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options without its parameters."""
    return {key: v for key, v in group.items() if key not in ("params", "param_names")}


def number_parameters(
    options: Iterable[dict[str, Any]], groups: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return each group's options with the numbers of its parameters, as in a state dict."""
    numbered = []
    start = 0
    for entry, group in zip(options, groups, strict=True):
        stop = start + len(group["params"])
        numbered.append({**entry, "params": list(range(start, stop))})
        start = stop
    return numbered


def check_ordered(members: Any) -> None:
    """Raise TypeError for a set, because its order differs between ranks."""
    if isinstance(members, Set) and not isinstance(members, Reversible):
        raise TypeError(
            f"expected parameters in an ordered collection, got a {type(members).__name__}, whose "
            "order differs between ranks: pass a list"
        )


def named_members(members: list[Any]) -> list[tuple[str, Tensor]]:
    """Return the members of a group with their names, or their numbers if they have no names."""
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
        if _owner(parameter) is not None:
            # Collect an unreferenced optimizer in a reference cycle, which is not an owner.
            gc.collect()
        if _owner(parameter) not in (None, optimizer):
            raise ValueError(
                f"parameter {name}, of shape {tuple(parameter.shape)}, belongs to another "
                "ShardedOptimizer, which averages its gradient too: put each parameter in one "
                "optimizer, or delete the other one first"
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


class OptionCheck:
    """A comparison of an optimizer's options between ranks, which step different elements.

    A scheduler that runs more often on one rank, or that reads the loss of one rank, sets different
    learning rates for different shards. Each step compares a checksum of the options that the
    program has changed since the last step. The bits of the checksum are exchanged together with
    flags that a step exchanges anyway. Options that the optimizer changes by itself are not
    compared, because they may depend on the shard.
    """

    def __init__(self) -> None:
        #: The names and rounded values of options.
        self._after_step: list[tuple[str, str]] = []
        self._changes: list[tuple[str, str]] = []

    def record_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the options at the end of a step, to which the next step compares them."""
        self._after_step = _option_numbers(optimizer)

    def flags(self, optimizer: torch.optim.Optimizer) -> list[bool]:
        """Return the bits of a checksum of the changes, followed by the inverted bits."""
        numbers = _option_numbers(optimizer)
        self._changes = [option for option in numbers if option not in self._after_step]
        checksum = zlib.crc32(repr(self._changes).encode())
        bits = [bool(checksum >> bit & 1) for bit in range(CHECKSUM_BITS)]
        return [*bits, *(not bit for bit in bits)]

    def check_alike(self, communicator: Communicator, anywhere: Sequence[bool]) -> None:
        """Raise RuntimeError if options differ between ranks.

        anywhere: the element-wise OR of all ranks' `flags()`.
        """
        ones = anywhere[:CHECKSUM_BITS]
        zeros = anywhere[CHECKSUM_BITS:]
        if not any(is_one and is_zero for is_one, is_zero in zip(ones, zeros, strict=True)):
            return
        # Every rank has the same flags, so every rank calls this collective.
        everyone = communicator.gather_objects(self._changes)
        different = [
            f"rank {rank} has set {name} to {value}"
            for rank, options in enumerate(everyone)
            for name, value in options
            if any((name, value) not in others for others in everyone)
        ]
        raise RuntimeError(
            "the optimizer's options differ between ranks, so shards would be stepped differently; "
            f"since the last step {', '.join(different)}: step schedulers equally often on every "
            "rank, also after Join, and pass them a loss that is averaged over the ranks"
        )


def _option_numbers(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Return the options in the optimizer's `defaults` that are numbers or lists of numbers."""
    numbers = []
    for index, group in enumerate(optimizer.param_groups):
        # A program may store other numbers in a group.
        for key in sorted(group.keys() & optimizer.defaults.keys()):
            value = group[key]
            # Reading a tensor on another device would block the host.
            is_cpu_number = isinstance(value, Tensor) and value.is_cpu and value.numel() == 1
            entries = [value.item()] if is_cpu_number else value
            entries = entries if isinstance(entries, list | tuple) else [entries]
            if all(isinstance(entry, Real) for entry in entries):
                # Round, because the last bits of a schedule may differ between hosts.
                rounded = ", ".join(f"{float(entry):.9g}" for entry in entries)
                numbers.append((f"{key} of group {index}", rounded))
    return numbers

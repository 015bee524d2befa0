"""Comparison of an optimizer's options between ranks, because they step different elements.

A scheduler that runs more often on one rank, or that reads the loss of one rank, sets different
learning rates for different shards. Each step compares a checksum of the options that have changed
since the last step. Its bits are exchanged together with flags that a step exchanges anyway.
Options that the optimizer changes by itself are not compared, because they may depend on the shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

#: The number of bits of the checksum.
CHECKSUM_BITS = 32

#: The numbers among the options of each parameter group.
Numbers = list[dict[str, tuple[float, ...]]]


def option_numbers(optimizer: torch.optim.Optimizer) -> Numbers:
    """Return the optimizer's options that are numbers, for each parameter group."""
    numbers: Numbers = []
    for group in optimizer.param_groups:
        described = {}
        # A program may store other numbers in a group.
        for key in group.keys() & optimizer.defaults.keys():
            value = group[key]
            # Reading a tensor on another device would block the host.
            is_cpu_number = isinstance(value, Tensor) and value.is_cpu and value.numel() == 1
            entries = [value.item()] if is_cpu_number else value
            entries = entries if isinstance(entries, list | tuple) else [entries]
            if all(isinstance(entry, Real) for entry in entries):
                described[key] = tuple(entries)
        numbers.append(described)
    return numbers


class OptionChecks:
    """The options after an optimizer's last step, and the comparison of later changes."""

    def __init__(self) -> None:
        self._after_step: Numbers = []
        self._changes: list[tuple[int, str, str]] = []

    def record(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the options after a step."""
        self._after_step = option_numbers(optimizer)

    def flags(self, optimizer: torch.optim.Optimizer) -> list[bool]:
        """Return the bits of a checksum of the changes since the last step, and their inverse."""
        self._changes = []
        for index, numbers in enumerate(option_numbers(optimizer)):
            is_new = index >= len(self._after_step)
            earlier = {} if is_new else self._after_step[index]
            for key, value in numbers.items():
                if earlier.get(key) != value:
                    # Round, because the last bits of a schedule may differ between hosts.
                    rounded = " ".join(f"{number:.9g}" for number in value)
                    self._changes.append((index, key, rounded))
        checksum = zlib.crc32(repr(sorted(self._changes)).encode())
        bits = [bool(checksum >> bit & 1) for bit in range(CHECKSUM_BITS)]
        return [*bits, *(not bit for bit in bits)]

    def check(self, anywhere: Sequence[bool]) -> None:
        """Raise if the flags, combined over all ranks by OR, show different changes."""
        ones = anywhere[:CHECKSUM_BITS]
        zeros = anywhere[CHECKSUM_BITS:]
        if any(is_one and is_zero for is_one, is_zero in zip(ones, zeros, strict=True)):
            changes = [f"{key}={value} in group {index}" for index, key, value in self._changes]
            raise RuntimeError(
                "the optimizer's options differ between ranks, so shards would be stepped "
                f"differently; since the last step this rank has set {', '.join(changes) or 'none'}"
                ": step schedulers equally often on every rank, also after Join, and pass them "
                "a loss that is averaged over the ranks"
            )

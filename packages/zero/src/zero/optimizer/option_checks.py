"""Comparison of an optimizer's options between ranks, because they step different elements.

A scheduler that runs more often on one rank, or that reads the loss of one rank, sets different
learning rates for different shards. Each step compares a checksum of the options. Its bits are
exchanged together with flags that a step exchanges anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from zero.process_groups import Communicator

#: The number of bits of the checksum.
CHECKSUM_BITS = 32


def option_flags(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return the bits of a checksum of the optimizer's options, and their inverse."""
    checksum = zlib.crc32(repr(_option_numbers(optimizer)).encode())
    bits = [bool(checksum >> bit & 1) for bit in range(CHECKSUM_BITS)]
    return [*bits, *(not bit for bit in bits)]


def check_options_alike(
    anywhere: Sequence[bool], optimizer: torch.optim.Optimizer, communicator: Communicator
) -> None:
    """Raise RuntimeError if `option_flags`, combined over all ranks by OR, show a difference."""
    ones = anywhere[:CHECKSUM_BITS]
    zeros = anywhere[CHECKSUM_BITS:]
    if not any(is_one and is_zero for is_one, is_zero in zip(ones, zeros, strict=True)):
        return
    # Every rank has the same flags, so every rank calls this collective.
    everyone = communicator.gather_objects(_option_numbers(optimizer))
    different = [
        f"rank {rank} has {name}={value}"
        for rank, numbers in enumerate(everyone)
        for name, value in numbers
        if any((name, value) not in others for others in everyone)
    ]
    raise RuntimeError(
        "the optimizer's options differ between ranks, so shards would be stepped differently: "
        f"{', '.join(different)}; step schedulers equally often on every rank, also after Join, "
        "and pass them a loss that is averaged over the ranks"
    )


def _option_numbers(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Return the names and values of the options that are numbers."""
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

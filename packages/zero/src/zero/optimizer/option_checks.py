"""Comparison of an optimizer's options between ranks, because ranks step different elements.

A scheduler that runs more often on one rank, or that reads the loss of one rank, sets different
learning rates for different shards. Each step compares a checksum of the numeric options that the
program has changed since the last step. The bits of the checksum are exchanged together with flags
that a step exchanges anyway. Options that the optimizer itself changes are not compared, because
they may depend on the shard.
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

#: The names and rounded values of options.
Options = list[tuple[str, str]]


def list_numeric_options(optimizer: torch.optim.Optimizer) -> Options:
    """Return the options in `defaults` that are numbers, lists of numbers or CPU scalar tensors."""
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


def find_changed_options(optimizer: torch.optim.Optimizer, after_step: Options) -> Options:
    """Return the options that differ from `after_step`, the options after the last step."""
    return [option for option in list_numeric_options(optimizer) if option not in after_step]


def make_checksum_flags(changes: Options) -> list[bool]:
    """Return the bits of a checksum of the changes, followed by the inverted bits.

    In the OR over all ranks, a bit and its inverse are both set if checksums differ in this bit.
    """
    checksum = zlib.crc32(repr(changes).encode())
    bits = [bool(checksum >> bit & 1) for bit in range(CHECKSUM_BITS)]
    return [*bits, *(not bit for bit in bits)]


def check_options_match(
    flags_anywhere: Sequence[bool], changes: Options, communicator: Communicator
) -> None:
    """Raise RuntimeError if options differ between ranks.

    flags_anywhere: the element-wise OR of `make_checksum_flags(changes)` over all ranks.
    """
    ones = flags_anywhere[:CHECKSUM_BITS]
    zeros = flags_anywhere[CHECKSUM_BITS:]
    if not any(is_one and is_zero for is_one, is_zero in zip(ones, zeros, strict=True)):
        return
    # Every rank has the same flags, so every rank calls this collective.
    changes_of_ranks = communicator.gather_objects(changes)
    common = set(changes_of_ranks[0]).intersection(*changes_of_ranks)
    different = [
        f"rank {rank} has set {name} to {value}"
        for rank, options in enumerate(changes_of_ranks)
        for name, value in options
        if (name, value) not in common
    ]
    raise RuntimeError(
        "the optimizer's options differ between ranks, so shards would be stepped differently; "
        f"since the last step {', '.join(different)}: step schedulers equally often on every "
        "rank, also after Join, and pass them a loss that is averaged over the ranks"
    )

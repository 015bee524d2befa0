"""Copies on the host of what a device does not hold (CPU offload).

On a CPU device and host are one memory, and the copies are made all the same: the program is the
one that runs on a GPU, and `memory_report` tells the two apart.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor

_copies: WeakSet[torch.UntypedStorage] = WeakSet()


def to_host(tensor: Tensor) -> Tensor:
    """Copy to the host, in pinned memory if it comes from a GPU."""
    place = torch.device("meta" if tensor.is_meta else "cpu")
    copied = torch.empty(0, dtype=tensor.dtype, device=place, pin_memory=tensor.is_cuda)
    # Known before it has its size: whoever counts bytes sees which these are.
    _copies.add(copied.untyped_storage())
    return copied.resize_(tensor.shape).copy_(tensor.detach())


def to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """Copy from the host, to the device and dtype of `like`."""
    return like.new_empty(tensor.shape).copy_(tensor.detach(), non_blocking=True)


def on_host(storage: torch.UntypedStorage) -> bool:
    """Whether `to_host` made it."""
    return storage in _copies

"""CPU offload: copies of tensors in CPU memory, so that the device's memory can be freed.

On a machine without a GPU, device and host share one memory. The copies are still made, so that the
same code runs as on a GPU and `memory_report` can distinguish the two kinds of memory.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor

#: The storages that `to_host` allocated.
_offloaded: WeakSet[torch.UntypedStorage] = WeakSet()


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in CPU memory, pinned if `tensor` is on a GPU."""
    device = torch.device("meta" if tensor.is_meta else "cpu")
    copied = torch.empty(0, dtype=tensor.dtype, device=device, pin_memory=tensor.is_cuda)
    # The storage is registered before it is resized, so that `memory_report` knows its kind when it
    # counts the allocation.
    _offloaded.add(copied.untyped_storage())
    return copied.resize_(tensor.shape).copy_(tensor.detach())


def to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy with the device and dtype of `like`."""
    return like.new_empty(tensor.shape).copy_(tensor.detach(), non_blocking=True)


def is_offloaded(storage: torch.UntypedStorage) -> bool:
    """Return True if `to_host` allocated the storage."""
    return storage in _offloaded

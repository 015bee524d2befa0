"""The size of a model in bytes.

A parameter or buffer that several layers share is counted once, and different tensors that share
memory are counted separately. Palettes and scales are included. Floating-point tensors are also
counted as a sparse file stores them: one bit per element plus the elements other than +0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tinyml.validation import check_strided

#: The integer type of each size in bytes.
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Size:
    """Numbers of bytes by the name of a tensor. `str()` returns a table."""

    #: Bytes of every parameter and buffer as it is stored in memory.
    by_name: dict[str, int]
    #: The same, but the bytes in a sparse file for floating-point tensors that are smaller there.
    sparse_by_name: dict[str, int]

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors in memory."""
        return sum(self.by_name.values())

    @property
    def sparse_bytes(self) -> int:
        """Return the bytes of all tensors, without the zeros of a tensor if that is smaller."""
        return sum(self.sparse_by_name.values())

    def __str__(self) -> str:
        lines = [f"{nbytes:>14,}  {name}" for name, nbytes in self.by_name.items()]
        lines.append(f"{self.bytes:>14,}  bytes, {self.sparse_bytes:,} without zeros")
        return "\n".join(lines)


@torch.no_grad()
def size_of(model: nn.Module) -> Size:
    """Return the bytes of every parameter and buffer of `model`, persistent or not."""
    check_strided("a model", *model.parameters(), *model.buffers())
    by_name: dict[str, int] = {}
    sparse: dict[str, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        by_name[name] = sparse[name] = tensor.nbytes
        if tensor.is_floating_point():
            bitmap_bytes = -(-tensor.numel() // 8)
            value_bytes = int(has_value(tensor).sum()) * tensor.itemsize
            sparse[name] = min(tensor.nbytes, bitmap_bytes + value_bytes)
    return Size(by_name, sparse)


def has_value(tensor: Tensor) -> Tensor:
    """Return a mask of the elements that a sparse file stores: all but +0.0."""
    return as_integers(tensor.contiguous()) != 0


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as integers of the same number of bytes."""
    return tensor.view(_INTEGER_TYPES[tensor.itemsize])

"""Transfer of data in chunks, so that copying and checking overlap with sending.

Buffers are reused as soon as no tensor refers to them, because mapping new pages takes longer than
copying into mapped pages. A receiver accepts the next expected chunk only, so a chunk that is
repeated or invalid has no effect.
"""

import math
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paramserver.partition import Shard

#: Size of a chunk in bytes, small enough to stay in a core's cache between two copies.
CHUNK_BYTES = 2**20


class BufferPool:
    """A pool of buffers of `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = list[np.ndarray]()

    def allocate(self) -> Tensor:
        """Return an uninitialized buffer. It returns to the pool when its last view is freed."""
        # NumPy allocates huge pages for large arrays.
        memory = self._free.pop() if self._free else np.empty(self.nbytes, np.uint8)
        view = memory[:]  # the tensor and all of its views refer to this array
        weakref.finalize(view, self._free.append, memory).atexit = False
        return torch.from_numpy(view)


class ChunkReceiver:
    """A receiver that stores chunks of data, in order, in the buffer `data`."""

    def __init__(self, data: Tensor, shard: Shard | None = None) -> None:
        self.data = data
        #: Number of bytes received.
        self.received = 0
        #: Check of the data if they are gradients of `shard`, otherwise None.
        self.finite_check = FiniteCheck(shard, data) if shard else None

    def accept(self, start: int, chunk: bytes | memoryview) -> bool:
        """Store the next chunk, ignore any other; return True if the data are complete."""
        if start == self.received and 0 < len(chunk) <= len(self.data) - start:
            self.received += len(chunk)
            self.data[start : self.received] = torch.frombuffer(chunk, dtype=torch.uint8)
            if self.finite_check:
                self.finite_check.update(self.received)
        return self.received == len(self.data)


class FiniteCheck:
    """A check that received gradients are finite, which sums them chunk by chunk.

    Each chunk is summed directly after its copy, while it may still be in the processor's cache.
    """

    def __init__(self, shard: Shard, data: Tensor) -> None:
        dtype, *others = {piece.dtype for piece in shard.pieces} or {torch.uint8}
        can_sum = dtype.is_floating_point and not others and len(data) == shard.buffer_bytes
        self._flat = data.view(dtype) if can_sum else None
        self._checked = 0
        self._sum = 0.0

    def update(self, received: int) -> None:
        """Add the elements up to byte `received` to the sum."""
        if self._flat is not None:
            stop = received // self._flat.itemsize
            self._sum += float(self._flat[self._checked : stop].sum())
            self._checked = stop

    def is_certain(self) -> bool:
        """Return True if all gradients are known to be finite.

        False means that this is unknown, because the sum of finite gradients can overflow.
        """
        flat = self._flat
        return flat is not None and self._checked == len(flat) and math.isfinite(self._sum)


def iter_chunk_bounds(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each chunk of `nbytes` bytes, each of at most `CHUNK_BYTES`.

    Yield one empty chunk if `nbytes` is 0.
    """
    for start in range(0, max(nbytes, 1), CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, nbytes)

"""The bytes of a model in pieces: while one travels, the next is copied, and the last is used.

Notable:
- memory is used again as soon as nothing looks at it: new pages cost more than copies into them;
- only the piece that is awaited is taken: one that is lost, comes twice or is none changes nothing.
"""

import math
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paramserver.partition import Shard

PIECE = 2**20  # bytes: a core's cache holds it from one copy to the next


class Buffers:
    """Memory for shards of `nbytes`, as many as are in use at one time."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._free = nbytes, list[np.ndarray]()

    def take(self) -> Tensor:
        """Flat bytes, of whatever value, for as long as they, or a view of them, are held."""
        # By numpy, as it asks for large pages.
        memory = self._free.pop() if self._free else np.empty(self.nbytes, np.uint8)
        seen = memory[:]  # what the tensor, and each view of it, keeps alive
        weakref.finalize(seen, self._free.append, memory).atexit = False
        return torch.from_numpy(seen)


class Arrival:
    """Data that come in pieces, one after the other, into `data`."""

    def __init__(self, data: Tensor, shard: Shard | None = None) -> None:
        self.data, self.have = data, 0
        self.finite = Finite(shard, data) if shard else None

    def take(self, at: int, piece: bytes | memoryview) -> bool:
        """The bytes from `at` on have come. Whether those were the last."""
        if at == self.have and 0 < len(piece) <= len(self.data) - at:
            self.have += len(piece)
            self.data[at : self.have] = torch.frombuffer(piece, dtype=torch.uint8)
            if self.finite:
                self.finite.see(self.have)
        return self.have == len(self.data)


class Finite:
    """Whether gradients that come in pieces are finite: if sums of them are, while in the cache."""

    def __init__(self, shard: Shard, data: Tensor) -> None:
        kind, *others = {piece.dtype for piece in shard.pieces} or {torch.uint8}
        known = kind.is_floating_point and not others and len(data) == shard.buffer_bytes
        self._flat = data.view(kind) if known else None
        self._seen, self._sum = 0, 0.0

    def see(self, stop: int) -> None:
        """So many bytes have come."""
        if self._flat is not None:
            stop //= self._flat.itemsize
            self._sum += float(self._flat[self._seen : stop].sum())
            self._seen = stop

    def surely(self) -> bool:
        """Whether they are. If not, they still may be: a sum may overflow."""
        flat = self._flat
        return flat is not None and self._seen == len(flat) and math.isfinite(self._sum)


def cuts(nbytes: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of so many bytes begin and end; of none, one that is empty."""
    for start in range(0, max(nbytes, 1), PIECE):
        yield start, min(start + PIECE, nbytes)

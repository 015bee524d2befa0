"""The assignment of elements to ranks.

Parameters are concatenated in one flat tensor, which is split into buckets. Each bucket is split
into one equal shard per rank, even in the middle of a parameter. Therefore all ranks have the same
number of elements, including padding. Optimizers that need whole tensors use another partition: one
owner per parameter, assigned in descending order of size (Graham's greedy rule). The balance of
this partition depends on the shapes. The argument `bucket_numel` limits the elements of a bucket,
which has at least one element per rank, or one whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of parameter `index`, stored at `offset` of the flat tensor."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of the flat tensor, reduced and gathered as one bucket.

    `owner` is the rank that stores the whole span; None if every rank stores an equal shard.
    """

    start: int
    stop: int
    owner: int | None = None

    def compute_shard(self, rank: int, world: int) -> tuple[int, int]:
        """Return the start and stop of `rank`'s shard in the flat tensor."""
        if self.owner is not None:
            return (self.start, self.stop) if rank == self.owner else (self.start, self.start)
        size = (self.stop - self.start) // world
        return self.start + rank * size, self.start + (rank + 1) * size


@dataclass(frozen=True)
class Partition:
    """The layout of a flat tensor: each parameter's size and offset, and each bucket's span.

    `numel` includes the padding at the end.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    spans: tuple[Span, ...]
    numel: int
    world: int

    def list_pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the parts of parameters within flat elements `start` to `stop`, in flat order."""
        pieces = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            low = max(start, offset)
            high = min(stop, offset + numel)
            if low < high:
                pieces.append(Piece(index, low - offset, high - offset, low))
        return sorted(pieces, key=lambda piece: piece.offset)

    def list_shard_pieces(self, rank: int) -> list[Piece]:
        """Return the parts of parameters in `rank`'s shards of all spans."""
        pieces = []
        for span in self.spans:
            pieces += self.list_pieces(*span.compute_shard(rank, self.world))
        return pieces


def partition_by_element(numels: Sequence[int], world: int, bucket_numel: int) -> Partition:
    """Return a partition in which each rank has an equal shard of every bucket."""
    total = sum(numels)
    padded = -(-total // world) * world
    bucket = max(world, bucket_numel // world * world)
    spans = tuple(Span(i, min(i + bucket, padded)) for i in range(0, padded, bucket))
    offsets = tuple(accumulate(numels, initial=0))[:-1]
    return Partition(tuple(numels), offsets, spans, padded, world)


def partition_by_parameter(numels: Sequence[int], world: int, bucket_numel: int) -> Partition:
    """Return a partition that assigns each parameter, largest first, to the least loaded rank."""
    owned: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owner = load.index(min(load))
        owned[owner].append(index)
        load[owner] += numels[index]
    offsets = [0] * len(numels)
    spans = []
    end = 0
    for owner, indices in enumerate(owned):
        start = end
        for index in sorted(indices):
            if start < end and end + numels[index] - start > bucket_numel:
                spans.append(Span(start, end, owner))
                start = end
            offsets[index] = end
            end += numels[index]
        if start < end:
            spans.append(Span(start, end, owner))
    return Partition(tuple(numels), tuple(offsets), tuple(spans), end, world)


def alias(flat: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """Return a tensor of shape `shape` that shares the memory of `flat` from `offset` on.

    Unlike a view, it has a separate version counter.
    """
    strides = torch.empty(shape, device="meta").stride()
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, shape, strides)

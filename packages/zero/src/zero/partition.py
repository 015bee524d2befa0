"""Who owns which elements: the split of parameters over ranks.

Notable:
- parameters are laid end to end in one flat tensor, cut into buckets, and each bucket into one
  slice a rank, wherever that falls: no rank holds more than its share rounded up;
- optimizers that must see whole tensors get the other split, one owner a parameter, largest first
  (Graham's greedy rule), whose balance depends on the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of parameter `index`, at `offset` of the flat tensor."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Flat elements `start` to `stop`, reduced and gathered as one bucket.

    `owner` is the rank that holds all of it, or None where every rank holds one equal slice.
    """

    start: int
    stop: int
    owner: int | None = None

    def shard(self, rank: int, world: int) -> tuple[int, int]:
        """The flat range that `rank` holds."""
        if self.owner is not None:
            return (self.start, self.stop) if rank == self.owner else (self.start, self.start)
        size = (self.stop - self.start) // world
        return self.start + rank * size, self.start + (rank + 1) * size


@dataclass(frozen=True)
class Partition:
    """The layout of one flat tensor: where parameters lie in it and how it is cut.

    `offsets[i]` is where parameter i begins; `numel` includes the padding at the end.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    spans: tuple[Span, ...]
    numel: int
    world: int

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The parameters' parts within flat elements `start` to `stop`, in flat order."""
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            low, high = max(start, offset), min(stop, offset + numel)
            if low < high:
                found.append(Piece(index, low - offset, high - offset, low))
        return sorted(found, key=lambda piece: piece.offset)

    def shard_pieces(self, rank: int) -> list[Piece]:
        """Everything that `rank` holds."""
        return [p for span in self.spans for p in self.pieces(*span.shard(rank, self.world))]


def by_element(numels: Sequence[int], world: int, bucket_numel: int) -> Partition:
    """Cut the flat tensor evenly: the largest shard is at most one element above the mean."""
    total = sum(numels)
    padded = -(-total // world) * world
    bucket = max(world, bucket_numel // world * world)
    spans = tuple(Span(i, min(i + bucket, padded)) for i in range(0, padded, bucket))
    offsets = tuple(accumulate(numels, initial=0))[:-1]
    return Partition(tuple(numels), offsets, spans, padded, world)


def by_parameter(numels: Sequence[int], world: int, bucket_numel: int) -> Partition:
    """Give each parameter one owner: the largest first, always to the least loaded rank."""
    owned: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owner = load.index(min(load))
        owned[owner].append(index)
        load[owner] += numels[index]
    offsets, spans, end = [0] * len(numels), [], 0
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
    """A part of `flat` in its own shape, and with a version counter of its own."""
    strides = torch.empty(shape, device="meta").stride()
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, shape, strides)

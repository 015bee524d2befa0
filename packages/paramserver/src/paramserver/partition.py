"""Which server holds which part of which parameter.

Notable:
- parameters are cut where equal bytes fall, in the middle of a tensor if need be. An optimizer that
  is elementwise (SGD, Adam, ...) cannot tell; for one that is not (LAMB, Muon) there is `whole`;
- a shard is one flat buffer of bytes, in which pieces are views: a pull or push is one message.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Shards = list["Shard"]
Cut = tuple[str, Tensor, int, int]  # a parameter, from which element to which

_ALIGNMENT = 64  # bytes: a cache line, and enough for any element type


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened parameter `name`, at byte `offset` of a shard."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def viewed(self) -> tuple[int, ...]:
        """The shape in which it is seen: a whole parameter's own, else flat."""
        numel = self.stop - self.start
        return self.shape if numel == torch.Size(self.shape).numel() else (numel,)


@dataclass(frozen=True)
class Shard:
    """What one server holds: pieces laid out in one buffer of `buffer_bytes`."""

    pieces: tuple[Piece, ...]
    whole: bool = False
    """Whether no parameter may be cut."""
    number: int = 0
    """Index of the server that holds it; server 0 orders the updates of all."""
    servers: int = 1
    """How many servers the parameters are divided over."""

    @property
    def nbytes(self) -> int:
        """Bytes of parameters."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer: the parameters, each piece aligned."""
        return max((_aligned(p.offset + p.nbytes) for p in self.pieces), default=_ALIGNMENT)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each piece as a tensor that shares the buffer's memory; whole parameters are shaped."""
        # Each begins a storage: torch counts a view's offset twice when it adds a sparse vector.
        parts = [(p, buffer.numpy()[p.offset : p.offset + p.nbytes]) for p in self.pieces]
        return [torch.from_numpy(part).view(p.dtype).view(p.viewed) for p, part in parts]

    def fragments(self, count: int) -> list["Fragment"]:
        """The buffer in `count` parts, equal in bytes but for alignment, each a shard by itself.

        ValueError if there is not enough for each to have something.
        """
        places = [_aligned(i * self.buffer_bytes // count) for i in range(count + 1)]
        if self.whole and count > 1:
            starts = [*(p.offset for p in self.pieces), self.buffer_bytes]
            places = [min(starts, key=lambda start: abs(start - place)) for place in places]
        cut = itertools.pairwise(places)
        found = [Fragment(a, b, Shard(tuple(self._between(a, b)), self.whole)) for a, b in cut]
        if count > 1 and not all(fragment.shard.pieces for fragment in found):
            text = f"a shard of {self.nbytes} bytes cannot be cut into {count} fragments"
            raise ValueError(f"{text}; give fewer")
        return found

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        """What lies in a part of the buffer, by its place there."""
        for p in self.pieces:
            first, last = max(start, p.offset), min(stop, p.offset + p.nbytes)
            if first < last:  # both at a multiple of the alignment, or at an end of the piece
                a, b = ((at - p.offset) // p.dtype.itemsize + p.start for at in (first, last))
                yield replace(p, start=a, stop=b, offset=first - start)

    def digest(self) -> str:
        """A short text that is equal only for equal layouts."""
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Fragment:
    """Bytes `start` to `stop` of a shard's buffer: what is exchanged at one time."""

    start: int
    stop: int
    shard: Shard

    def of(self, buffer: Tensor) -> Tensor:
        """This part of a buffer of the whole shard."""
        return buffer[self.start : self.stop]


def partition(parameters: Mapping[str, Tensor], servers: int, *, whole: bool = False) -> Shards:
    """Divide `parameters` over `servers`, equal in bytes.

    The largest shard exceeds the mean by less than one element. `whole` keeps every parameter on
    one server, the largest first onto the server with the least.
    """
    parameters = {name: part(tensor) for name, tensor in parameters.items()}
    if servers < 1:
        raise ValueError(f"{servers} servers cannot hold parameters; give 1 or more")
    if not parameters:
        raise ValueError("there is nothing to serve: no parameter requires a gradient")
    shards = _whole(parameters, servers) if whole else _equal_bytes(parameters, servers)
    return [replace(shard, number=i, servers=servers) for i, shard in enumerate(shards)]


def _equal_bytes(parameters: Mapping[str, Tensor], servers: int) -> list[Shard]:
    total = sum(tensor.nbytes for tensor in parameters.values())
    ends = [(server + 1) * total // servers for server in range(servers)]
    cuts: list[list[Cut]] = [[] for _ in range(servers)]
    position = server = 0  # position in bytes, over all parameters
    for name, tensor in parameters.items():
        start = 0
        while start < tensor.numel():
            while position >= ends[server]:
                server += 1
            room = -(-(ends[server] - position) // tensor.dtype.itemsize)  # never half an element
            stop = min(tensor.numel(), start + room)
            cuts[server].append((name, tensor, start, stop))
            position += (stop - start) * tensor.dtype.itemsize
            start = stop
    return [_laid_out(cut) for cut in cuts]


def _whole(parameters: Mapping[str, Tensor], servers: int) -> list[Shard]:
    owner, held = {}, [0] * servers
    for name in sorted(parameters, key=lambda name: -parameters[name].nbytes):
        owner[name] = held.index(min(held))
        held[owner[name]] += parameters[name].nbytes
    cuts: list[list[Cut]] = [[] for _ in range(servers)]
    for name, tensor in parameters.items():
        cuts[owner[name]].append((name, tensor, 0, tensor.numel()))
    return [_laid_out(cut, whole=True) for cut in cuts]


def _laid_out(cuts: list[Cut], *, whole: bool = False) -> Shard:
    pieces, end = [], 0
    for name, tensor, start, stop in cuts:
        if start < stop:
            pieces.append(Piece(name, start, stop, tuple(tensor.shape), tensor.dtype, end))
            end = _aligned(end + pieces[-1].nbytes)
    return Shard(tuple(pieces), whole)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def part(tensor: T) -> T:
    """A tensor, or this rank's part of a DTensor."""
    if not hasattr(tensor, "to_local"):
        return tensor
    mine: T = tensor.to_local()
    return mine

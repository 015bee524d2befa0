"""Partition of the parameters over servers.

Parameters are split into shards of equal size, if necessary in the middle of a tensor. Except for
rounding in 16 bits, splitting does not change the updates of an elementwise optimizer such as SGD.
Optimizers that use whole tensors, such as Adafactor or Muon, need a single server.

A shard is one flat buffer of bytes, and its pieces are views of the buffer. The data of a pull or
push are therefore sent as one block.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paramserver.arguments import require_integer
from paramserver.parameters import get_local_part, require_names

Cut = tuple[str, Tensor, int, int]  # parameter name, parameter, start and stop element

#: Alignment of pieces in bytes: a cache line, which suffices for any element type.
_ALIGNMENT = 64


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
        """Size of the elements in bytes, without padding."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the piece's view: the parameter's shape for a whole parameter, otherwise 1-D."""
        numel = self.stop - self.start
        return self.shape if numel == torch.Size(self.shape).numel() else (numel,)


@dataclass(frozen=True)
class Shard:
    """The part of the parameters that one server stores, as pieces of one buffer."""

    pieces: tuple[Piece, ...]
    #: Index of the server that stores the shard; server 0 orders the updates of all servers.
    number: int = 0
    #: Number of servers over which the parameters are partitioned.
    servers: int = 1

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer in bytes, including the padding that aligns the pieces."""
        return max((_align(p.offset + p.nbytes) for p in self.pieces), default=_ALIGNMENT)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return each piece as a tensor of shape `view_shape` that shares the buffer's memory."""
        parts = [buffer[p.offset : p.offset + p.nbytes] for p in self.pieces]
        pairs = zip(parts, self.pieces, strict=True)
        return [part.view(piece.dtype).view(piece.view_shape) for part, piece in pairs]

    def gather(self, buffer: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Copy the pieces from `buffer` into `flat`, which maps names to flattened parameters."""
        for piece, view in zip(self.pieces, self.views(buffer), strict=True):
            flat[piece.name][piece.start : piece.stop] = view.view(-1)

    def scatter(self, flat: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy the pieces from `flat`, which maps names to flattened parameters, into `buffer`."""
        for piece, view in zip(self.pieces, self.views(buffer), strict=True):
            view.view(-1).copy_(flat[piece.name][piece.start : piece.stop])

    def fragments(self, count: int) -> list["Fragment"]:
        """Return `count` fragments of the shard, of equal size in bytes up to alignment.

        Raises:
            ValueError: the shard is too small for every fragment to contain an element.
        """
        bounds = [_align(i * self.buffer_bytes // count) for i in range(count + 1)]
        fragments = []
        for start, stop in itertools.pairwise(bounds):
            shard = Shard(tuple(self._iter_pieces_between(start, stop)))
            fragments.append(Fragment(start, stop, shard))
        if count > 1 and not all(fragment.shard.pieces for fragment in fragments):
            raise ValueError(
                f"expected fewer fragments: a shard of {self.nbytes} bytes cannot be split "
                f"into {count}"
            )
        return fragments

    def _iter_pieces_between(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the parts of pieces in bytes `start` to `stop`; offsets are relative to `start`."""
        for piece in self.pieces:
            first = max(start, piece.offset)
            last = min(stop, piece.offset + piece.nbytes)
            # Each bound is aligned or is an end of the piece, so no element is split.
            if first < last:
                yield replace(
                    piece,
                    start=piece.start + (first - piece.offset) // piece.dtype.itemsize,
                    stop=piece.start + (last - piece.offset) // piece.dtype.itemsize,
                    offset=first - start,
                )

    def digest(self) -> str:
        """Return a hash of the pieces: 16 hexadecimal digits."""
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Fragment:
    """Bytes `start` to `stop` of a shard's buffer, which are exchanged together."""

    start: int
    stop: int
    shard: Shard

    def get_view(self, buffer: Tensor) -> Tensor:
        """Return a view of this fragment's bytes in `buffer`, a buffer of the whole shard."""
        return buffer[self.start : self.stop]


def partition(parameters: Mapping[str, Tensor], servers: int) -> list["Shard"]:
    """Return one shard of `parameters` per server; their sizes differ by about one element.

    Raises:
        ValueError: `servers` is less than 1, `parameters` is empty, a parameter is not a
            floating-point tensor of at least 16 bits, or a server would receive no element.
        TypeError: `parameters` is not a mapping, or `servers` is not an integer.
    """
    require_names(parameters)
    parameters = {name: get_local_part(tensor) for name, tensor in parameters.items()}
    servers = require_integer("servers", servers, 1)
    if not parameters:
        raise ValueError("expected parameters that require a gradient, got none")
    for name, tensor in parameters.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ValueError(
                f"expected floating-point parameters of at least 16 bits, got {name} of "
                f"{tensor.dtype}; freeze it, or convert it (torch.view_as_real of a complex one)"
            )
    total = sum(tensor.nbytes for tensor in parameters.values())
    ends = [(server + 1) * total // servers for server in range(servers)]
    cuts: list[list[Cut]] = [[] for _ in range(servers)]
    position = server = 0  # position in bytes, over all parameters
    for name, tensor in parameters.items():
        start = 0
        while start < tensor.numel():
            while position >= ends[server]:
                server += 1
            # Round up, because an element cannot be split.
            room = -(-(ends[server] - position) // tensor.dtype.itemsize)
            stop = min(tensor.numel(), start + room)
            cuts[server].append((name, tensor, start, stop))
            position += (stop - start) * tensor.dtype.itemsize
            start = stop
    if not all(cuts):
        raise ValueError(
            f"expected at least one element of the parameters per server, got {total} bytes for "
            f"{servers} servers; pass fewer servers"
        )
    return [Shard(_lay_out(cut), number, servers) for number, cut in enumerate(cuts)]


def _lay_out(cuts: list[Cut]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    end = 0
    for name, tensor, start, stop in cuts:
        pieces.append(Piece(name, start, stop, tuple(tensor.shape), tensor.dtype, end))
        end = _align(end + pieces[-1].nbytes)
    return tuple(pieces)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

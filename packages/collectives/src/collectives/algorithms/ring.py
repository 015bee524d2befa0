"""Ring: every rank talks to its two neighbors; each byte crosses each link once.

For n ranks and S bytes (Patarasuk and Yuan, 2009), a rank sends
    reduce-scatter   (n-1)/n S   in n-1 steps
    all-gather       (n-1)/n S   in n-1 steps
    all-reduce      2(n-1)/n S   in 2(n-1) steps, the two after each other
    broadcast              S     in pieces that follow each other down the chain
    all-to-all       (n-1)/n S   in n-1 steps: at step k to rank+k and from rank-k
which is the least that any algorithm can move: the choice for long messages.

Notable: partial sums travel, so a dtype that accumulates in a wider one would be rounded at every
hop. Such a reduce-scatter sends each slice straight to its owner instead (`direct`): the same
bytes and steps, and one rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.algorithms.point_to_point import PIECE_BYTES, PointToPoint
from collectives.algorithms.reduction import accumulation_dtype, average, in_pieces, reduce_into


def all_reduce(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    slices = flat.tensor_split(wire.world)
    _reduce(wire, slices, None, name)
    _gather(wire, slices)


def reduce_scatter(wire: PointToPoint, out: Tensor, flat: Tensor, name: str) -> None:
    """out = this rank's slice of the reduction; `flat` stays as it is."""
    _reduce(wire, flat.tensor_split(wire.world), out, name)


def all_gather(wire: PointToPoint, out: Tensor, own: Tensor) -> None:
    """out = every rank's `own`, one after the other."""
    slices = out.tensor_split(wire.world)
    slices[wire.rank].copy_(own)
    _gather(wire, slices)


def _reduce(wire: PointToPoint, slices: Sequence[Tensor], out: Tensor | None, name: str) -> None:
    """Finish slices[rank]: in `out`, or in place, with the other slices as scratch."""
    rank, world = wire.rank, wire.world
    result = slices[rank] if out is None else out
    if accumulation_dtype(result.dtype) != result.dtype:
        direct(wire, slices, result, name)
        return
    if world == 1 and out is not None:
        out.copy_(slices[0])
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(1, world):
        # The sum that rank r finishes starts at rank r+1 and goes around.
        leaving, arriving = slices[(rank - step) % world], slices[(rank - step - 1) % world]
        if out is not None and step > 1:
            leaving = out
        target = arriving if out is None else out
        wire.exchange_reduce((right, leaving), (left, arriving, target), name)
    average(name, result, world)


def _gather(wire: PointToPoint, slices: Sequence[Tensor]) -> None:
    rank, world = wire.rank, wire.world
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(world - 1):
        leaving, arriving = slices[(rank - step) % world], slices[(rank - step - 1) % world]
        wire.exchange([(right, leaving)], [(left, arriving)])


def direct(wire: PointToPoint, slices: Sequence[Tensor], out: Tensor, name: str) -> None:
    """Reduce-scatter without neighbors: each slice goes to its owner, which sums them all."""
    rank, world = wire.rank, wire.world
    wide = accumulation_dtype(out.dtype)
    length = max(1, PIECE_BYTES // world // wide.itemsize)
    for start in range(0, max(s.numel() for s in slices), length):
        pieces = [s[start : start + length] for s in slices]
        own = pieces[rank]
        parts = [own if r == rank else torch.empty_like(own) for r in range(world)]
        wire.exchange(
            [(r, pieces[r]) for r in range(world) if r != rank],
            [(r, parts[r]) for r in range(world) if r != rank],
        )
        scratch = torch.empty(own.numel(), dtype=wide, device=own.device)
        reduce_into(name, parts, out[start : start + length], scratch)


def broadcast(wire: PointToPoint, flat: Tensor, source: int) -> None:
    """A pipeline from the source around the ring: a rank passes a piece on as the next arrives."""
    rank, world = wire.rank, wire.world
    right, left = (rank + 1) % world, (rank - 1) % world
    first, last = rank == source, right == source
    pieces = in_pieces(flat, PIECE_BYTES // flat.element_size())
    for i in range(len(pieces) + 1):
        sends = [(right, pieces[i - 1])] if i > 0 and not last else []
        receives = [(left, pieces[i])] if i < len(pieces) and not first else []
        wire.exchange(sends, receives)


def all_to_all(wire: PointToPoint, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """outputs[i] on rank j = inputs[j] on rank i."""
    rank, world = wire.rank, wire.world
    outputs[rank].copy_(inputs[rank])
    for step in range(1, world):
        to, source = (rank + step) % world, (rank - step) % world
        wire.exchange([(to, inputs[to])], [(source, outputs[source])])

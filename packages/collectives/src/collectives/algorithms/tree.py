"""Binomial tree: data goes down from one root, or up to it, in ceil(log2 n) steps.

A range of ranks has its first rank as the root; the middle one is the root of the second half, and
so on. Broadcast sends from root to middle, from the top; reduce the other way, from the bottom.
    broadcast, reduce   log n messages of S
    all-reduce          reduce, broadcast
Few messages, each of them long: the choice for short tensors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.algorithms.point_to_point import PIECE_BYTES, PointToPoint
from collectives.algorithms.reduction import accumulation_dtype, average, in_pieces


def levels(rank: int, world: int) -> list[tuple[int, int, int]]:
    """The ranges [low, high) that hold `rank`, halved at `middle`, the whole one first."""
    low, high = 0, world
    found = []
    while high - low > 1:
        # The first half is the longer one.
        middle = (low + high + 1) // 2
        found.append((low, middle, high))
        low, high = (low, middle) if rank < middle else (middle, high)
    return found


def all_reduce(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    in_wide_blocks(flat, lambda block: _all_reduce(wire, block, name))


def broadcast(wire: PointToPoint, flat: Tensor, source: int) -> None:
    """Give every rank the tensor of rank `source`."""
    world = wire.world
    place = (wire.rank - source) % world
    for low, middle, _ in levels(place, world):
        _move(wire, [((low + source) % world, (middle + source) % world, flat)])


def reduce(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce to rank 0, in place; what other ranks hold afterwards is of no use."""
    nothing = flat[:0]
    for low, middle, _ in reversed(levels(wire.rank, wire.world)):
        if wire.rank == low:
            wire.exchange_reduce((middle, nothing), (middle, flat, flat), name)
        elif wire.rank == middle:
            wire.exchange_reduce((low, flat), (low, nothing, nothing), name)


def scatter(wire: PointToPoint, slices: Sequence[Tensor]) -> None:
    """Give rank i slices[i] of rank 0."""
    for low, middle, high in levels(wire.rank, wire.world):
        _move(wire, [(low, middle, part) for part in slices[middle:high]])


def in_wide_blocks(flat: Tensor, step: Callable[[Tensor], None]) -> None:
    """Run `step` on the tensor, or on wide copies of its pieces if its dtype is a narrow one."""
    wide = accumulation_dtype(flat.dtype)
    if wide == flat.dtype:
        step(flat)
        return
    for piece in in_pieces(flat, PIECE_BYTES // wide.itemsize):
        block = piece.to(wide)
        step(block)
        piece.copy_(block)


def in_column_blocks(
    wire: PointToPoint, out: Tensor, flat: Tensor, step: Callable[[Tensor, Sequence[Tensor]], None],
) -> None:  # fmt: skip
    """Reduce-scatter by `step`, which works in place, on wide copies of a part of every slice."""
    wide, slices = accumulation_dtype(flat.dtype), flat.tensor_split(wire.world)
    width = max(1, PIECE_BYTES // wire.world // wide.itemsize)
    for start in range(0, out.numel(), width):
        parts = [part[start : start + width] for part in slices]
        block = torch.cat(parts).to(wide)
        step(block, columns := block.tensor_split(wire.world))
        out[start : start + width].copy_(columns[wire.rank])


def _all_reduce(wire: PointToPoint, flat: Tensor, name: str) -> None:
    reduce(wire, flat, name)
    if wire.rank == 0:
        average(name, flat, wire.world)
    broadcast(wire, flat, 0)


def _move(wire: PointToPoint, moves: Sequence[tuple[int, int, Tensor]]) -> None:
    """Do this rank's part of moves (from, to, tensor)."""
    wire.exchange(
        [(to, tensor) for source, to, tensor in moves if source == wire.rank],
        [(source, tensor) for source, to, tensor in moves if to == wire.rank],
    )

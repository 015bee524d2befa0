"""Binomial tree: data moves down from a root, or up to it, in ceil(log2 n) steps.

The root of a range of ranks is its first rank. The range is halved; its middle rank is the root of
the second half, and so on. A broadcast sends from each root to the middle rank, starting with the
whole range. A reduce sends in the opposite direction, starting with the smallest ranges.

    broadcast, reduce   ceil(log2 n) messages of S bytes in sequence
    all-reduce          a reduce, then a broadcast

A tree sends few messages, each of full length, so it is the choice for short tensors.
"""

from collections.abc import Callable

from torch import Tensor

from collectives.algorithms.point_to_point import PIECE_BYTES, PointToPoint
from collectives.algorithms.reduction import average, get_wide_dtype, split_into_pieces


def list_ranges(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Return the ranges (low, middle, high) that contain `rank`, from the largest to the smallest.

    A range is [low, high) and is halved at `middle`; the first half may be one rank longer.
    """
    low, high = 0, world_size
    ranges = []
    while high - low > 1:
        middle = (low + high + 1) // 2
        ranges.append((low, middle, high))
        low, high = (low, middle) if rank < middle else (middle, high)
    return ranges


def all_reduce(point_to_point: PointToPoint, flat: Tensor, op: str) -> None:
    """Reduce the flat tensor over all ranks, in place."""

    def reduce_block(block: Tensor) -> None:
        reduce(point_to_point, block, op)
        if point_to_point.rank == 0:
            average(op, block, point_to_point.world_size)
        broadcast(point_to_point, block, 0)

    run_in_wide_blocks(flat, reduce_block)


def broadcast(point_to_point: PointToPoint, flat: Tensor, source: int) -> None:
    """Copy the tensor of rank `source` to every rank."""
    world_size = point_to_point.world_size
    # Ranks are numbered from the source.
    position = (point_to_point.rank - source) % world_size
    for low, middle, _ in list_ranges(position, world_size):
        if position == low:
            point_to_point.exchange([((middle + source) % world_size, flat)], [])
        elif position == middle:
            point_to_point.exchange([], [((low + source) % world_size, flat)])


def reduce(point_to_point: PointToPoint, flat: Tensor, op: str) -> None:
    """Reduce to rank 0, in place; the tensors of other ranks are overwritten by partial results."""
    empty = flat[:0]
    for low, middle, _ in reversed(list_ranges(point_to_point.rank, point_to_point.world_size)):
        if point_to_point.rank == low:
            point_to_point.exchange_reduce((middle, empty), (middle, flat, flat), op)
        elif point_to_point.rank == middle:
            point_to_point.exchange_reduce((low, flat), (low, empty, empty), op)


def run_in_wide_blocks(flat: Tensor, step: Callable[[Tensor], None]) -> None:
    """Run `step` in place on the tensor, or on pieces converted to the accumulation dtype."""
    wide = get_wide_dtype(flat.dtype)
    if wide == flat.dtype:
        step(flat)
        return
    for piece in split_into_pieces(flat, PIECE_BYTES // wide.itemsize):
        block = piece.to(wide)
        step(block)
        piece.copy_(block)

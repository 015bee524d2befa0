"""Ring: every rank sends to its right neighbor and receives from its left neighbor.

For n ranks and S bytes (Patarasuk and Yuan, 2009), a rank sends

    reduce-scatter   (n-1)/n S   in n-1 steps
    all-gather       (n-1)/n S   in n-1 steps
    all-reduce      2(n-1)/n S   in 2(n-1) steps: a reduce-scatter, then an all-gather
    broadcast              S     in pieces that follow each other down the chain
    all-to-all       (n-1)/n S   in n-1 steps: step k sends to rank+k and receives from rank-k

In no algorithm does the busiest rank send fewer bytes, so the ring is the choice for long messages.

A ring sends partial sums in the dtype of the tensor. For a dtype that accumulates in a wider one,
every step would round them. `reduce_directly` then sends each slice to its owner, which rounds the
sum once. The number of bytes does not change, and a rank sends to all owners at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.algorithms.point_to_point import PIECE_BYTES, PointToPoint
from collectives.algorithms.reduction import average, get_wide_dtype, reduce_into, split_into_pieces


def all_reduce(point_to_point: PointToPoint, flat: Tensor, op: str) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    slices = flat.tensor_split(point_to_point.world_size)
    _reduce(point_to_point, slices, None, op)
    _gather(point_to_point, slices)


def reduce_scatter(point_to_point: PointToPoint, out: Tensor, flat: Tensor, op: str) -> None:
    """Reduce this rank's slice of `flat` over all ranks into `out`, which may be that slice.

    The other slices of `flat` do not change.
    """
    slices = list(flat.tensor_split(point_to_point.world_size))
    if out.data_ptr() == slices[point_to_point.rank].data_ptr():
        # `out` holds sums of other slices before this rank's slice is added in the last step.
        slices[point_to_point.rank] = out.clone()
    _reduce(point_to_point, slices, out, op)


def all_gather(point_to_point: PointToPoint, out: Tensor, local: Tensor) -> None:
    """Write every rank's `local` to `out`, in rank order."""
    slices = out.tensor_split(point_to_point.world_size)
    slices[point_to_point.rank].copy_(local)
    _gather(point_to_point, slices)


def _reduce(
    point_to_point: PointToPoint, slices: Sequence[Tensor], out: Tensor | None, op: str
) -> None:
    """Reduce slices[rank] into `out`, or in place, which may overwrite the other slices too."""
    rank, world_size = point_to_point.rank, point_to_point.world_size
    result = slices[rank] if out is None else out
    if get_wide_dtype(result.dtype) != result.dtype:
        reduce_directly(point_to_point, slices, result, op)
        return
    if world_size == 1 and out is not None:
        out.copy_(slices[0])
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        # The sum that rank r completes starts at rank r+1 and visits all other ranks.
        leaving = slices[(rank - step) % world_size]
        arriving = slices[(rank - step - 1) % world_size]
        if out is not None and step > 1:
            leaving = out
        target = arriving if out is None else out
        point_to_point.exchange_reduce((right, leaving), (left, arriving, target), op)
    average(op, result, world_size)


def _gather(point_to_point: PointToPoint, slices: Sequence[Tensor]) -> None:
    rank, world_size = point_to_point.rank, point_to_point.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        leaving = slices[(rank - step) % world_size]
        arriving = slices[(rank - step - 1) % world_size]
        point_to_point.exchange([(right, leaving)], [(left, arriving)])


def reduce_directly(
    point_to_point: PointToPoint, slices: Sequence[Tensor], out: Tensor, op: str
) -> None:
    """Send each slice to its owner, which reduces the received slices into `out`."""
    rank, world_size = point_to_point.rank, point_to_point.world_size
    wide = get_wide_dtype(out.dtype)
    length = max(1, PIECE_BYTES // world_size // wide.itemsize)
    for start in range(0, max(s.numel() for s in slices), length):
        pieces = [s[start : start + length] for s in slices]
        local = pieces[rank]
        parts = [local if r == rank else torch.empty_like(local) for r in range(world_size)]
        point_to_point.exchange(
            [(r, pieces[r]) for r in range(world_size) if r != rank],
            [(r, parts[r]) for r in range(world_size) if r != rank],
        )
        scratch = torch.empty(local.numel(), dtype=wide, device="cpu")
        reduce_into(op, parts, out[start : start + length], scratch)


def broadcast(point_to_point: PointToPoint, flat: Tensor, source: int) -> None:
    """Broadcast in a pipeline: a rank forwards a piece while it receives the next one."""
    rank, world_size = point_to_point.rank, point_to_point.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    is_first = rank == source
    is_last = right == source
    pieces = split_into_pieces(flat, PIECE_BYTES // flat.element_size())
    for i in range(len(pieces) + 1):
        sends = [(right, pieces[i - 1])] if i > 0 and not is_last else []
        receives = [(left, pieces[i])] if i < len(pieces) and not is_first else []
        point_to_point.exchange(sends, receives)


def all_to_all_single(point_to_point: PointToPoint, out: Tensor, flat: Tensor) -> None:
    """Send the i-th of equal parts of `flat` to rank i; write the received parts to `out`."""
    world_size = point_to_point.world_size
    all_to_all(point_to_point, out.tensor_split(world_size), flat.tensor_split(world_size))


def all_to_all(
    point_to_point: PointToPoint, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Copy inputs[j] of rank i to outputs[i] of rank j, for all i and j."""
    rank, world_size = point_to_point.rank, point_to_point.world_size
    outputs[rank].copy_(inputs[rank])
    for step in range(1, world_size):
        target = (rank + step) % world_size
        source = (rank - step) % world_size
        point_to_point.exchange([(target, inputs[target])], [(source, outputs[source])])

"""Recursive halving and doubling: the bytes of a ring in ceil(log2 n) steps, for any n.

The ranks are split into two halves, and each rank of one half has a partner in the other. In a
halving step, partners exchange the half of the data that the partner's half will own, and each adds
the received data. Each half then repeats this alone. Doubling runs the same steps in reverse order,
with copies in place of sums.

    reduce-scatter   (n-1)/n S      halving
    all-gather       (n-1)/n S      doubling
    all-reduce      2(n-1)/n S      both; short tensors use doubling with sums alone: S log n
    broadcast                       a scatter down a tree, then doubling (van de Geijn)

(Thakur, Rabenseifner and Gropp, 2005). The bytes are exact for powers of two.

Halves may differ by one rank. The odd rank of the longer half has no partner. It sends its data to
the last rank of the other half, and receives the result of that half from it. Folding to a power of
two, the textbook's solution, would need extra steps before and after.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.algorithms import tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.algorithms.reduction import COMBINE, average
from collectives.algorithms.tree import in_column_blocks, in_wide_blocks, levels

# Up to this size, fewer steps save more time than fewer bytes.
SHORT_BYTES = 64 * 1024


def all_reduce(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce the flat tensor over all ranks, in place."""

    def step(block: Tensor) -> None:
        if block.numel() * block.element_size() <= SHORT_BYTES:
            _double_and_sum(wire, block, name)
            average(name, block, wire.world)
            return
        slices = block.tensor_split(wire.world)
        _halve(wire, block, slices, name)
        average(name, slices[wire.rank], wire.world)
        _double(wire, block, slices)

    in_wide_blocks(flat, step)


def reduce_scatter(wire: PointToPoint, out: Tensor, flat: Tensor, name: str) -> None:
    """Reduce this rank's slice of `flat` over all ranks into `out`; `flat` does not change."""

    def step(block: Tensor, slices: Sequence[Tensor]) -> None:
        _halve(wire, block, slices, name)
        average(name, slices[wire.rank], wire.world)

    in_column_blocks(wire, out, flat, step)


def all_gather(wire: PointToPoint, out: Tensor, local: Tensor) -> None:
    """Write every rank's `local` to `out`, in rank order."""
    slices = out.tensor_split(wire.world)
    slices[wire.rank].copy_(local)
    _double(wire, out, slices)


def broadcast(wire: PointToPoint, flat: Tensor, source: int) -> None:
    """Copy the tensor of rank `source` to every rank."""
    # Ranks are numbered from the source.
    from_source = wire.subgroup([(source + i) % wire.world for i in range(wire.world)])
    slices = flat.tensor_split(wire.world)
    tree.scatter(from_source, slices)
    _double(from_source, flat, slices)


def _halve(wire: PointToPoint, flat: Tensor, slices: Sequence[Tensor], name: str) -> None:
    """Reduce slices[rank] in place; `slices` are consecutive slices of `flat`."""
    empty = flat[:0]
    for low, middle, high in levels(wire.rank, wire.world):
        first = _span(flat, slices, low, middle)
        second = _span(flat, slices, middle, high)
        keep, send = (first, second) if wire.rank < middle else (second, first)
        partner, odd = _partners(wire.rank, low, middle, high)
        if wire.rank == odd:
            wire.exchange_reduce((partner, send), (partner, empty, empty), name)
            continue
        wire.exchange_reduce((partner, send), (partner, keep, keep), name)
        if odd is not None and wire.rank == high - 1:
            wire.exchange_reduce((odd, empty), (odd, keep, keep), name)


def _double_and_sum(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce the whole tensor at each level, over larger and larger ranges of ranks."""
    received = torch.empty_like(flat)
    for low, middle, high in reversed(levels(wire.rank, wire.world)):
        partner, odd = _partners(wire.rank, low, middle, high)
        sends = [(partner, flat)] if wire.rank != odd else []
        if odd is not None and wire.rank == high - 1:
            sends.append((odd, flat))
        wire.exchange(sends, [(partner, received)])
        # Both halves add in the same order, so that all ranks get the same bits.
        first, second = (flat, received) if wire.rank < middle else (received, flat)
        COMBINE[name](first, second, out=flat)


def _double(wire: PointToPoint, flat: Tensor, slices: Sequence[Tensor]) -> None:
    """Fill every slice from its owner."""
    for low, middle, high in reversed(levels(wire.rank, wire.world)):
        first, second = _span(flat, slices, low, middle), _span(flat, slices, middle, high)
        have, want = (first, second) if wire.rank < middle else (second, first)
        partner, odd = _partners(wire.rank, low, middle, high)
        if wire.rank == odd:
            wire.exchange([], [(partner, want)])
            continue
        sends = [(partner, have)]
        if odd is not None and wire.rank == high - 1:
            sends.append((odd, have))
        wire.exchange(sends, [(partner, want)])


def _partners(rank: int, low: int, middle: int, high: int) -> tuple[int, int | None]:
    """Return the rank's partner in the other half, and the odd rank of the first half or None."""
    odd = middle - 1 if middle - low > high - middle else None
    if rank == odd:
        return high - 1, odd
    distance = middle - low
    return (rank + distance if rank < middle else rank - distance), odd


def _span(flat: Tensor, slices: Sequence[Tensor], low: int, high: int) -> Tensor:
    """Return the part of `flat` that slices[low:high] cover."""
    start = slices[low].storage_offset() - flat.storage_offset()
    return flat[start : start + sum(part.numel() for part in slices[low:high])]

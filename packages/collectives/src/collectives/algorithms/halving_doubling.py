"""Recursive halving and doubling: the bytes of a ring in ceil(log2 n) steps, for any n.

Ranks are split into two halves; each rank of one has a partner in the other. Halving: partners
trade the half of the data that the other's side will own, and each adds what it gets; then each
side does the same alone. Doubling is the same film backwards, with copies in place of sums.
    reduce-scatter   (n-1)/n S      halving
    all-gather       (n-1)/n S      doubling
    all-reduce      2(n-1)/n S      both; for short tensors doubling alone, with sums: S log n
    broadcast        scatter down a tree, then doubling (van de Geijn)
(Thakur, Rabenseifner and Gropp, 2005). The bytes are exact for powers of two.

Notable: halves may differ by one rank. The odd rank of the longer half has no partner of its own:
it hands its data to the other side's last rank, and gets that side's result from it. So no world
size needs extra steps before or after, as folding to a power of two does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.algorithms import tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.algorithms.reduction import COMBINE, average
from collectives.algorithms.tree import in_column_blocks, in_wide_blocks, levels

# Up to this size a step saved is worth more than the bytes it costs.
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
    """out = this rank's slice of the reduction; `flat` stays as it is."""

    def step(block: Tensor, slices: Sequence[Tensor]) -> None:
        _halve(wire, block, slices, name)
        average(name, slices[wire.rank], wire.world)

    in_column_blocks(wire, out, flat, step)


def all_gather(wire: PointToPoint, out: Tensor, own: Tensor) -> None:
    """out = every rank's `own`, one after the other."""
    slices = out.tensor_split(wire.world)
    slices[wire.rank].copy_(own)
    _double(wire, out, slices)


def broadcast(wire: PointToPoint, flat: Tensor, source: int) -> None:
    """Give every rank the tensor of rank `source`."""
    # Seen from the source, ranks are numbered around from it.
    ring = wire.among([(source + i) % wire.world for i in range(wire.world)])
    slices = flat.tensor_split(wire.world)
    tree.scatter(ring, slices)
    _double(ring, flat, slices)


def _halve(wire: PointToPoint, flat: Tensor, slices: Sequence[Tensor], name: str) -> None:
    """Leave the reduction of slices[rank] in it, in place; `slices` are `flat`'s, in order."""
    nothing = flat[:0]
    for low, middle, high in levels(wire.rank, wire.world):
        mine, theirs = (low, middle), (middle, high)
        if wire.rank >= middle:
            mine, theirs = theirs, mine
        keep, give = _span(flat, slices, *mine), _span(flat, slices, *theirs)
        partner, odd = _partners(wire.rank, low, middle, high)
        if wire.rank == odd:
            wire.exchange_reduce((partner, give), (partner, nothing, nothing), name)
            continue
        wire.exchange_reduce((partner, give), (partner, keep, keep), name)
        if odd is not None and wire.rank == high - 1:
            wire.exchange_reduce((odd, nothing), (odd, keep, keep), name)


def _double_and_sum(wire: PointToPoint, flat: Tensor, name: str) -> None:
    """Reduce the whole tensor at each level: sums of ever larger ranges of ranks."""
    theirs = torch.empty_like(flat)
    for low, middle, high in reversed(levels(wire.rank, wire.world)):
        partner, odd = _partners(wire.rank, low, middle, high)
        sends = [(partner, flat)] if wire.rank != odd else []
        if odd is not None and wire.rank == high - 1:
            sends.append((odd, flat))
        wire.exchange(sends, [(partner, theirs)])
        # The first half's sum comes first on both sides, so that all ranks get the same bits.
        first, second = (flat, theirs) if wire.rank < middle else (theirs, flat)
        COMBINE[name](first, second, out=flat)


def _double(wire: PointToPoint, flat: Tensor, slices: Sequence[Tensor]) -> None:
    """Fill every slice with its owner's."""
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
    """A rank's partner in the other half, and the first half's odd rank if there is one."""
    odd = middle - 1 if middle - low > high - middle else None
    if rank == odd:
        return high - 1, odd
    return (rank + middle - low if rank < middle else rank - (middle - low)), odd


def _span(flat: Tensor, slices: Sequence[Tensor], low: int, high: int) -> Tensor:
    start = slices[low].storage_offset() - flat.storage_offset()
    return flat[start : start + sum(part.numel() for part in slices[low:high])]

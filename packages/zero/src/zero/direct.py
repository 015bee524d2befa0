"""Two collectives for gloo, made of sends straight to the rank that needs each block.

Notable:
- torch's reduce-scatter on gloo is an all-reduce for each rank, twice the bytes that are needed;
  `direct_reduce_scatter` sends what must be sent, and fixes the order of the sum: rank 0, 1, 2, ...
- torch's all-gather on gloo copies everything twice on the way, `direct_all_gather` nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Keeps our messages apart from a caller's own point-to-point traffic on the same group.
TAG = 0x5A45


class Work(Protocol):
    """What a collective returns with `async_op=True`."""

    def wait(self) -> Any:
        """Block until the result may be used."""


def direct_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    tag: int = TAG,
) -> Work | None:
    """`torch.distributed.reduce_scatter_tensor` by n-1 sends of one block each: (n-1)/n of S.

    Rank r sends block j of `input` straight to rank j and sums the blocks that reach it in rank
    order, so the result does not depend on timing. Half precision and less are summed in
    float32 and rounded once. Only SUM; the sum happens in `wait()`. Calls meet those of other ranks
    with their `tag`. `output` may be this rank's own block of `input`.
    """
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"direct_reduce_scatter sums; got {op}: scale the result instead")
    world = dist.get_world_size(group)
    if input.numel() != world * output.numel() or input.dtype != output.dtype:
        raise ValueError(
            f"output of {output.numel()} {output.dtype} does not fit input of {input.numel()} "
            f"{input.dtype} on {world} ranks: the input is world size blocks of the output's size"
        )
    work = _DirectReduceScatter(output, input, group, tag)
    if async_op:
        return work
    work.wait()
    return None


def direct_all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    tag: int = TAG,
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor` by n-1 sends of `input`, received in their places.

    `input` may be this rank's own block of `output`.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if output.numel() != world * input.numel() or input.dtype != output.dtype:
        raise ValueError(
            f"input of {input.numel()} {input.dtype} does not fit output of {output.numel()} "
            f"{output.dtype} on {world} ranks: the output is world size blocks of the input's size"
        )
    blocks = output.view(world, -1)
    work = _AllOf(_exchange([input.view(-1)] * world, list(blocks), group, tag))
    if blocks[rank].data_ptr() != input.data_ptr():
        blocks[rank].copy_(input.view(-1))
    if async_op:
        return work
    work.wait()
    return None


def _exchange(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    tag: int,
) -> list[Work]:
    """Start to send and receive one block for each other rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # Start with the next rank, so that not all send to rank 0 at once.
    peers = [(rank + step) % world for step in range(1, world)]
    receives = [dist.irecv(incoming[p], group=group, group_src=p, tag=tag) for p in peers]
    sends = [dist.isend(outgoing[p], group=group, group_dst=p, tag=tag) for p in peers]
    return [work for work in (*receives, *sends) if work is not None]


# What nobody waited for, kept: gloo's connection stops at a message whose receiver has gone.
_abandoned: list[Work] = []


class _AllOf:
    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def __del__(self) -> None:
        _abandoned.extend(self.works)


class _DirectReduceScatter:
    def __init__(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None, tag: int
    ) -> None:
        self.output = output
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)
        blocks = input.contiguous().view(world, -1)
        self.arrived = [
            blocks[r] if r == self.rank else torch.empty_like(blocks[r]) for r in range(world)
        ]
        self.work = _AllOf(_exchange(list(blocks), self.arrived, group, tag))

    def wait(self) -> None:
        if not self.arrived:
            return
        self.work.wait()
        first, *others = self.arrived
        if self.output.is_floating_point() and self.output.itemsize < 4 and others:
            total = first.float()
            for block in others:
                # Eight bits have no arithmetic of their own.
                total += block if block.itemsize > 1 else block.float()
            self.output.view(-1).copy_(total)
        elif others and self.arrived[self.rank].data_ptr() == self.output.data_ptr():
            # What is added to must not be what is still to be added.
            for block in others:
                first += block
            if self.rank:
                self.output.view(-1).copy_(first)
        elif others:
            torch.add(first, others[0], out=self.output.view(-1))
            for block in others[1:]:
                self.output.view(-1).add_(block)
        else:
            self.output.view(-1).copy_(first)
        self.arrived = []

"""Collectives for gloo that send each block directly to the ranks that need it.

torch's reduce-scatter on gloo is one all-reduce per rank and sends twice the necessary bytes. Its
all-gather copies the data twice. If ranks call different collectives, torch's implementations abort
the process or mix the data. The collectives here match only calls with the same tag, so mismatched
calls time out.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

#: The default tag, which separates these messages from the caller's messages on the same group.
TAG = 0x5A45
#: Larger tensors are reduced by torch's all-reduce, which sends fewer bytes on more than two ranks.
DIRECT_ALL_REDUCE_BYTES = 1 << 16


class Work(Protocol):
    """The handle that a collective returns with `async_op=True`."""

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
    """Implement `torch.distributed.reduce_scatter_tensor` with point-to-point messages.

    Each of n ranks sends block j of `input` to rank j, for all n-1 other ranks. Received blocks are
    added in rank order, so the result does not depend on timing. Floating-point dtypes narrower
    than 32 bits are summed in float32 and rounded once. Only SUM is supported. The sum is computed
    in `wait()`. Calls are matched between ranks by `tag`. `output` may be this rank's block of
    `input`. Return a handle if `async_op` is True, otherwise None. Raise ValueError if `op` is not
    SUM, and for sizes or dtypes that do not match.
    """
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"expected op=SUM, got {op}: sum, and scale the result instead")
    world = dist.get_world_size(group)
    if input.numel() != world * output.numel() or input.dtype != output.dtype:
        raise ValueError(
            "expected input.numel() == world_size * output.numel() and equal dtypes, got input of "
            f"{input.numel()} {input.dtype} and output of {output.numel()} {output.dtype} on "
            f"{world} ranks"
        )
    blocks = list(input.contiguous().view(world, *output.shape))
    return _return_or_wait(_DirectSum(output, blocks, group, tag), async_op)


def direct_all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    tag: int = TAG,
) -> Work | None:
    """Implement `torch.distributed.all_gather_into_tensor` with point-to-point messages.

    Each of n ranks sends `input` to all n-1 other ranks. Blocks are received directly into
    `output`. `input` may be this rank's block of `output`. Calls are matched between ranks by
    `tag`. Return a handle if `async_op` is True, otherwise None. Raise ValueError for sizes or
    dtypes that do not match.
    """
    world = dist.get_world_size(group)
    rank = dist.get_rank(group)
    if output.numel() != world * input.numel() or input.dtype != output.dtype:
        raise ValueError(
            "expected output.numel() == world_size * input.numel() and equal dtypes, got input of "
            f"{input.numel()} {input.dtype} and output of {output.numel()} {output.dtype} on "
            f"{world} ranks"
        )
    blocks = output.view(world, -1)
    work = _WorkList(_start_exchange([input.view(-1)] * world, list(blocks), group, tag))
    if blocks[rank].data_ptr() != input.data_ptr():
        blocks[rank].copy_(input.view(-1))
    return _return_or_wait(work, async_op)


def direct_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Sum a small tensor over the ranks in place, like `torch.distributed.all_reduce`.

    Each of n ranks sends the tensor to all n-1 other ranks, and adds all tensors in rank order. For
    a tensor of more than `DIRECT_ALL_REDUCE_BYTES`, or on another device than the CPU, call torch's
    all-reduce instead. Return a handle if `async_op` is True, otherwise None.
    """
    if not tensor.is_cpu or tensor.nbytes > DIRECT_ALL_REDUCE_BYTES:
        return dist.all_reduce(tensor, group=group, async_op=async_op)
    tag = compute_tag(f"all_reduce {tensor.dtype} {tensor.numel()}")
    work = _DirectSum(tensor, [tensor.contiguous()] * dist.get_world_size(group), group, tag)
    return _return_or_wait(work, async_op)


def _return_or_wait(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def compute_tag(description: str) -> int:
    """Return the tag for messages of calls with this description."""
    return zlib.crc32(description.encode()) >> 1


def _start_exchange(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    tag: int,
) -> list[Work]:
    """Start sending and receiving one block per peer; return the handles."""
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    # Each rank starts with the next rank, so that not all ranks send to rank 0 at once.
    peers = [(rank + step) % world for step in range(1, world)]
    receives = [dist.irecv(incoming[p], group=group, group_src=p, tag=tag) for p in peers]
    sends = [dist.isend(outgoing[p], group=group, group_dst=p, tag=tag) for p in peers]
    return [work for work in (*receives, *sends) if work is not None]


# Handles that were never waited for must stay alive: gloo's connection blocks at a message whose
# receive buffer was freed.
_abandoned: list[Work] = []


class _WorkList:
    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def __del__(self) -> None:
        _abandoned.extend(self.works)


class _DirectSum:
    """The handle of a sum of one block per rank.

    The constructor starts the sends and receives, and `wait()` adds the received blocks.

    outgoing: the block to send to each rank. This rank adds its own block without a copy.
    """

    def __init__(
        self, output: Tensor, outgoing: list[Tensor], group: dist.ProcessGroup | None, tag: int
    ) -> None:
        self.output = output
        self.rank = dist.get_rank(group)
        #: The blocks to add, in rank order; empty after the sum.
        self.received = [
            block if rank == self.rank else torch.empty_like(block)
            for rank, block in enumerate(outgoing)
        ]
        self.work = _WorkList(_start_exchange(outgoing, self.received, group, tag))

    def wait(self) -> None:
        if not self.received:
            return
        self.work.wait()
        self._add_in_rank_order()
        self.received = []

    def _add_in_rank_order(self) -> None:
        output = self.output
        first, *others = self.received
        if not others:
            output.copy_(first)
        elif output.is_floating_point() and output.itemsize < 4:
            total = first.float()
            for block in others:
                total += block
            output.copy_(total)
        elif self.received[self.rank].data_ptr() == output.data_ptr():
            # The output is one of the addends, so the sum is accumulated in the first block.
            for block in others:
                first += block
            if self.rank:
                output.copy_(first)
        else:
            torch.add(first, others[0], out=output)
            for block in others[1:]:
                output.add_(block)

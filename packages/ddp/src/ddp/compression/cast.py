"""Reduction of a bucket whose gradients are sent in another dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp.bucket import Bucket
from ddp.communication import Collective
from ddp.extensions import Extension
from ddp.process_group import ReduceGroup


@dataclass(frozen=True)
class Cast(Extension):
    """Reduction that sends gradients in `dtype` and adds them in the bucket's dtype.

    Each rank sends slice i of its gradients in `dtype` to rank i. Rank i adds the slices in the
    bucket's dtype, and sends the sum in `dtype` to all ranks. Each gradient is thus rounded twice
    for any number of ranks. Apart from padding, the ranks send as many bytes as an all-reduce in
    `dtype` sends.

    There are two exceptions. A custom all-reduce receives the rounded buffer and chooses the
    precision of the sum. If `dtype` is wider than the bucket's dtype, one all-reduce of the
    converted buffer adds in `dtype`.
    """

    dtype: torch.dtype

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective | None:
        """Launch the reduction in `dtype`; return None if the buffer has this dtype already."""
        buffer = bucket.buffer
        if self.dtype == buffer.dtype:
            return None
        if group.custom_all_reduce or self.dtype.itemsize > buffer.element_size():
            return self._launch_all_reduce(bucket, group)
        slice_numel = -(-buffer.numel() // group.world_size)  # rounded up
        rounded = torch.zeros(
            slice_numel * group.world_size, dtype=self.dtype, device=buffer.device
        )
        rounded[: buffer.numel()] = buffer
        received = torch.empty_like(rounded)
        process_group = group.process_group
        work = dist.all_to_all_single(received, rounded, group=process_group, async_op=True)

        def store() -> None:
            buffer.copy_(rounded[: buffer.numel()])

        def add_and_gather() -> Collective:
            slices = received.view(group.world_size, slice_numel)
            total = slices.to(buffer.dtype).sum(0).to(self.dtype)
            gather = dist.all_gather_into_tensor(rounded, total, group=process_group, async_op=True)
            # The record of the all-to-all contains the bytes of both collectives.
            return Collective(gather, 0, 0, store)

        gradient_bytes = bucket.gradients.numel() * self.dtype.itemsize
        extra_bytes = rounded.nbytes - gradient_bytes
        return Collective(work, gradient_bytes, extra_bytes, add_and_gather, has_next=True)

    def _launch_all_reduce(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        rounded = bucket.buffer.to(self.dtype)
        work = group.all_reduce(rounded, async_op=True)
        gradient_bytes = bucket.gradients.numel() * self.dtype.itemsize

        def store() -> None:
            bucket.buffer.copy_(rounded)

        return Collective(work, gradient_bytes, rounded.nbytes - gradient_bytes, store)

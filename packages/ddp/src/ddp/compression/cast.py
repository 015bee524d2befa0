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
    """Send gradients in `dtype`, and add them in the bucket's dtype if it is at least as wide.

    Each rank sends slice i of its gradients in `dtype` to rank i. Rank i adds the slices in the
    bucket's dtype, and sends the sum in `dtype` to all ranks. Each gradient is thus rounded twice
    for any number of ranks, and as many bytes are sent as by an all-reduce in `dtype`. An
    all-reduce that the caller passed receives the rounded buffer instead, and adds in the precision
    that it chooses. A wider `dtype` is also used for the addition, in one all-reduce of the
    converted buffer.
    """

    dtype: torch.dtype

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective | None:
        """Launch the all-to-all that sends the rounded slices; return None if no dtype changes."""
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
            # The second half of an all-reduce: its bytes were counted by the first half.
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

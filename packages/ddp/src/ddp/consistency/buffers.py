"""Synchronization of buffers, such as the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.consistency.failure_attribution import FailureAttribution
from ddp.process_group import ReduceGroup


@torch.no_grad()
def broadcast_buffers(
    buffers: Sequence[Tensor], group: ReduceGroup, failures: FailureAttribution, source: int = 0
) -> None:
    """Broadcast `buffers` from rank `source` of the group: one call per device.

    `DDP` calls this at the end of a backward pass, not at the start of a forward pass like torch's
    DDP. Buffers are then equal if a checkpoint or an evaluation follows on one rank only.
    """
    for device in {buffer.device for buffer in buffers}:
        on_device = [buffer for buffer in buffers if buffer.device == device]
        # Bytes carry every dtype, including bool and float8.
        flat = torch.cat([b.contiguous().reshape(-1).view(torch.uint8) for b in on_device])
        description = "the broadcast of the buffers"
        with failures.attribute(description):
            work = dist.broadcast(flat, group=group.process_group, group_src=source, async_op=True)
        failures.wait(work, description, poll=device.type == "cpu")
        if group.rank == source:
            continue
        pieces = flat.split([buffer.numel() * buffer.element_size() for buffer in on_device])
        # A graph that is retained for a second backward pass may have saved the buffers. Without
        # this guard that pass would fail, although torch's DDP changes buffers in the same way.
        with torch.autograd._unsafe_preserve_version_counter(tuple(on_device)):
            for buffer, piece in zip(on_device, pieces, strict=True):
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

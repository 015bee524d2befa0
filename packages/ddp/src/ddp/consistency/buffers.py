"""Buffers, such as BatchNorm's statistics, are those of one rank after every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.collective import Link
from ddp.consistency.blame import Blame


@torch.no_grad()
def broadcast_buffers(buffers: Sequence[Tensor], link: Link, blame: Blame, source: int = 0) -> None:
    """Give every rank the `buffers` of rank `source` of the group: one call for each device.

    At the end of a backward pass, not at the beginning of a forward pass as in torch's DDP: so that
    they are equal wherever a checkpoint or an evaluation, maybe on one rank only, comes between.
    """
    for device in {buffer.device for buffer in buffers}:
        here = [buffer for buffer in buffers if buffer.device == device]
        # As bytes: every dtype travels, bool and float8 included.
        flat = torch.cat([b.contiguous().reshape(-1).view(torch.uint8) for b in here])
        doing = "the broadcast of the buffers"
        with blame.naming(doing):
            handle = dist.broadcast(flat, group=link.group, group_src=source, async_op=True)
        blame.wait(handle, doing, poll=device.type == "cpu")
        if link.rank == source:
            continue
        pieces = flat.split([buffer.numel() * buffer.element_size() for buffer in here])
        # A graph that is kept for a second backward pass may have saved them: the values that it
        # was made with are gone either way, as after the next forward pass.
        with torch.autograd._unsafe_preserve_version_counter(tuple(here)):
            for buffer, piece in zip(here, pieces, strict=True):
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

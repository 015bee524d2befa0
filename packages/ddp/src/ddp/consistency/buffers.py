"""Synchronization of buffers, such as the running statistics of a batch norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp.communication import run_collective
from ddp.consistency.model_agreement import broadcast_tensors


def should_copy_buffers(replica: Any) -> bool:
    """Return True if the next forward pass starts by copying buffers, as with torch's DDP.

    Inside `join()`, the first synchronized forward pass of each step copies them.
    """
    if not replica.options.sync_buffers or not replica.tracked.has_buffers():
        return False
    if replica.is_joining:
        return torch.is_grad_enabled() and bool(replica.ddp.require_backward_grad_sync)
    return bool(replica.ddp.require_forward_param_sync)


def copy_buffers_before_forward(replica: Any) -> None:
    """Copy buffers before a forward pass."""
    replica.failures.check_not_failed()
    if replica.is_joining:
        replica.notify_join()
    # A checkpoint may repeat the forward pass within the backward pass, where ranks may have
    # launched different numbers of buckets.
    elif torch._C._current_graph_task_id() == -1:
        copy_buffers(replica)


def copy_buffers(replica: Any, *, is_participating: bool = True) -> None:
    """Copy buffers to every rank from rank 0, or in `join()` from the last rank with inputs.

    torch's DDP copies them before a forward pass only. A copy at the end of each step keeps them
    equal for a checkpoint that follows. This is a collective.
    """
    buffers = list(replica.tracked.collect_buffers().values())
    if not buffers or not replica.options.sync_buffers:
        return
    source = 0
    if replica.is_joining:
        source = gather_participating_ranks(replica, is_participating=is_participating)[-1]
    description = "the broadcast of the buffers"
    process_group = replica.group.process_group
    broadcast_tensors(buffers, process_group, replica.failures, description, source=source)


def gather_participating_ranks(replica: Any, *, is_participating: bool) -> list[int]:
    """Return the ranks that pass `is_participating=True`. This is a collective."""
    group = replica.group
    flags = torch.zeros(group.world_size, dtype=torch.int32, device=replica.device)
    flags[group.rank] = is_participating
    run_collective(
        partial(dist.all_reduce, group=group.process_group),
        flags,
        "the exchange of the ranks that take part in join()",
        replica.failures.attribute_errors,
    )
    return [rank for rank, flag in enumerate(flags.tolist()) if flag]

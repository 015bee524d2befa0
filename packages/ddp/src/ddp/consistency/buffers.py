"""Synchronization of buffers, such as the running statistics of a batch norm."""

from __future__ import annotations

from typing import Any

import torch

from ddp.consistency.model_agreement import broadcast_tensors
from ddp.consistency.uneven_inputs import gather_participating_ranks


class BufferSynchronization:
    """Copies of buffers to every rank from rank 0, or in `join()` from the last rank with inputs.

    torch's DDP copies buffers before a forward pass only. A copy at the end of each step keeps them
    equal for a checkpoint that follows.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def is_due_before_forward(self) -> bool:
        """Return True if the next forward pass starts by copying buffers, as with torch's DDP.

        Inside `join()`, the first synchronized forward pass of each step copies them.
        """
        replica = self._replica
        if not (replica.is_connected and replica.options.sync_buffers):
            return False
        if not replica.tracked.have_buffers():
            return False
        if replica.is_joining:
            return torch.is_grad_enabled() and bool(replica.ddp.require_backward_grad_sync)
        return bool(replica.ddp.require_forward_param_sync)

    def copy_before_forward(self) -> None:
        """Copy buffers before a forward pass."""
        replica = self._replica
        replica.failures.check_not_failed()
        if replica.is_joining:
            replica.notify_join()
        # A checkpoint may repeat the forward pass within the backward pass, where ranks may have
        # launched different numbers of buckets.
        elif torch._C._current_graph_task_id() == -1:
            self.copy()

    def copy(self, *, is_participating: bool = True) -> None:
        """Copy buffers to every rank. This is a collective."""
        replica = self._replica
        buffers = list(replica.tracked.named_buffers().values())
        if not buffers or not replica.options.sync_buffers:
            return
        source = 0
        if replica.is_joining:
            source = gather_participating_ranks(replica, is_participating=is_participating)[-1]
        broadcast_tensors(
            buffers,
            replica.group.process_group,
            replica.failures,
            "the broadcast of the buffers",
            source=source,
        )

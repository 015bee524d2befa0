"""Synchronization of buffers, such as the running statistics of batch normalization."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.model_agreement import broadcast_tensors, checksum
from ddp.consistency.tracked_parameters import TrackedParameters
from ddp.process_group import ReduceGroup


class BufferSynchronization:
    """Copies the buffers of one rank to every rank at the end of each step.

    torch's DDP copies them at the start of a forward pass. Copying at the end of a backward pass
    keeps them equal even if a checkpoint or an evaluation follows on one rank only.
    """

    def __init__(self) -> None:
        #: Checksum of the buffers before the first forward pass since the last step; 0 if unknown.
        self._checksum = 0
        #: True after the warning about buffers that were changed between two steps.
        self._has_warned = False

    def record_checksum(self, tracked: TrackedParameters) -> None:
        """Record the buffers that the first forward pass of a step uses."""
        # Dynamo cannot trace the checksum, and a compiled wrapper must not break the graph.
        if not torch.compiler.is_compiling() and self._checksum == 0:
            self._checksum = checksum(tracked.named_buffers().values())

    def synchronize(
        self,
        buffers: Sequence[Tensor],
        group: ReduceGroup,
        failures: FailureAttribution,
        source: int,
    ) -> None:
        """Copy the buffers of rank `source` to every rank; warn if the forward passes differed."""
        before_forward = torch.tensor(self._checksum, device=buffers[0].device)
        broadcast_tensors(
            [*buffers, before_forward],
            group.process_group,
            failures,
            "the broadcast of the buffers",
            source=source,
        )
        is_known = 0 not in (self._checksum, int(before_forward))
        if is_known and before_forward != self._checksum and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {group.rank}: before the forward pass of this step, the buffers differed "
                f"from those of rank {source}, because a rank changed them after the previous "
                f"step. torch's DDP would have copied those of rank {source} before the forward "
                "pass; change buffers on every rank in the same way, or broadcast them after the "
                "change",
                stacklevel=2,
            )
        self._checksum = 0

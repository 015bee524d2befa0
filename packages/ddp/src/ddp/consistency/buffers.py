"""Synchronization of buffers, such as the running statistics of batch normalization."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.model_agreement import broadcast_tensors, checksum
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

    @property
    def needs_checksum(self) -> bool:
        """True before the first forward pass of a step."""
        # Dynamo cannot trace the checksum, and a compiled wrapper must not break the graph.
        return not torch.compiler.is_compiling() and self._checksum == 0

    def record_checksum(self, buffers: Iterable[Tensor]) -> None:
        """Record the buffers that the first forward pass of a step uses."""
        self._checksum = checksum(buffers)

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
        self._warn_if_changed(int(before_forward), group.rank, source)
        self._checksum = 0

    def _warn_if_changed(self, source_checksum: int, rank: int, source: int) -> None:
        """Warn if the forward pass used other buffers on this rank than on the source rank."""
        if self._has_warned or 0 in (self._checksum, source_checksum):
            return
        if self._checksum != source_checksum:
            self._has_warned = True
            warnings.warn(
                f"rank {rank}: before the forward pass of this step, the buffers differed from "
                f"those of rank {source}, because a rank changed them after the previous step. "
                f"torch's DDP would have copied those of rank {source} before the forward pass; "
                "change buffers on every rank in the same way, or broadcast them after the change",
                stacklevel=2,
            )

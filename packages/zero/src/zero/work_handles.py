"""Handles of collectives in progress, in addition to torch's handles."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from zero.diagnostics import explain
from zero.gloo_collectives import Work


class ExplainedWork:
    """Work whose failure names the ranks that caused it."""

    def __init__(self, work: Work, group: dist.ProcessGroup | None, description: str) -> None:
        self.work = work
        self.group = group
        self.description = description

    def wait(self) -> None:
        """Wait; if the work fails, raise a RuntimeError that names the ranks."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise explain(error, self.group, self.description) from error


class DryReduceScatter:
    """A simulated reduce-scatter that allocates as much memory as `direct_reduce_scatter`."""

    def __init__(self, input: Tensor, world: int) -> None:
        self.received = input.new_empty(input.numel() // world * (world - 1))

    def wait(self) -> None:
        """Free the memory."""
        del self.received


class _FinishedWork:
    def wait(self) -> None:
        """Return immediately, because the collective has finished."""


FINISHED = _FinishedWork()

"""Reductions of buckets that run while the backward pass continues.

The reductions are waited for in the order of their launch. Each reduction stores the averaged
gradient of this rank's shard in its bucket.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.gloo_collectives import Work
from zero.optimizer.gradient_buckets import Bucket
from zero.process_groups import Communicator

#: The maximum number of reductions in progress at the same time.
MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class _Reduction:
    """A reduction in flight."""

    bucket: Bucket
    output: Tensor
    #: The gradients that are sent, kept alive until the reduction has read them.
    buffer: Tensor
    work: Work


class ReductionQueue:
    """The reductions in flight.

    release_gradients: see `GradientReducer`.
    """

    def __init__(self, communicator: Communicator, *, release_gradients: bool) -> None:
        self.communicator = communicator
        self.release_gradients = release_gradients
        self._in_flight: deque[_Reduction] = deque()

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that reductions in flight read and write."""
        return [t for reduction in self._in_flight for t in (reduction.output, reduction.buffer)]

    def launch(self, bucket: Bucket) -> None:
        """Start averaging a bucket's buffer once fewer than `MAX_IN_FLIGHT` reductions run."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_oldest()
        buffer = bucket.buffer
        assert buffer is not None
        self.communicator.divide_before_sum(buffer)
        if self.release_gradients:
            bucket.buffer = None
        if bucket.span.owner is not None:
            # torch.distributed.reduce overwrites its tensor on the other ranks too.
            buffer = buffer if self.release_gradients else buffer.clone()
            work = self.communicator.reduce(buffer, bucket.span.owner)
            is_owner = bucket.span.owner == self.communicator.rank
            # An empty view would keep the memory of the buffer.
            output = buffer if is_owner else buffer.new_empty(0)
        else:
            is_in_place = not self.release_gradients and self.communicator.sums_in_place
            output = bucket.get_buffer_shard() if is_in_place else torch.empty_like(bucket.shard)
            work = self.communicator.reduce_scatter(output, buffer)
        self._in_flight.append(_Reduction(bucket, output, buffer, work))

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.work.wait()
        bucket = reduction.bucket
        output = reduction.output
        self.communicator.divide_after_sum(output, output.dtype)
        if bucket.average is not None:
            bucket.average += output
        elif self.release_gradients:
            bucket.average = output
        else:
            # The local gradients have been sent, so the average may overwrite them.
            bucket.average = bucket.get_buffer_shard()
            if output.data_ptr() != bucket.average.data_ptr():
                bucket.average.copy_(output)
            bucket.average_is_in_buffer = True

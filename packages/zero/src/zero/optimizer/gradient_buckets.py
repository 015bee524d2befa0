"""Spans of a flat tensor of parameters, and reductions of their gradients that run during backward.

The reductions are waited for in the order of their launch. Each reduction stores the averaged
gradient of this rank's shard in its bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero.gloo_collectives import Work
from zero.partition import Partition, Piece, Span
from zero.process_groups import Communicator

#: The maximum number of reductions in progress at the same time.
MAX_IN_FLIGHT = 2


@dataclass(eq=False)
class Bucket:
    """A span of a flat tensor of parameters, and the gradients of that span."""

    span: Span
    #: The parameters' values in the span, and this rank's shard of them, which starts at offset
    #: `shard_offset` of the flat tensor.
    data: Tensor
    shard: Tensor
    shard_offset: int
    #: The parts of parameters in the span, and the parts in this rank's shard.
    pieces: list[tuple[nn.Parameter, Piece]]
    shard_pieces: list[tuple[nn.Parameter, Piece]]
    #: This rank's shard of the averaged gradients, from backward until they are cleared.
    average: Tensor | None = None
    #: True if `average` is a view of `buffer`.
    average_is_in_buffer: bool = False
    #: The local gradients to be sent.
    buffer: Tensor | None = None
    #: The parameters whose gradients this backward has not collected yet.
    missing: set[nn.Parameter] = field(default_factory=set)

    def copy_gradient(self, piece: Piece, gradient: Tensor | None) -> None:
        """Copy a piece of a gradient into the buffer; without a gradient, write zeros."""
        if self.buffer is None:
            self.buffer = torch.empty_like(self.data)
            last = self.pieces[-1][1]
            self.buffer[last.offset + last.numel - self.span.start :].zero_()
        target = self.buffer[piece.offset - self.span.start :][: piece.numel]
        if gradient is None:
            target.zero_()
        else:
            target.copy_(gradient.reshape(-1)[piece.start : piece.stop])

    def shard_of_buffer(self) -> Tensor:
        """Return this rank's shard of the buffer."""
        assert self.buffer is not None
        start = self.shard_offset - self.span.start
        return self.buffer[start : start + self.shard.numel()]

    def average_of(self, piece: Piece) -> Tensor:
        """Return the averaged gradient of a piece in this rank's shard."""
        assert self.average is not None
        return self.average[piece.offset - self.shard_offset :][: piece.numel]

    def move_average_out_of_buffer(self) -> None:
        """Copy the average, so that the buffer can be filled for another reduction."""
        if self.average is not None and self.average_is_in_buffer:
            self.average = self.average.clone()
            self.average_is_in_buffer = False


def make_buckets(
    partition: Partition, flat: Tensor, parameters: Sequence[nn.Parameter], rank: int
) -> list[Bucket]:
    """Return the buckets of `flat`, which contains `parameters` in the layout of `partition`."""
    buckets = []
    for span in partition.spans:
        low, high = span.shard(rank, partition.world)
        bucket = Bucket(
            span=span,
            data=flat[span.start : span.stop],
            shard=flat[low:high],
            shard_offset=low,
            pieces=[(parameters[p.index], p) for p in partition.pieces(span.start, span.stop)],
            shard_pieces=[(parameters[p.index], p) for p in partition.pieces(low, high)],
        )
        bucket.missing = {parameter for parameter, _ in bucket.pieces}
        buckets.append(bucket)
    return buckets


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

    release_gradients: True frees a bucket's buffer after it has been sent. False keeps the buffer,
        and overwrites this rank's shard of it with the average.
    """

    def __init__(self, communicator: Communicator, *, release_gradients: bool) -> None:
        self.communicator = communicator
        self.release_gradients = release_gradients
        self._in_flight: deque[_Reduction] = deque()

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that reductions in flight read and write."""
        return [t for reduction in self._in_flight for t in (reduction.output, reduction.buffer)]

    def launch(self, bucket: Bucket) -> None:
        """Start averaging a bucket's buffer; first wait if `MAX_IN_FLIGHT` reductions run."""
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
            output = buffer if bucket.span.owner == self.communicator.rank else buffer[:0]
        else:
            in_place = not self.release_gradients and self.communicator.sums_in_place
            output = bucket.shard_of_buffer() if in_place else torch.empty_like(bucket.shard)
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
            bucket.average = bucket.shard_of_buffer()
            if output.data_ptr() != bucket.average.data_ptr():
                bucket.average.copy_(output)
            bucket.average_is_in_buffer = True

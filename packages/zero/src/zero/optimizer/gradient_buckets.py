"""Spans of a flat tensor of parameters, with buffers for the gradients of each span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero.partition import Partition, Piece, Span


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
    #: This rank's shard of the averaged gradients, from the backward pass until they are cleared.
    average: Tensor | None = None
    #: True if `average` is a view of `buffer`.
    average_is_in_buffer: bool = False
    #: The local gradients to be sent.
    buffer: Tensor | None = None
    #: The parameters whose gradients this backward pass has not collected yet.
    missing: set[nn.Parameter] = field(default_factory=set)

    # A backward pass with create_graph=True enables gradients in its hooks.
    @torch.no_grad()
    def copy_gradient(self, piece: Piece, gradient: Tensor | None) -> None:
        """Copy a piece of a gradient, or zeros if it is None, into the buffer."""
        if self.buffer is None:
            self.buffer = torch.empty_like(self.data)
            last = self.pieces[-1][1]
            self.buffer[last.offset + last.numel - self.span.start :].zero_()
        target = self.buffer[piece.offset - self.span.start :][: piece.numel]
        if gradient is None:
            target.zero_()
        else:
            target.copy_(gradient.reshape(-1)[piece.start : piece.stop])

    def get_buffer_shard(self) -> Tensor:
        """Return this rank's shard of the buffer."""
        assert self.buffer is not None
        start = self.shard_offset - self.span.start
        return self.buffer[start : start + self.shard.numel()]

    def get_average(self, piece: Piece) -> Tensor:
        """Return the averaged gradient of a piece in this rank's shard."""
        assert self.average is not None
        return self.average[piece.offset - self.shard_offset :][: piece.numel]

    def move_average_out_of_buffer(self) -> None:
        """Copy an average in the buffer to new memory, so that the buffer can be filled again."""
        if self.average is not None and self.average_is_in_buffer:
            self.average = self.average.clone()
            self.average_is_in_buffer = False


def make_buckets(
    partition: Partition, flat: Tensor, parameters: Sequence[nn.Parameter], rank: int
) -> list[Bucket]:
    """Return the buckets of `flat`, which contains `parameters` in the layout of `partition`."""
    buckets = []
    for span in partition.spans:
        low, high = span.compute_shard(rank, partition.world)
        bucket = Bucket(
            span=span,
            data=flat[span.start : span.stop],
            shard=flat[low:high],
            shard_offset=low,
            pieces=[(parameters[p.index], p) for p in partition.list_pieces(span.start, span.stop)],
            shard_pieces=[(parameters[p.index], p) for p in partition.list_pieces(low, high)],
        )
        bucket.missing = {parameter for parameter, _ in bucket.pieces}
        buckets.append(bucket)
    return buckets

"""Averages gradients over ranks bucket by bucket, during backward, each rank keeping its shard.

Notable:
- every backward launches every bucket once and in one order (the order in which gradients became
  ready on rank 0 in the first backward), so ranks cannot fall out of step over an unused parameter;
- what a caller does to `.grad` between backward and step is noticed by its version counter, and
  those buckets are reduced again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero.direct import Work
from zero.partition import Partition, Piece, Span, alias
from zero.wire import Wire


@dataclass(eq=False)
class Bucket:
    """A span of a flat tensor: parameters' values, and for a while their gradients."""

    span: Span
    data: Tensor
    shard: Tensor
    shard_offset: int
    pieces: list[tuple[nn.Parameter, Piece]]
    # This rank's part of the averaged gradient, between backward and step.
    gradient: Tensor | None = None
    # This rank's own gradients on their way out.
    buffer: Tensor | None = None
    missing: set[nn.Parameter] = field(default_factory=set)

    def fill(self, parameter: nn.Parameter, piece: Piece) -> None:
        """Copy the parameter's gradient into the buffer; zeros where it has none."""
        if self.buffer is None:
            self.buffer = torch.empty_like(self.data)
            last = self.pieces[-1][1]
            self.buffer[last.offset + last.numel - self.span.start :].zero_()
        part = self.buffer[piece.offset - self.span.start :][: piece.numel]
        if parameter.grad is None:
            part.zero_()
        else:
            part.copy_(parameter.grad.reshape(-1)[piece.start : piece.stop])


def make_buckets(
    partition: Partition, flat: Tensor, parameters: Sequence[nn.Parameter], rank: int
) -> list[Bucket]:
    """Cut `flat`, which holds `parameters` as `partition` says, into its buckets."""
    buckets = []
    for span in partition.spans:
        low, high = span.shard(rank, partition.world)
        pieces = [(parameters[p.index], p) for p in partition.pieces(span.start, span.stop)]
        data, shard = flat[span.start : span.stop], flat[low:high]
        bucket = Bucket(span, data, shard, low, pieces)
        bucket.missing = {parameter for parameter, _ in pieces}
        buckets.append(bucket)
    return buckets


class Reducer:
    """Reduces buckets as backward fills them.

    `release=True` copies each gradient to its bucket's buffer, which lives until it is sent, and
    frees it. Else gradients live end to end in flat tensors of their own, sent from there.
    """

    def __init__(self, wire: Wire, *, release: bool, in_flight: int = 2) -> None:
        self.wire = wire
        self.release = release
        self.in_flight = in_flight
        self.enabled = True
        self.buckets: list[Bucket] = []
        self._where: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        # Where each gradient lives if it is not released: part of a flat tensor.
        self._home: dict[nn.Parameter, Tensor] = {}
        self._flat: list[Tensor] = []
        self._hooked: set[nn.Parameter] = set()
        # For each parameter the gradient that was sent, and its version then.
        self._sent: dict[nn.Parameter, tuple[int, int]] = {}
        self._order: list[Bucket] | None = None
        self._ready_first: list[Bucket] = []
        self._launched = 0
        self._in_backward = False
        self._flying: deque[tuple[Bucket, Tensor, Tensor, Work]] = deque()

    def add(self, buckets: list[Bucket], partition: Partition) -> None:
        """Take on the buckets of one more flat tensor; the next backward learns the order anew."""
        self.drain()
        if not self.release:
            flat = buckets[0].data.new_zeros(partition.numel)
            self._flat.append(flat)
            for bucket in buckets:
                bucket.buffer = flat[bucket.span.start : bucket.span.stop]
                for parameter, piece in bucket.pieces:
                    offset = partition.offsets[piece.index]
                    self._home.setdefault(parameter, alias(flat, offset, parameter.shape))
        self.buckets += buckets
        self._order = None
        for bucket in buckets:
            for parameter, piece in bucket.pieces:
                self._where.setdefault(parameter, []).append((bucket, piece))
        self._hook()

    def finish(self) -> set[nn.Parameter]:
        """Complete the averages; return the parameters that have a gradient on any rank."""
        self._hook()
        parameters = list(self._where)
        has = [p.grad is not None or (self.release and p in self._sent) for p in parameters]
        stale = {p for p in parameters if self._is_stale(p)}
        dirty = [any(p in stale for p, _ in bucket.pieces) for bucket in self.buckets]
        agreed = self.wire.any(has + dirty)
        self.drain()
        anywhere = agreed()
        for bucket, again in zip(self.buckets, anywhere[len(parameters) :], strict=True):
            if again:
                for parameter, piece in bucket.pieces:
                    self._collect(parameter, [(bucket, piece)])
                self._launch(bucket)
        for parameter in stale:
            self._mark_sent(parameter)
        self.drain()
        return {p for p, some in zip(parameters, anywhere, strict=False) if some}

    def reset(self) -> None:
        """Forget the averages, and a backward that was broken off."""
        self.drain()
        self._sent.clear()
        self._in_backward = False
        self._rewind()
        for bucket in self.buckets:
            bucket.gradient = None
            if self.release:
                bucket.buffer = None

    def drain(self) -> None:
        """Wait for what is under way."""
        while self._flying:
            self._retire()

    def held(self) -> list[Tensor]:
        """Every tensor of gradients that this rank holds beside the parameters' own `.grad`."""
        resting = [t for bucket in self.buckets for t in (bucket.gradient, bucket.buffer)]
        flying = [t for _, output, buffer, _ in self._flying for t in (output, buffer)]
        return self._flat + flying + [t for t in resting if t is not None]

    def _hook(self) -> None:
        me = weakref.ref(self)

        def ready(parameter: Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer.enabled:
                reducer._ready(parameter)  # type: ignore[arg-type]

        for parameter in self._where:
            if parameter.requires_grad and parameter not in self._hooked:
                parameter.register_post_accumulate_grad_hook(ready)
                self._hooked.add(parameter)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._collect(parameter, self._where[parameter])
        for bucket, _ in self._where[parameter]:
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._ready_first.append(bucket)
        self._mark_sent(parameter)
        if self._order is not None:
            while self._launched < len(self._order) and not self._order[self._launched].missing:
                self._launch(self._order[self._launched])
                self._launched += 1

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._order is None:
            self._order = self._agree_on_order()
        for bucket in self._order[self._launched :]:
            for parameter, piece in bucket.pieces:
                if parameter in bucket.missing:
                    self._collect(parameter, [(bucket, piece)])
            self._launch(bucket)
        for parameter in {p for bucket in self.buckets for p in bucket.missing}:
            if self._is_stale(parameter):
                self._mark_sent(parameter)
        self._rewind()

    def _rewind(self) -> None:
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter, _ in bucket.pieces}
        self._launched = 0
        self._ready_first = []

    def _collect(self, parameter: nn.Parameter, where: list[tuple[Bucket, Piece]]) -> None:
        """Put the gradient where it is sent from."""
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise TypeError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)}: sharding "
                "needs dense gradients; use nn.Embedding(..., sparse=False)"
            )
        if self.release:
            for bucket, piece in where:
                bucket.fill(parameter, piece)
            return
        home = self._home[parameter]
        if gradient is None:
            home.zero_()
        elif gradient is not home:
            home.copy_(gradient)
            parameter.grad = home

    def _agree_on_order(self) -> list[Bucket]:
        seen = dict.fromkeys([*self._ready_first, *reversed(self.buckets)])
        place = {bucket: i for i, bucket in enumerate(self.buckets)}
        order = self.wire.objects([place[bucket] for bucket in seen])[0]
        return [self.buckets[i] for i in order]

    def _is_stale(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if self.release:
            return gradient is not None
        now = None if gradient is None else (id(gradient), gradient._version)
        return now != self._sent.get(parameter)

    def _mark_sent(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._sent.pop(parameter, None)
            return
        self._sent[parameter] = (id(gradient), gradient._version)
        if self.release:
            parameter.grad = None

    def _launch(self, bucket: Bucket) -> None:
        while len(self._flying) >= self.in_flight:
            self._retire()
        buffer = bucket.buffer
        assert buffer is not None
        if self.release:
            bucket.buffer = None
        if bucket.span.owner is not None:
            # A reduce leaves its sum, or worse, in what it is given.
            buffer = buffer if self.release else buffer.clone()
            work = self.wire.reduce(buffer, bucket.span.owner)
            output = buffer if bucket.span.owner == self.wire.rank else buffer[:0]
        else:
            output = torch.empty_like(bucket.shard)
            work = self.wire.reduce_scatter(output, buffer)
        self._flying.append((bucket, output, buffer, work))

    def _retire(self) -> None:
        bucket, output, _, work = self._flying.popleft()
        work.wait()
        output /= self.wire.world
        if self.release and bucket.gradient is not None:
            bucket.gradient += output
        else:
            bucket.gradient = output

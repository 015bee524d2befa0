"""Averages gradients over ranks bucket by bucket, during backward, each rank keeping its shard.

Notable:
- every backward launches every bucket once and in one order (the order in which gradients became
  ready on rank 0 in the first backward), so ranks cannot fall out of step over an unused parameter;
- what is sent is out of a caller's reach: from the moment that a gradient is collected `.grad` is
  an AveragedGradient, so whatever is done to `.grad` after backward is done to the average;
- what came in another way (a backward under no_sync, an assignment to `.grad`) is averaged in step;
- reducers of one group send when backward ends, in the order in which they were made: gradients
  may reach them in an order of each rank's own, and on some ranks only.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero.direct import Work
from zero.gradients import AveragedGradient
from zero.partition import Partition, Piece, Span
from zero.wire import Wire


@dataclass(eq=False)
class Bucket:
    """A span of a flat tensor: parameters' values, and for a while their gradients."""

    span: Span
    data: Tensor
    shard: Tensor
    shard_offset: int
    pieces: list[tuple[nn.Parameter, Piece]]
    # Of these, what lies in this rank's shard.
    own: list[tuple[nn.Parameter, Piece]]
    # This rank's part of the averaged gradient, from backward until it is dropped.
    gradient: Tensor | None = None
    # Whether that is a part of `buffer`.
    in_place: bool = False
    # This rank's own gradients on their way out.
    buffer: Tensor | None = None
    missing: set[nn.Parameter] = field(default_factory=set)

    def fill(self, piece: Piece, gradient: Tensor | None) -> None:
        """Copy the parameter's gradient into the buffer; zeros where it has none."""
        if self.buffer is None:
            self.buffer = torch.empty_like(self.data)
            last = self.pieces[-1][1]
            self.buffer[last.offset + last.numel - self.span.start :].zero_()
        part = self.buffer[piece.offset - self.span.start :][: piece.numel]
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient.reshape(-1)[piece.start : piece.stop])

    def own_part(self) -> Tensor:
        """This rank's shard of the buffer."""
        assert self.buffer is not None
        at = self.shard_offset - self.span.start
        return self.buffer[at : at + self.shard.numel()]

    def average_of(self, piece: Piece) -> Tensor:
        """The averaged gradient of one of this rank's own pieces."""
        assert self.gradient is not None
        return self.gradient[piece.offset - self.shard_offset :][: piece.numel]


def make_buckets(
    partition: Partition, flat: Tensor, parameters: Sequence[nn.Parameter], rank: int
) -> list[Bucket]:
    """Cut `flat`, which holds `parameters` as `partition` says, into its buckets."""
    buckets = []
    for span in partition.spans:
        low, high = span.shard(rank, partition.world)
        pieces = [(parameters[p.index], p) for p in partition.pieces(span.start, span.stop)]
        data, shard = flat[span.start : span.stop], flat[low:high]
        own = [(parameters[p.index], p) for p in partition.pieces(low, high)]
        bucket = Bucket(span, data, shard, low, pieces, own)
        bucket.missing = {parameter for parameter, _ in pieces}
        buckets.append(bucket)
    return buckets


class _Key:
    """Names one average of one parameter: a new one after each that was dropped."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


# Of all groups: those of one have to find each other.
_reducers: WeakSet[Reducer] = WeakSet()


class Reducer:
    """Reduces buckets as backward fills them.

    `release=True` copies each gradient to its bucket's buffer, which lives until it is sent. Else
    gradients lie end to end in flat tensors for good, are sent from there, and this rank's part of
    the average takes the place of its own gradient there.
    """

    def __init__(self, wire: Wire, *, release: bool, in_flight: int = 2) -> None:
        self.wire = wire
        self.release = release
        self.in_flight = in_flight
        self.enabled = True
        self.buckets: list[Bucket] = []
        # The parameters' versions when all ranks had the same values, and those that any rank has
        # written to since, in place.
        self.versions: dict[nn.Parameter, int] = {}
        self.written: set[nn.Parameter] = set()
        self._where: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._own: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._flat: list[Tensor] = []
        # The number of our hook on each parameter.
        self._hooked: dict[nn.Parameter, int] = {}
        # The parameters that have an average, or one on its way.
        self._current: dict[nn.Parameter, _Key] = {}
        self._order: list[Bucket] | None = None
        self._ready_first: list[Bucket] = []
        self._launched = 0
        self._in_backward = False
        self._late: list[nn.Parameter] = []
        self._flying: deque[tuple[Bucket, Tensor, Tensor, Work]] = deque()
        if self._living():
            # What nobody uses any more may only wait to be collected.
            gc.collect()
        # The reducers of this group that live on any rank, by numbers that all ranks share.
        numbers = sorted({n for some in wire.objects(list(self._living())) for n in some})
        self._number = max(numbers, default=-1) + 1
        self._numbers: list[int] = []
        _reducers.add(self)
        for reducer in self._living().values():
            reducer._numbers = [*numbers, self._number]

    def add(self, buckets: list[Bucket], partition: Partition) -> None:
        """Take on the buckets of one more flat tensor; the next backward learns the order anew."""
        self.drain()
        if not self.release:
            flat = buckets[0].data.new_zeros(partition.numel)
            self._flat.append(flat)
            for bucket in buckets:
                bucket.buffer = flat[bucket.span.start : bucket.span.stop]
        self.buckets += buckets
        self._order = None
        for bucket in buckets:
            for parameter, piece in bucket.pieces:
                self._where.setdefault(parameter, []).append((bucket, piece))
            for parameter, piece in bucket.own:
                self._own.setdefault(parameter, []).append((bucket, piece))
        self.versions.update((p, p._version) for bucket in buckets for p, _ in bucket.pieces)
        self._hook()

    def finish(self) -> set[nn.Parameter]:
        """Complete the averages; return the parameters that have a gradient on any rank."""
        self._hook()
        self._take_assigned()
        parameters = list(self._where)
        grads = [p.grad for p in parameters]
        held = [isinstance(g, AveragedGradient) for g in grads]
        used = [g is not None and _used(g) for g in grads]
        dropped = [g is None and p in self._current for g, p in zip(grads, parameters, strict=True)]
        unsent = {p for p in parameters if _unsent(p)}
        dirty = [any(p in unsent for p, _ in bucket.pieces) for bucket in self.buckets]
        written = [self.versions.get(p, p._version) != p._version for p in parameters]
        agreed = self.wire.any(used + held + dropped + written + dirty)
        self.drain()
        anywhere = agreed()
        n = len(parameters)
        for index, parameter in enumerate(parameters):
            if anywhere[n + index] and anywhere[2 * n + index]:
                raise RuntimeError(
                    f"parameter {index}, of shape {tuple(parameter.shape)}, had its gradient "
                    "dropped after backward on some ranks and kept on others: set .grad to None, "
                    "or skip the step, on every rank or on none"
                )
        self._drop_what_was_dropped()
        some_wrote = anywhere[3 * n : 4 * n]
        self.written |= {p for p, wrote in zip(parameters, some_wrote, strict=True) if wrote}
        for bucket, again in zip(self.buckets, anywhere[4 * n :], strict=True):
            if again:
                for parameter, piece in bucket.pieces:
                    self._collect(parameter, [(bucket, piece)])
                self._launch(bucket)
        for parameter in unsent:
            self._mark_sent(parameter)
        self.drain()
        return {p for p, some in zip(parameters, anywhere, strict=False) if some}

    def note_versions(self) -> None:
        """Remember that all ranks have the same parameters now."""
        self.versions = {parameter: parameter._version for parameter in self._where}
        self.written.clear()

    def fetch(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """This rank's runs of elements of an average, once they have arrived."""
        parameter = gradient.key.parameter
        if self._current.get(parameter) is not gradient.key:
            raise RuntimeError(
                "this gradient is of an earlier step, and its memory was given to a later one: "
                "clone() what should last"
            )
        if self._in_backward:
            raise RuntimeError(
                "this gradient is on its way to other ranks, as backward is running: look at .grad "
                "after backward, or in a hook of a parameter that runs before it is collected"
            )
        self.drain()
        own = self._own.get(parameter, [])
        return [(p.start, p.stop, b.average_of(p)) for b, p in own if b.gradient is not None]

    def reset(self) -> None:
        """Forget the averages, and a backward that was broken off."""
        self.drain()
        self._current.clear()
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
        """Every tensor of gradients that this rank holds beside plain `.grad`s."""
        resting = [t for bucket in self.buckets for t in (bucket.gradient, bucket.buffer)]
        flying = [t for _, output, buffer, _ in self._flying for t in (output, buffer)]
        grads = [p.grad for p in self._where]
        resting += [g.local for g in grads if isinstance(g, AveragedGradient)]
        return self._flat + flying + [t for t in resting if t is not None]

    def _living(self) -> dict[int, Reducer]:
        """This rank's reducers over the same ranks, by their numbers."""
        return {r._number: r for r in _reducers if r.wire.same_ranks(self.wire)}

    def _hook(self) -> None:
        me = weakref.ref(self)

        def ready(parameter: Tensor) -> None:
            reducer = me()
            if reducer is not None and reducer.enabled:
                reducer._ready(parameter)  # type: ignore[arg-type]

        for parameter in self._where:
            if parameter.requires_grad and parameter not in self._hooked:
                handle = parameter.register_post_accumulate_grad_hook(ready)
                self._hooked[parameter] = handle.id

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._in_backward:
            self._begin_backward()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._take_late()
        # A hook that was registered later than ours still has to see the plain gradient.
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        ours = self._hooked[parameter]
        if next(reversed(hooks)) != ours:
            hooks[ours] = hooks.pop(ours)
            self._late.append(parameter)
        else:
            self._take(parameter)

    def _take_late(self) -> None:
        late, self._late = self._late, []
        for parameter in late:
            self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        self._collect(parameter, self._where[parameter])
        for bucket, _ in self._where[parameter]:
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._ready_first.append(bucket)
        self._mark_sent(parameter)
        if self._order is not None and len(self._numbers) == 1:
            while self._launched < len(self._order) and not self._order[self._launched].missing:
                self._launch(self._order[self._launched])
                self._launched += 1

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._take_assigned()
        self._drop_what_was_dropped()
        self.drain()

    def _end_backward(self) -> None:
        if not self._in_backward:
            # Another has ended it for all.
            return
        if len(self._numbers) == 1:
            self._finish_backward()
            return
        living, numbers = self._living(), self._numbers
        flags = [[n in living and living[n]._in_backward, n in living, n not in living]
                 for n in numbers]  # fmt: skip
        agreed = iter(self.wire.any([flag for each in flags for flag in each])())
        reached, alive, gone = zip(*zip(agreed, agreed, agreed, strict=True), strict=True)
        for reducer in living.values():
            reducer._numbers = [n for n, some in zip(numbers, alive, strict=True) if some]
        for number, some, lacking in zip(numbers, reached, gone, strict=True):
            if not some:
                continue
            if lacking:
                raise RuntimeError(
                    "backward reaches parameters of an optimizer that was deleted on some ranks: "
                    "keep it on every rank, or zero_grad() and delete it on every rank"
                )
            reducer = living[number]
            if not reducer._in_backward:
                reducer._begin_backward()
            reducer._finish_backward()
            reducer.drain()

    def _finish_backward(self) -> None:
        self._take_late()
        self._in_backward = False
        if self._order is None:
            self._order = self._agree_on_order()
        missing = {p for bucket in self.buckets for p in bucket.missing}
        for bucket in self._order[self._launched :]:
            for parameter, piece in bucket.pieces:
                if parameter in bucket.missing:
                    self._collect(parameter, [(bucket, piece)])
            self._launch(bucket)
        # What other ranks used has an average here too.
        for parameter in missing:
            if parameter.requires_grad or parameter.grad is not None:
                self._mark_sent(parameter)
        self._rewind()

    def _rewind(self) -> None:
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter, _ in bucket.pieces}
        self._launched = 0
        self._ready_first = []
        self._late = []

    def _take_assigned(self) -> None:
        """Let what a caller made of averages and put into `.grad` be the averages."""
        for parameter in self._where:
            given = parameter.grad
            if not isinstance(given, AveragedGradient) or given.parts is None:
                continue
            self.drain()
            parts = [part for part in given.parts if part[0] < part[1]]
            own = self._own.get(parameter, [])
            if [part[:2] for part in parts] != [(p.start, p.stop) for _, p in own]:
                raise RuntimeError(
                    f"the gradient assigned to a parameter of shape {tuple(parameter.shape)} is "
                    "made of another parameter's: p.grad.full_tensor(), called by every rank, "
                    "gathers that"
                )
            for (bucket, piece), (_, _, values) in zip(own, parts, strict=True):
                if bucket.gradient is None:
                    bucket.gradient, bucket.in_place = torch.zeros_like(bucket.shard), False
                bucket.average_of(piece).copy_(values)
            self._current[parameter] = key = _Key(parameter)
            parameter.grad = AveragedGradient(parameter, self, key, used=given.used)
            parameter.grad.local = given.local

    def _drop_what_was_dropped(self) -> None:
        """Give up the averages whose parameter's `.grad` a caller has set to something else."""
        dropped = [p for p in self._current if not _is_average(p, self._current[p])]
        if not dropped:
            return
        self.drain()
        for parameter in dropped:
            del self._current[parameter]
            for bucket, piece in self._own.get(parameter, []):
                if bucket.gradient is not None:
                    bucket.average_of(piece).zero_()
        for bucket in self.buckets:
            if not any(p in self._current for p, _ in bucket.own):
                bucket.gradient = None

    def _collect(self, parameter: nn.Parameter, where: list[tuple[Bucket, Piece]]) -> None:
        """Put this rank's own gradient where it is sent from."""
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient = gradient.local
        if gradient is not None and gradient.is_sparse:
            raise TypeError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)}: sharding "
                "needs dense gradients; use nn.Embedding(..., sparse=False)"
            )
        for bucket, piece in where:
            if bucket.gradient is not None and bucket.in_place:
                # The average of an earlier backward lies there, and is kept.
                bucket.gradient, bucket.in_place = bucket.gradient.clone(), False
            bucket.fill(piece, gradient)

    def _agree_on_order(self) -> list[Bucket]:
        seen = dict.fromkeys([*self._ready_first, *reversed(self.buckets)])
        place = {bucket: i for i, bucket in enumerate(self.buckets)}
        order = self.wire.objects([place[bucket] for bucket in seen])[0]
        return [self.buckets[i] for i in order]

    def _mark_sent(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient.used, gradient.local = _used(gradient), None
            return
        self._current[parameter] = key = _Key(parameter)
        used = gradient is not None
        parameter.grad = AveragedGradient(parameter, self, key, used=used)

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
            in_place = not self.release and self.wire.sums_in_place
            output = bucket.own_part() if in_place else torch.empty_like(bucket.shard)
            work = self.wire.reduce_scatter(output, buffer)
        self._flying.append((bucket, output, buffer, work))

    def _retire(self) -> None:
        bucket, output, _, work = self._flying.popleft()
        work.wait()
        # Eight bits have no arithmetic of their own.
        narrow = output.itemsize == 1
        if narrow:
            output.copy_(output.float() / self.wire.copies)
        else:
            output /= self.wire.copies
        if bucket.gradient is not None and narrow:
            bucket.gradient.copy_(bucket.gradient.float() + output.float())
        elif bucket.gradient is not None:
            bucket.gradient += output
        elif self.release:
            bucket.gradient = output
        else:
            # What was sent from there has gone.
            bucket.gradient = bucket.own_part()
            if output.data_ptr() != bucket.gradient.data_ptr():
                bucket.gradient.copy_(output)
            bucket.in_place = True


def _used(gradient: Tensor) -> bool:
    """Whether a backward of this rank has reached the parameter."""
    if isinstance(gradient, AveragedGradient):
        return gradient.used or gradient.local is not None
    return True


def _unsent(parameter: nn.Parameter) -> bool:
    """Whether this rank has a gradient that was not averaged yet."""
    gradient = parameter.grad
    if isinstance(gradient, AveragedGradient):
        return gradient.local is not None
    return gradient is not None


def _is_average(parameter: nn.Parameter, key: _Key) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, AveragedGradient) and gradient.key is key

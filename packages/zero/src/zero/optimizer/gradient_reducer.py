"""Averages of gradients, reduced bucket by bucket during backward; each rank keeps its shard.

Note [Lifetime of a gradient]
| state     | `parameter.grad`  | gradient's memory | next state                           |
|-----------|-------------------|-------------------|--------------------------------------|
| local     | plain tensor      | autograd's        | collected, by the parameter's hook   |
| collected | AveragedGradient  | `Bucket.buffer`   | in flight, if the bucket is complete |
| in flight | AveragedGradient  | `_Reduction`      | averaged, when it is waited for      |
| averaged  | AveragedGradient  | `Bucket.average`  | cleared                              |
| cleared   | set by the caller | none              | local, in the next backward          |

A gradient that has been collected is out of the caller's reach, so an edit of `.grad` after
backward edits the average. A later backward under `no_sync()` adds to
`AveragedGradient.unreduced`, which is a local gradient again; so is a plain tensor that the
caller assigns to `.grad`. `finish()` averages both.

Note [Order of reductions]
Collectives match only if all ranks launch them in the same order. Every backward launches every
bucket exactly once, also if no gradient of it is ready, in the order in which buckets became
ready on rank 0 in the first backward. If several reducers share a group, each rank may reach them
in a different order or not at all. They then launch when backward ends, in the order of their
construction.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero.gloo_collectives import Work
from zero.gradients.averaged import AveragedGradient
from zero.partition import Partition, Piece, Span
from zero.process_groups import Communicator

#: The number of reductions in progress at the same time.
MAX_IN_FLIGHT = 2


@dataclass(eq=False)
class Bucket:
    """A span of a flat tensor of parameters, and the gradients of that span."""

    span: Span
    #: The parameters' values in the span, and this rank's shard of them at `shard_offset`.
    data: Tensor
    shard: Tensor
    shard_offset: int
    #: The parts of parameters in the span, and those in this rank's shard.
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
        """Copy a piece of a gradient into the buffer; write zeros without a gradient."""
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
    """Cut `flat`, which contains `parameters` as laid out by `partition`, into buckets."""
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


class _AverageKey:
    """The identity of one average of one parameter, until that average is cleared."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


@dataclass(frozen=True)
class _Reduction:
    """A reduction in flight."""

    bucket: Bucket
    output: Tensor
    #: Kept alive until the reduction has read it.
    buffer: Tensor
    work: Work


#: The reducers of all groups: those that share a group coordinate their launches.
_reducers: WeakSet[GradientReducer] = WeakSet()


class GradientReducer:
    """The buckets that backward fills, and their reductions: Note [Lifetime of a gradient].

    release_gradients: True allocates a bucket's buffer when its first gradient is collected and
        frees it when the bucket has been sent (ZeRO stage 2). False keeps all gradients in
        persistent flat tensors, sends from there, and writes this rank's average over its local
        gradients (stage 1).
    """

    def __init__(self, communicator: Communicator, *, release_gradients: bool) -> None:
        self.communicator = communicator
        self.release_gradients = release_gradients
        #: False under `no_sync()`.
        self.enabled = True
        #: Called before the first collective of a backward.
        self.before_backward: Callable[[], None] = lambda: None
        self.buckets: list[Bucket] = []
        #: The parameters' versions when all ranks last had equal values.
        self.versions: dict[nn.Parameter, int] = {}
        #: The parameters that any rank has written to in place since then.
        self.written: set[nn.Parameter] = set()
        self._pieces: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._shard_pieces: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._flat_gradients: list[Tensor] = []
        #: The id of this reducer's hook on each parameter.
        self._hook_ids: dict[nn.Parameter, int] = {}
        self._hook_handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove_hooks, self._hook_handles)
        #: The parameters that have an average, or will have one when its reduction is waited for.
        self._keys: dict[nn.Parameter, _AverageKey] = {}
        #: See Note [Order of reductions]; None before the first backward.
        self._launch_order: list[Bucket] | None = None
        self._ready_order: list[Bucket] = []
        self._num_launched = 0
        self._in_backward = False
        self._postponed: list[nn.Parameter] = []
        self._in_flight: deque[_Reduction] = deque()
        if self._living_reducers():
            # Unreferenced reducers in reference cycles must not count as living.
            gc.collect()
        #: The numbers of the reducers of this group that exist on any rank; equal on all ranks.
        self._group_numbers: list[int] = []
        living = communicator.gather_objects(list(self._living_reducers()))
        others = sorted({number for numbers in living for number in numbers})
        self._number = max(others, default=-1) + 1
        _reducers.add(self)
        for reducer in self._living_reducers().values():
            reducer._group_numbers = [*others, self._number]

    def add(self, buckets: list[Bucket], partition: Partition) -> None:
        """Add the buckets of a flat tensor; the next backward determines a new launch order."""
        self.drain()
        if not self.release_gradients and buckets:
            flat = buckets[0].data.new_zeros(partition.numel)
            self._flat_gradients.append(flat)
            for bucket in buckets:
                bucket.buffer = flat[bucket.span.start : bucket.span.stop]
        self.buckets += buckets
        self._launch_order = None
        for bucket in buckets:
            for parameter, piece in bucket.pieces:
                self._pieces.setdefault(parameter, []).append((bucket, piece))
                self.versions[parameter] = parameter._version
            for parameter, piece in bucket.shard_pieces:
                self._shard_pieces.setdefault(parameter, []).append((bucket, piece))
        self._register_hooks()

    def finish(
        self, flags: Sequence[bool] = (), check: Callable[[Sequence[bool]], None] | None = None
    ) -> set[nn.Parameter]:
        """Average all remaining gradients; return the parameters with a gradient on any rank.

        `check` is called with `flags`, each set if any rank has passed it set.
        """
        self._register_hooks()
        self._adopt_assigned_averages()
        parameters = list(self._pieces)
        unreduced = {p for p in parameters if _has_unreduced_gradient(p)}
        is_used = [p.grad is not None and _is_used(p.grad) for p in parameters]
        is_averaged = [isinstance(p.grad, AveragedGradient) for p in parameters]
        is_cleared = [p.grad is None and p in self._keys for p in parameters]
        is_written = [self.versions.get(p, p._version) != p._version for p in parameters]
        is_dirty = [any(p in unreduced for p, _ in bucket.pieces) for bucket in self.buckets]
        agreed = self.communicator.any_rank(
            [*is_used, *is_averaged, *is_cleared, *is_written, *is_dirty, *flags]
        )
        self.drain()
        anywhere = agreed()
        n = len(parameters)
        used_anywhere = anywhere[:n]
        averaged_anywhere = anywhere[n : 2 * n]
        cleared_anywhere = anywhere[2 * n : 3 * n]
        written_anywhere = anywhere[3 * n : 4 * n]
        dirty_anywhere = anywhere[4 * n : 4 * n + len(is_dirty)]
        if check is not None:
            check(anywhere[4 * n + len(is_dirty) :])
        self._check_cleared_alike(parameters, averaged_anywhere, cleared_anywhere)
        self._discard_cleared_averages()
        self.written.update(p for p, flag in zip(parameters, written_anywhere, strict=True) if flag)
        for bucket, is_dirty_anywhere in zip(self.buckets, dirty_anywhere, strict=True):
            if is_dirty_anywhere:
                for parameter, piece in bucket.pieces:
                    self._collect(parameter, [(bucket, piece)])
                self._launch(bucket)
        for parameter in unreduced:
            self._mark_averaged(parameter)
        self.drain()
        return {p for p, flag in zip(parameters, used_anywhere, strict=True) if flag}

    def note_versions(self) -> None:
        """Record that all ranks have equal parameters now."""
        self.versions = {parameter: parameter._version for parameter in self._pieces}
        self.written.clear()

    def fetch_runs(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """Return this rank's runs of elements of an average; wait for it if it is in flight."""
        parameter = gradient.key.parameter
        if self._keys.get(parameter) is not gradient.key:
            raise RuntimeError(
                "this gradient belongs to an earlier step, and its memory was reused by a later "
                "one: clone() gradients that must survive the step"
            )
        if self._in_backward:
            raise RuntimeError(
                "this gradient is being reduced, because backward is running: read .grad after "
                "backward, or in a hook of a parameter that runs before the gradient is collected; "
                "do not wrap the model in DDP, which would average the gradients again"
            )
        self.drain()
        return [
            (piece.start, piece.stop, bucket.average_of(piece))
            for bucket, piece in self._shard_pieces.get(parameter, [])
            if bucket.average is not None
        ]

    def reset(self) -> None:
        """Discard all averages, and the state of a backward that an exception interrupted."""
        self.drain()
        self._keys.clear()
        self._in_backward = False
        self._prepare_next_backward()
        for bucket in self.buckets:
            bucket.average = None
            if self.release_gradients:
                bucket.buffer = None

    @property
    def shares_group(self) -> bool:
        """True if another reducer of the same group exists on any rank."""
        return len(self._group_numbers) > 1

    def join_backward(self) -> None:
        """Take part in a backward of the other ranks with gradients of zero."""
        self._begin_backward()
        self._finish_backward()

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        while self._in_flight:
            self._finish_oldest_reduction()

    def tensors(self) -> list[Tensor]:
        """Return every tensor of gradients that this rank stores outside of plain `.grad`s."""
        stored: list[Tensor | None] = [*self._flat_gradients]
        for reduction in self._in_flight:
            stored += [reduction.output, reduction.buffer]
        for bucket in self.buckets:
            stored += [bucket.average, bucket.buffer]
        for parameter in self._pieces:
            if isinstance(parameter.grad, AveragedGradient):
                stored.append(parameter.grad.unreduced)
        return [tensor for tensor in stored if tensor is not None]

    def _living_reducers(self) -> dict[int, GradientReducer]:
        """Return this rank's reducers of the same group by number."""
        return {
            reducer._number: reducer
            for reducer in _reducers
            if reducer.communicator.uses_same_groups(self.communicator)
        }

    def _register_hooks(self) -> None:
        reducer_ref = weakref.ref(self)

        def on_accumulated(parameter: Tensor) -> None:
            reducer = reducer_ref()
            if reducer is not None and reducer.enabled:
                reducer._gradient_ready(parameter)  # type: ignore[arg-type]

        for parameter in self._pieces:
            if parameter.requires_grad and parameter not in self._hook_ids:
                handle = parameter.register_post_accumulate_grad_hook(on_accumulated)
                self._hook_ids[parameter] = handle.id
                self._hook_handles.append(handle)

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        if not self._in_backward:
            self.before_backward()
            self._begin_backward()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        self._collect_postponed()
        # A hook that the caller registered after this reducer's must still see the plain gradient.
        # This reducer's hook moves to the end, and the gradient is collected at the next chance.
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        hook_id = self._hook_ids[parameter]
        if next(reversed(hooks)) != hook_id:
            hooks[hook_id] = hooks.pop(hook_id)
            self._postponed.append(parameter)
        else:
            self._collect_ready(parameter)

    def _collect_postponed(self) -> None:
        postponed = self._postponed
        self._postponed = []
        for parameter in postponed:
            self._collect_ready(parameter)

    def _collect_ready(self, parameter: nn.Parameter) -> None:
        """Collect a gradient, and launch the buckets that are next in order and complete."""
        self._collect(parameter, self._pieces[parameter])
        for bucket, _ in self._pieces[parameter]:
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._ready_order.append(bucket)
        self._mark_averaged(parameter)
        if self._launch_order is None or self.shares_group:
            return
        for bucket in self._launch_order[self._num_launched :]:
            if bucket.missing:
                break
            self._launch(bucket)
            self._num_launched += 1

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._adopt_assigned_averages()
        self._discard_cleared_averages()
        self.drain()

    def _end_backward(self) -> None:
        """Finish the backward of every reducer of the group that any rank has reached."""
        if not self._in_backward:
            # Another reducer of the group has finished this one's backward.
            return
        if not self.shares_group:
            self._finish_backward()
            return
        living = self._living_reducers()
        numbers = self._group_numbers
        is_reached = [n in living and living[n]._in_backward for n in numbers]
        is_alive = [n in living for n in numbers]
        is_deleted = [n not in living for n in numbers]
        anywhere = self.communicator.any_rank([*is_reached, *is_alive, *is_deleted])()
        count = len(numbers)
        reached = [n for n, flag in zip(numbers, anywhere[:count], strict=True) if flag]
        alive = [n for n, flag in zip(numbers, anywhere[count : 2 * count], strict=True) if flag]
        deleted = [n for n, flag in zip(numbers, anywhere[2 * count :], strict=True) if flag]
        for reducer in living.values():
            reducer._group_numbers = alive
        for number in reached:
            if number in deleted:
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
        """Launch the remaining buckets; parameters that were not reached contribute zeros."""
        self._collect_postponed()
        self._in_backward = False
        if self._launch_order is None:
            self._launch_order = self._agree_on_order()
        missing = {p for bucket in self.buckets for p in bucket.missing}
        for bucket in self._launch_order[self._num_launched :]:
            for parameter, piece in bucket.pieces:
                if parameter in bucket.missing:
                    self._collect(parameter, [(bucket, piece)])
            self._launch(bucket)
        # Other ranks may have used these parameters, so they have an average here too.
        for parameter in missing:
            if parameter.requires_grad or parameter.grad is not None:
                self._mark_averaged(parameter)
        self._prepare_next_backward()

    def _prepare_next_backward(self) -> None:
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter, _ in bucket.pieces}
        self._num_launched = 0
        self._ready_order = []
        self._postponed = []

    def _adopt_assigned_averages(self) -> None:
        """Copy the gradients that the caller computed from averages and assigned into the buckets.

        An example is `p.grad = p.grad * 2`.
        """
        for parameter in self._pieces:
            assigned = parameter.grad
            if not isinstance(assigned, AveragedGradient) or assigned.runs is None:
                continue
            self.drain()
            runs = [run for run in assigned.runs if run[0] < run[1]]
            pieces = self._shard_pieces.get(parameter, [])
            if [run[:2] for run in runs] != [(piece.start, piece.stop) for _, piece in pieces]:
                raise RuntimeError(
                    f"the gradient assigned to a parameter of shape {tuple(parameter.shape)} was "
                    "computed from another parameter's gradient: assign "
                    "p.grad.full_tensor(), called by every rank, instead"
                )
            for (bucket, piece), (_, _, values) in zip(pieces, runs, strict=True):
                if bucket.average is None:
                    bucket.average = torch.zeros_like(bucket.shard)
                    bucket.average_is_in_buffer = False
                bucket.average_of(piece).copy_(values)
            key = _AverageKey(parameter)
            self._keys[parameter] = key
            parameter.grad = AveragedGradient(parameter, self, key, is_used=assigned.is_used)
            parameter.grad.unreduced = assigned.unreduced

    def _check_cleared_alike(
        self, parameters: Sequence[nn.Parameter], averaged: Sequence[bool], cleared: Sequence[bool]
    ) -> None:
        """Raise if some ranks have cleared an average that other ranks have kept."""
        for index, parameter in enumerate(parameters):
            if averaged[index] and cleared[index]:
                raise RuntimeError(
                    f"parameter {index}, of shape {tuple(parameter.shape)}, had its gradient "
                    "cleared after backward on some ranks only: set .grad to None, or skip the "
                    "step, on every rank or on none"
                )

    def _discard_cleared_averages(self) -> None:
        """Discard the averages of parameters whose `.grad` the caller has replaced."""
        cleared = [p for p, key in self._keys.items() if not _has_average(p, key)]
        if not cleared:
            return
        self.drain()
        for parameter in cleared:
            del self._keys[parameter]
            for bucket, piece in self._shard_pieces.get(parameter, []):
                if bucket.average is not None:
                    bucket.average_of(piece).zero_()
        for bucket in self.buckets:
            if not any(parameter in self._keys for parameter, _ in bucket.shard_pieces):
                bucket.average = None

    def _collect(self, parameter: nn.Parameter, pieces: list[tuple[Bucket, Piece]]) -> None:
        """Copy a local gradient into the buffers of its buckets."""
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient = gradient.unreduced
        if gradient is not None and gradient.is_sparse:
            raise TypeError(
                f"expected dense gradients, got a sparse one for a parameter of shape "
                f"{tuple(parameter.shape)}: use nn.Embedding(..., sparse=False)"
            )
        for bucket, piece in pieces:
            bucket.move_average_out_of_buffer()
            bucket.copy_gradient(piece, gradient)

    def _agree_on_order(self) -> list[Bucket]:
        """Return the order in which buckets became ready on rank 0."""
        local_order = dict.fromkeys([*self._ready_order, *reversed(self.buckets)])
        index_of = {bucket: index for index, bucket in enumerate(self.buckets)}
        orders = self.communicator.gather_objects([index_of[bucket] for bucket in local_order])
        return [self.buckets[index] for index in orders[0]]

    def _mark_averaged(self, parameter: nn.Parameter) -> None:
        """Replace a collected local gradient in `.grad` by an AveragedGradient.

        It represents the average even while its reduction is in flight.
        """
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient.is_used = _is_used(gradient)
            gradient.unreduced = None
            return
        key = _AverageKey(parameter)
        self._keys[parameter] = key
        parameter.grad = AveragedGradient(parameter, self, key, is_used=gradient is not None)

    def _launch(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_oldest_reduction()
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

    def _finish_oldest_reduction(self) -> None:
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


def _remove_hooks(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _is_used(gradient: Tensor) -> bool:
    """Return True if a backward of this rank has reached the parameter."""
    if isinstance(gradient, AveragedGradient):
        return gradient.is_used or gradient.unreduced is not None
    return True


def _has_unreduced_gradient(parameter: nn.Parameter) -> bool:
    """Return True if this rank has a gradient that has not been averaged yet."""
    gradient = parameter.grad
    if isinstance(gradient, AveragedGradient):
        return gradient.unreduced is not None
    return gradient is not None


def _has_average(parameter: nn.Parameter, key: _AverageKey) -> bool:
    """Return True if `.grad` is the average identified by `key`."""
    gradient = parameter.grad
    return isinstance(gradient, AveragedGradient) and gradient.key is key

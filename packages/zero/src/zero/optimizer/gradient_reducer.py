"""Averages of gradients, reduced bucket by bucket during the backward pass.

Each rank stores its shard of the averages.

Note [Lifetime of a gradient]
| state     | `parameter.grad`  | gradient's memory | next state                           |
|-----------|-------------------|-------------------|--------------------------------------|
| local     | plain tensor      | autograd's        | collected, by the parameter's hook   |
| collected | AveragedGradient  | `Bucket.buffer`   | in flight, if the bucket is complete |
| in flight | AveragedGradient  | `ReductionQueue`  | averaged, when it is waited for      |
| averaged  | AveragedGradient  | `Bucket.average`  | cleared                              |
| cleared   | set by the caller | none              | local, in the next backward pass     |

The caller cannot access a collected gradient, so an edit of `.grad` after the backward pass edits
the average. `finish()` averages local gradients that no backward pass has reduced. They have three
sources:

- a backward pass under `no_sync()`, which adds to `AveragedGradient.unreduced`;
- a plain tensor that the caller has assigned to `.grad`;
- a reentrant checkpoint, which may add to a gradient that the same backward pass has collected.

Note [Order of reductions]
Collectives match only if all ranks launch them in the same order. Every backward pass outside
`no_sync()` launches every bucket exactly once, even if none of its gradients is ready. The order is
determined in the first backward pass after `add`: first the buckets in the order in which they
became ready on rank 0, then the other buckets from last to first. If several reducers share a
group, they launch their buckets when the backward pass ends (`shared_groups.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero.gradients.averaged import AveragedGradient, make_loss_error
from zero.optimizer.averages import Averages, has_unreduced_gradient, is_used
from zero.optimizer.gradient_buckets import Bucket
from zero.optimizer.reduction_queue import ReductionQueue
from zero.optimizer.shared_groups import GroupMember
from zero.parameter_checks import check_dense
from zero.partition import Partition, Piece
from zero.process_groups import Communicator


class GradientReducer:
    """The buckets that the backward pass fills, and their reductions.

    release_gradients: True allocates a bucket's buffer when its first gradient is collected and
        frees it when the bucket has been sent (ZeRO stage 2). False keeps all gradients in
        persistent flat tensors; the average overwrites this rank's shard of them (stage 1).
    """

    def __init__(self, communicator: Communicator, *, release_gradients: bool) -> None:
        self.communicator = communicator
        self.release_gradients = release_gradients
        #: False under `no_sync()`.
        self.enabled = True
        #: A function that runs at the first gradient of a backward pass, before any collective.
        self.before_backward: Callable[[], object] = lambda: None
        self.buckets: list[Bucket] = []
        #: The parameters' versions when all ranks last had equal values.
        self.versions: dict[nn.Parameter, int] = {}
        #: The parameters that any rank has written to in place since `versions` were recorded.
        self.written: set[nn.Parameter] = set()
        self._pieces: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._shard_pieces: dict[nn.Parameter, list[tuple[Bucket, Piece]]] = {}
        self._flat_gradients: list[Tensor] = []
        self._hook_handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove_hooks, self._hook_handles)
        self._averages = Averages()
        self._queue = ReductionQueue(communicator, release_gradients=release_gradients)
        #: See Note [Order of reductions]; None until the first backward pass after `add`.
        self._launch_order: list[Bucket] | None = None
        self._ready_order: list[Bucket] = []
        self._num_launched = 0
        #: True from the first gradient of a backward pass until all buckets are launched.
        self.in_backward = False
        #: A weak reference to the callback at the end of the backward pass. Only the engine keeps
        #: it alive, so the reference is dead if an exception has interrupted that pass.
        self._end_callback: Callable[[], Callable[[], None] | None] = lambda: None
        self._group_member = GroupMember(self, communicator)

    def add(self, buckets: list[Bucket], partition: Partition) -> None:
        """Add the buckets of a flat tensor; the next backward pass determines the launch order."""
        self._queue.drain()
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
        self._register_hooks(buckets)

    def finish(
        self, flags: Sequence[bool] = (), check: Callable[[Sequence[bool]], None] | None = None
    ) -> set[nn.Parameter]:
        """Average all remaining gradients; return the parameters with a gradient on any rank.

        `check` is called with the element-wise OR of `flags` over all ranks. Every rank must call
        this method. Raise RuntimeError if an exception interrupted the last backward pass, or if
        only some ranks have cleared a gradient.
        """
        if self.in_backward and self._end_callback() is None:
            raise RuntimeError(
                "an exception interrupted the last backward pass, so the gradients are incomplete: "
                "clear them with zero_grad(), and run the backward pass again"
            )
        self._adopt_edits()
        parameters = list(self._pieces)
        unreduced = {p for p in parameters if has_unreduced_gradient(p)}
        is_reached = [p.grad is not None and is_used(p.grad) for p in parameters]
        is_averaged = [isinstance(p.grad, AveragedGradient) for p in parameters]
        cleared = set(self._averages.list_cleared_parameters())
        is_cleared = [p in cleared for p in parameters]
        is_written = [self.versions.get(p, p._version) != p._version for p in parameters]
        is_dirty = [any(p in unreduced for p, _ in bucket.pieces) for bucket in self.buckets]
        agreed = self.communicator.launch_flag_reduction(
            is_reached, is_averaged, is_cleared, is_written, is_dirty, flags
        )
        self._queue.drain()
        used_anywhere, averaged_anywhere, cleared_anywhere, *remaining = agreed()
        written_anywhere, dirty_anywhere, flags_anywhere = remaining
        if check is not None:
            check(flags_anywhere)
        self._check_cleared_on_all_ranks(parameters, averaged_anywhere, cleared_anywhere)
        self._discard_cleared()
        self.written.update(compress(parameters, written_anywhere))
        for bucket, is_dirty_anywhere in zip(self.buckets, dirty_anywhere, strict=True):
            if is_dirty_anywhere:
                for parameter, piece in bucket.pieces:
                    self._copy_gradient(parameter, [(bucket, piece)])
                self._queue.launch(bucket)
        for parameter, is_used_anywhere in zip(parameters, used_anywhere, strict=True):
            # A parameter that only other ranks have used gets an average on this rank too.
            if parameter in unreduced or (is_used_anywhere and parameter.grad is None):
                self._averages.mark(parameter, self)
        self._queue.drain()
        return set(compress(parameters, used_anywhere))

    def record_versions(self) -> None:
        """Record that all ranks now have equal parameters."""
        self.versions = {parameter: parameter._version for parameter in self._pieces}
        self.written.clear()

    def fetch_runs(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """Return this rank's runs of an average: (start, stop, values).

        Wait for reductions in flight. Raise RuntimeError if the average was cleared, or while a
        backward pass is running.
        """
        parameter = gradient.key()
        if not self._averages.is_current(gradient.key):
            raise RuntimeError(
                "this gradient belongs to an earlier step, and its memory was reused by a later "
                "one: clone() gradients that must survive the step"
            )
        if self.in_backward:
            raise RuntimeError(
                "this gradient is being reduced, because the backward pass is running: read .grad "
                "after it, or in a hook that is registered before the optimizer is constructed; do "
                "not wrap the model in DDP, which would average the gradients again"
            )
        self._queue.drain()
        return [
            (piece.start, piece.stop, bucket.get_average(piece))
            for bucket, piece in self._shard_pieces.get(parameter, [])
            if bucket.average is not None
        ]

    def reset(self) -> None:
        """Discard all averages, and the state of a backward pass that an exception interrupted."""
        self._discard_backward()
        self._averages = Averages()
        for bucket in self.buckets:
            bucket.average = None
            if self.release_gradients:
                bucket.buffer = None

    @property
    def shares_group(self) -> bool:
        """True if another reducer of the same group exists on any rank."""
        return len(self._group_member.numbers) > 1

    def list_averaged_indices(self) -> list[int]:
        """Return the indices of the parameters whose `.grad` is an average or includes one."""
        cleared = set(self._averages.list_cleared_parameters())
        return [
            index
            for index, parameter in enumerate(self._pieces)
            if parameter in self._averages and parameter not in cleared
        ]

    def clear_other_gradients(self, indices: Sequence[int]) -> None:
        """Clear `.grad` of all parameters except those with these indices."""
        averaged = set(indices)
        for index, parameter in enumerate(self._pieces):
            if index not in averaged:
                parameter.grad = None

    def join_backward(self) -> None:
        """Finish the ranks' backward pass; parameters that this rank has not reached add zeros."""
        if not self.in_backward:
            self._begin_backward()
        self._finish_backward()
        self._queue.drain()

    def list_tensors(self) -> list[Tensor]:
        """Return all tensors in which this rank stores gradients, except plain `.grad` tensors."""
        stored: list[Tensor | None] = [*self._flat_gradients, *self._queue.list_tensors()]
        for bucket in self.buckets:
            stored += [bucket.average, bucket.buffer]
        for parameter in self._pieces:
            if isinstance(parameter.grad, AveragedGradient):
                stored.append(parameter.grad.unreduced)
        return [tensor for tensor in stored if tensor is not None]

    def _register_hooks(self, buckets: Sequence[Bucket]) -> None:
        reducer_ref = weakref.ref(self)

        def mark_ready(parameter: Tensor) -> None:
            gradient = parameter.grad
            # If a backward pass has added to an edited average, `unreduced` is not None.
            is_whole = isinstance(gradient, AveragedGradient) and gradient.unreduced is None
            if is_whole and getattr(gradient, "runs", None) is not None:
                raise make_loss_error()
            reducer = reducer_ref()
            if reducer is not None and reducer.enabled:
                reducer._mark_gradient_ready(parameter)  # type: ignore[arg-type]

        for parameter in dict.fromkeys(p for bucket in buckets for p, _ in bucket.pieces):
            # A frozen parameter may become trainable, but torch refuses hooks while it is frozen.
            is_trainable = parameter.requires_grad
            parameter.requires_grad_(True)
            handle = parameter.register_post_accumulate_grad_hook(mark_ready)
            parameter.requires_grad_(is_trainable)
            self._hook_handles.append(handle)

    def _mark_gradient_ready(self, parameter: nn.Parameter) -> None:
        """Collect a gradient, and launch the next buckets in order as long as they are complete."""
        if self.in_backward and self._end_callback() is None:
            self._discard_backward()
        if not self.in_backward:
            self.before_backward()
            self._begin_backward()
            callback = partial(GradientReducer._end_backward, self)
            self._end_callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        if any(parameter not in bucket.missing for bucket, _ in self._pieces[parameter]):
            # Two reentrant checkpoints use this parameter. The first part of its gradient may be in
            # flight, so this part stays local until `finish`.
            return
        self._copy_gradient(parameter, self._pieces[parameter])
        for bucket, _ in self._pieces[parameter]:
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._ready_order.append(bucket)
        self._averages.mark(parameter, self)
        if self._launch_order is None or self.shares_group:
            return
        for bucket in self._launch_order[self._num_launched :]:
            if bucket.missing:
                break
            self._queue.launch(bucket)
            self._num_launched += 1

    def _begin_backward(self) -> None:
        self._adopt_edits()
        self._discard_cleared()
        self._queue.drain()
        self.in_backward = True

    def _end_backward(self) -> None:
        """Finish this backward pass.

        If reducers share a group, finish it for each reducer that any rank has reached.
        """
        if not self.in_backward:
            # The callback of another reducer of the group has finished this backward pass.
            return
        if not self.shares_group:
            self._finish_backward()
            return
        for reducer in self._group_member.find_reached_reducers():
            reducer.join_backward()

    def _finish_backward(self) -> None:
        """Launch the remaining buckets; parameters that were not reached contribute zeros."""
        self.in_backward = False
        if self._launch_order is None:
            self._launch_order = self._agree_on_order()
        missing = {p for bucket in self.buckets for p in bucket.missing}
        for bucket in self._launch_order[self._num_launched :]:
            for parameter, piece in bucket.pieces:
                if parameter in bucket.missing:
                    self._copy_gradient(parameter, [(bucket, piece)])
            self._queue.launch(bucket)
        # Other ranks may have used these parameters, so this rank has an average of them too.
        for parameter in missing:
            if parameter.requires_grad or parameter.grad is not None:
                self._averages.mark(parameter, self)
        self._prepare_next_backward()

    def _discard_backward(self) -> None:
        """Discard the state of a backward pass that an exception interrupted."""
        self._queue.drain()
        self.in_backward = False
        self._prepare_next_backward()

    def _prepare_next_backward(self) -> None:
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter, _ in bucket.pieces}
        self._num_launched = 0
        self._ready_order = []

    def _adopt_edits(self) -> None:
        """Copy averages that the caller has assigned to `.grad` into the buckets."""
        for parameter in self._pieces:
            if self._averages.is_assigned(parameter):
                self._queue.drain()
                self._averages.adopt(parameter, self._shard_pieces.get(parameter, []), self)

    def _discard_cleared(self) -> None:
        cleared = self._averages.list_cleared_parameters()
        if cleared:
            self._queue.drain()
            self._averages.discard(cleared, self.buckets, self._shard_pieces)

    def _check_cleared_on_all_ranks(
        self, parameters: Sequence[nn.Parameter], averaged: Sequence[bool], cleared: Sequence[bool]
    ) -> None:
        """Raise RuntimeError if some ranks have cleared an average that other ranks have kept."""
        for index, parameter in enumerate(parameters):
            if averaged[index] and cleared[index]:
                raise RuntimeError(
                    f"parameter {index}, of shape {tuple(parameter.shape)}, had its gradient "
                    "cleared or replaced after the backward pass on some ranks only: assign to "
                    ".grad, or skip the step, on every rank or on none"
                )

    def _copy_gradient(self, parameter: nn.Parameter, pieces: list[tuple[Bucket, Piece]]) -> None:
        """Copy a local gradient, or zeros if there is none, into the buffers of its buckets."""
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient = gradient.unreduced
        check_dense(gradient)
        for bucket, piece in pieces:
            bucket.move_average_out_of_buffer()
            bucket.copy_gradient(piece, gradient)

    def _agree_on_order(self) -> list[Bucket]:
        """Return the buckets by Note [Order of reductions]; every rank must call this method."""
        local_order = dict.fromkeys([*self._ready_order, *reversed(self.buckets)])
        index_of = {bucket: index for index, bucket in enumerate(self.buckets)}
        orders = self.communicator.gather_objects([index_of[bucket] for bucket in local_order])
        return [self.buckets[index] for index in orders[0]]


def _remove_hooks(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()

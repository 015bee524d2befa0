"""The reducer: from the final gradient of each parameter to its mean over the ranks."""

# Note [Gradient lifecycle]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# 1. `mark_ready`: autograd has accumulated the gradient of a parameter and calls its hook. The
#    first gradient of a synchronized backward pass opens a step.
# 2. `_copy_in`: the gradient is multiplied by the scale (1 / world_size for a mean) and copied into
#    its bucket, and `.grad` becomes a view of it. Small gradients wait until the bucket is full and
#    are copied together.
# 3. `launch_ready_buckets`: buckets are launched in index order, which is the same on every rank.
#    Otherwise ranks would sum buckets that do not match.
# 4. `launch_all_reduce`: the bucket is reduced while autograd computes the remaining gradients.
# 5. `finish`: at the end of the backward pass, copy in gradients of earlier passes, launch the
#    remaining buckets, wait for all of them, and set `.grad` of parameters without a gradient here.
# After the first step, `rebuild_buckets` assigns parameters in the order in which gradients became
# ready on rank 0, so that buckets fill one after the other.
#
# `.grad` may already be the mean of an earlier step. That mean is equal on all ranks, so averaging
# (old mean + new gradient) leaves the old mean unchanged if all ranks participate.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Bucket, assign_buckets, make_bucket
from ddp.communication import BucketReduction, Compression
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.gradient_parts import GradientParts
from ddp.observers import FinishedStep, Observer
from ddp.options import Options
from ddp.process_group import ReduceGroup

#: Gradients up to this many bytes are copied together, because one call for all costs less than one
#: call per gradient. Larger gradients are copied immediately, so that originals and copies of the
#: whole model are never in memory together.
SMALL_BYTES = 2**16

#: The second collective of a bucket is launched once this many further buckets have been launched.
#: By then the first collective has most likely completed, and all ranks launch their collectives in
#: the same order.
SECOND_COLLECTIVE_LAG = 2


class Reducer:
    """The buckets of a model. See Note [Gradient lifecycle].

    Args:
        parameters: trained parameters by name.
        options: bucket sizes and flags of the model.
        group: ranks to average over.
        failures: attribution of errors to ranks.
        compression: method that reduces a bucket.
        observers: collaborators, called in this order.
        try_open_step: called for a gradient outside a step; returns True if it opened a step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: Options,
        group: ReduceGroup,
        failures: FailureAttribution,
        compression: Compression,
        observers: Sequence[Observer],
        *,
        try_open_step: Callable[[], bool],
    ) -> None:
        self.parameters = list(parameters.values())
        self.names = list(parameters)
        self.compression = compression
        self.buckets: list[Bucket] = []
        #: Bucket and slot of each parameter.
        self.slots: dict[int, tuple[Bucket, int]] = {}
        #: Reductions of the current step, in the order of launches.
        self.reductions: list[BucketReduction] = []
        #: Reductions whose current collective is polled for the time of its completion.
        self._polled: list[BucketReduction] = []
        #: True from the first gradient of a step until `finish`.
        self.is_open = False
        self.num_steps = 0
        #: Factor that each gradient is multiplied by before the sum.
        self.scale = 1.0
        #: Indices of parameters whose hook did not run on this rank in the current step.
        self.missing: list[int] = []
        #: The expected order of gradients: the reverse order of registration until the first step
        #: has recorded the real one.
        self.order = list(reversed(range(len(self.parameters))))
        self._options = options
        self._group = group
        self._failures = failures
        self._observers = observers
        self._try_open_step = try_open_step
        self._bucket_bytes = options.bucket_bytes_for(self.parameters)
        self._num_launched = 0
        self._has_rebuilt = False
        self._ready_order: dict[int, None] = {}
        self._parts = GradientParts(len(self.parameters)) if options.static_graph else None
        # Fast path: hooks of small gradients that are not the last of their bucket only append
        # their index. The next full copy, or `finish`, copies them in.
        self._deferrable: frozenset[int] = frozenset()
        self._deferring: frozenset[int] = frozenset()
        self._deferred: list[int] = []
        self._allocate_buckets(assign_buckets(self.parameters, self.order, self._bucket_bytes))

    def mark_ready(self, index: int, _: Tensor) -> None:
        """Handle the final gradient of a parameter; this is the hook on each parameter."""
        if index in self._deferring:
            self._deferred.append(index)
            return
        if self.is_open or self._try_open_step():
            if self.num_steps == 0:
                self._ready_order.setdefault(index)
            if self._parts is None or not self._parts.has_more(index):
                self._copy_in_deferred()
                self._copy_in(*self.slots[index])
                self.launch_ready_buckets()
                return
        # Outside a step, or before the last part of a gradient: accumulate without scaling.
        bucket, slot = self.slots[index]
        if slot in bucket.ready:
            self._refuse_parts(bucket, slot)
        bucket.move_in(slot)

    def start(self) -> None:
        """Open a step: gradients that become ready from now on are final."""
        self.is_open = True
        self._num_launched = 0
        self.missing = []
        self.rebuild_buckets()
        for bucket in self.buckets:
            bucket.preserve_aliased_grads()
        for observer in self._observers:
            observer.on_step_start(self.parameters)
        self.scale = 1 / self._group.world_size if self.compression.uses_scaled_gradients else 1.0
        if self._parts is not None:
            self._parts.start_step()
        else:
            self._deferring = self._deferrable

    def launch_ready_buckets(
        self, *, is_participating: bool = True, is_finishing: bool = False
    ) -> None:
        """Launch full buckets in index order, because ranks must launch in the same order.

        With a communication hook on CPUs, a bucket is launched only after the one before it has
        been reduced. If `is_finishing`, this method waits for that.
        """
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if len(bucket.ready) < len(bucket.indices):
                return
            if self.reductions and self.reductions[-1].blocks_next_bucket:
                if not (is_finishing or self.reductions[-1].is_hook_completed):
                    return
                self.reductions[-1].advance()
            bucket.copy_in_deferred(self.scale)
            self.launch_all_reduce(bucket, is_participating=is_participating)
            self._num_launched += 1

    def launch_all_reduce(self, bucket: Bucket, *, is_participating: bool) -> None:
        """Start summing a bucket over the ranks."""
        for observer in self._observers:
            observer.before_bucket_launch(bucket, is_participating=is_participating)
        self._polled = [other for other in self._polled if not other.poll()]
        reduction = BucketReduction(bucket, self.compression, self._group, self._failures)
        self.reductions.append(reduction)
        self._polled.append(reduction)
        if len(self.reductions) > SECOND_COLLECTIVE_LAG:
            earlier = self.reductions[-1 - SECOND_COLLECTIVE_LAG]
            if earlier.has_next:
                earlier.advance()
                self._polled.append(earlier)

    def finish(self, *, is_participating: bool = True) -> set[int]:
        """Launch the remaining buckets, wait for all, and close the step.

        Returns the indices of parameters for which no rank has a gradient. With
        `is_participating=False` this rank contributes zeros, so that the other ranks can complete
        their step.
        """
        step = FinishedStep(self.buckets, is_participating, wait_start=time.perf_counter())
        self._deferring = frozenset()
        self._copy_in_deferred()
        for bucket in self.buckets:
            if is_participating:
                self._fill(bucket)
                self.launch_ready_buckets(is_finishing=True)
            else:
                bucket.fill_with_zeros()
        self.launch_ready_buckets(is_participating=is_participating, is_finishing=True)
        self._wait()
        self.num_steps += 1
        self.is_open = False
        try:
            for observer in self._observers:
                observer.on_step_end(step)
            if is_participating:
                for bucket in self.buckets:
                    bucket.set_final_grads(step.unused)
            return step.unused
        finally:
            for bucket in self.buckets:
                bucket.clear()

    def rebuild_buckets(self) -> None:
        """Reassign the buckets once, after the first step, in the ready order of rank 0.

        This is a collective. Old buckets are freed before new ones are allocated; only accumulated
        gradients are in memory twice for a short time.
        """
        if self.num_steps != 1 or self._has_rebuilt or not self.parameters:
            return
        self._has_rebuilt = True
        others = [index for index in self.order if index not in self._ready_order]
        self.order = self._broadcast_order([*self._ready_order, *others])
        assignment = assign_buckets(self.parameters, self.order, self._bucket_bytes)
        if assignment != [bucket.indices for bucket in self.buckets]:
            accumulated = self._detach_buckets()
            self._allocate_buckets(assignment)
            for index, gradient in accumulated.items():
                self.parameters[index].grad = gradient
                bucket, slot = self.slots[index]
                bucket.move_in(slot)
        # The last gradient of a bucket launches it and is therefore not deferred.
        small = set()
        for bucket in self.buckets:
            for index, size in zip(bucket.indices[:-1], bucket.slot_bytes, strict=False):
                if size <= SMALL_BYTES:
                    small.add(index)
        self._deferrable = frozenset(small)

    def release(self) -> None:
        """Replace each `.grad` that is a view of a bucket by a copy."""
        for bucket in self.buckets:
            bucket.release()

    def _allocate_buckets(self, assignment: Sequence[Sequence[int]]) -> None:
        for number, indices in enumerate(assignment):
            bucket = make_bucket(
                indices,
                self.parameters,
                self._options.allocate,
                self._group.process_group,
                names=self.names,
                gradient_as_view=self._options.gradient_as_bucket_view,
            )
            bucket.index = number
            bucket.is_last = number == len(assignment) - 1
            self.buckets.append(bucket)
            for slot, index in enumerate(indices):
                self.slots[index] = (bucket, slot)

    def _detach_buckets(self) -> dict[int, Tensor]:
        """Drop all buckets; return copies of the gradients that were views of them."""
        accumulated: dict[int, Tensor] = {}
        while self.buckets:
            bucket = self.buckets.pop()
            for slot, index in enumerate(bucket.indices):
                del self.slots[index]
                if bucket.holds_grad(slot):
                    accumulated[index] = bucket.views[slot].clone()
                    bucket.parameters[slot].grad = None
            del bucket
        return accumulated

    def _broadcast_order(self, order: Sequence[int]) -> list[int]:
        device = self.parameters[0].device
        indices = torch.tensor(order, device=device)
        description = "the agreement on the order of buckets"
        group = self._group.process_group
        with self._failures.attribute(description):
            work = dist.broadcast(indices, group=group, group_src=0, async_op=True)
        self._failures.wait(work, description, poll=device.type == "cpu")
        agreed: list[int] = indices.tolist()
        return agreed

    def _copy_in_deferred(self) -> None:
        deferred = self._deferred
        self._deferred = []
        for index in deferred:
            self._copy_in(*self.slots[index])

    def _copy_in(self, bucket: Bucket, slot: int) -> None:
        if slot in bucket.ready:
            self._refuse_parts(bucket, slot)
        bucket.ready.add(slot)
        if bucket.slot_bytes[slot] > SMALL_BYTES:
            bucket.copy_in(slot, self.scale)
        else:
            bucket.deferred.append(slot)

    def _fill(self, bucket: Bucket) -> None:
        """Copy in gradients that no hook reported in this step, and mark the missing ones."""
        if len(bucket.ready) == len(bucket.indices):
            return
        for slot, index in enumerate(bucket.indices):
            if slot in bucket.ready:
                continue
            self.missing.append(index)
            if bucket.parameters[slot].grad is None:
                bucket.mark_missing(slot)
            else:
                self._copy_in(bucket, slot)

    def _wait(self) -> None:
        # Each round waits for the current collective of every bucket and launches the bucket's next
        # one, so that the next collectives of all buckets overlap.
        for reduction in self._polled:
            reduction.poll()
        self._polled = []
        while running := [reduction for reduction in self.reductions if not reduction.is_done]:
            for reduction in running:
                reduction.advance()
        for reduction in self.reductions:
            for observer in self._observers:
                observer.on_bucket_reduced(reduction)
        self.reductions = []

    def _refuse_parts(self, bucket: Bucket, slot: int) -> None:
        reason = (
            f"one backward pass computed the gradient of {bucket.names[slot]!r} in several parts, "
            "and the first part was reduced as if it were final"
        )
        for observer in self._observers:
            observer.on_error(reason)
        raise RuntimeError(
            f"Expected to mark a variable ready only once. On rank {self._group.rank} {reason}; "
            "pass static_graph=True, or use checkpoint(..., use_reentrant=False)"
        )

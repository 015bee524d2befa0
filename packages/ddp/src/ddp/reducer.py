"""The reducer averages the gradients of a model over the ranks."""

# Note [Gradient lifecycle]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# 1. `mark_ready`: autograd has accumulated the gradient of a parameter and calls its hook. The
#    first gradient of a synchronized backward pass opens a step.
# 2. `_add_to_bucket`: the gradient is multiplied by the scale (1 / world_size for a mean) and
#    copied into its bucket. `.grad` becomes a view of the bucket, unless the caller passed
#    `gradient_as_bucket_view=False`. Small gradients are copied together when the bucket is full.
# 3. `launch_ready_buckets`: buckets are launched in index order, which is the same on every rank.
#    Otherwise ranks would sum buckets that do not match.
# 4. `launch_all_reduce`: the bucket is reduced while autograd computes the remaining gradients.
#    Compression and communication hooks replace this all-reduce with other collectives.
# 5. `finish`: at the end of the backward pass, copy in gradients of earlier passes, launch the
#    remaining buckets and wait for all of them. Then store the mean in each `.grad` that is not a
#    view of its bucket.
# After the first step, buckets are assigned in the order in which gradients became ready on rank 0
# (assignment.py).
#
# `.grad` may already be the mean of an earlier step. This mean is equal on all ranks, so averaging
# (old mean + new gradient) leaves the old mean unchanged if all ranks participate.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.aliased_gradients import contribute_zeros, move_gradient_in, preserve_aliased_grads
from ddp.assignment import BucketAssignment
from ddp.bucket import Bucket
from ddp.communication import Collective, RunningReductions, all_reduce_buffer
from ddp.consistency.gradient_parts import GradientParts
from ddp.extensions import Extension, Step
from ddp.options import Options
from ddp.process_group import ReduceGroup

#: Gradients up to this many bytes are copied together, because one call for all costs less than one
#: call per gradient. Larger gradients are copied immediately, so that originals and copies of the
#: whole model are never in memory together.
SMALL_BYTES = 2**16


class Reducer:
    """The algorithm that averages the gradients of a model. See Note [Gradient lifecycle].

    Args:
        parameters: trained parameters by name.
        extensions: optional failure attribution, metering, checks across ranks and compression,
            called in this order.
        try_open_step: called for a gradient outside a step; returns True if it opened a step.
        on_failure: called with the reason before this rank raises an error within a step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: Options,
        group: ReduceGroup,
        extensions: Sequence[Extension],
        *,
        try_open_step: Callable[[], bool],
        on_failure: Callable[[str], None],
    ) -> None:
        self.parameters = list(parameters.values())
        self.names = list(parameters)
        self.extensions = extensions
        self.assignment = BucketAssignment(
            self.parameters, self.names, options, group, self._attribute_errors
        )
        #: True from `start` until `finish` has waited for all buckets.
        self.is_open = False
        self.num_steps = 0
        #: The current step, or the last one.
        self.step = Step(self.parameters, self.buckets)
        self._group = group
        self._try_open_step = try_open_step
        self._on_failure = on_failure
        self.reductions = RunningReductions(self._attribute_errors)
        self._num_launched = 0
        self._parts = GradientParts(len(self.parameters)) if options.static_graph else None
        self._allows_unused = options.find_unused_parameters or options.static_graph

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order of launches."""
        return self.assignment.buckets

    def mark_ready(self, index: int, parameter: Tensor) -> None:
        """Add a gradient to its bucket if it is final. This is the hook on each parameter."""
        if self.is_open or self._try_open_step():
            if self.num_steps == 0:
                self.assignment.record_ready(index)
            if self._parts is None or not self._parts.has_more(index):
                bucket, slot = self.assignment.slots[index]
                if parameter.grad is None and bucket.is_undefined(slot):
                    if self._allows_unused:
                        return  # `finish` marks the gradient as missing.
                    parameter.grad = torch.zeros_like(parameter)
                self._add_to_bucket(bucket, slot)
                self.launch_ready_buckets()
                return
        # The gradient is not part of a step, or another part of it follows: accumulate it unscaled.
        bucket, slot = self.assignment.slots[index]
        if slot in bucket.ready:
            self._raise_gradient_in_parts(bucket, slot)
        move_gradient_in(bucket, slot)

    def start(self) -> None:
        """Open a step: gradients that become ready from now on are final."""
        self.is_open = True
        self._num_launched = 0
        self.rebuild_buckets()
        for bucket in self.buckets:
            preserve_aliased_grads(bucket)
        # The sum over the ranks of grad / world_size is the mean.
        self.step = Step(self.parameters, self.buckets, scale=1 / self._group.world_size)
        # The checks detect whether an optimizer has changed the weights since the last step. A
        # communication hook sets the scale to 1, because it divides gradients itself.
        for extension in self.extensions:
            extension.on_step_start(self.step)
        if self._parts is not None:
            self._parts.start_step()

    def rebuild_buckets(self) -> None:
        """Assign the parameters to new buckets once, after the first step. This is a collective."""
        if self.num_steps != 1:
            return
        try:
            self.assignment.rebuild()
        except BaseException as error:
            # The other ranks may have an order that this rank has not received, or the old buckets
            # have been freed. So this rank cannot continue.
            self._on_failure(f"the buckets could not be rebuilt: {error!r}")
            raise

    def launch_ready_buckets(self) -> None:
        """Launch full buckets in index order, so that ranks sum the same buckets."""
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if len(bucket.ready) < len(bucket.indices):
                return
            # A wait in a gradient hook could deadlock with collectives that the model calls.
            if not self.step.wait_start and self.reductions.would_wait():
                return
            bucket.copy_in_deferred(self.step.scale)
            self.launch_all_reduce(bucket)
            self._num_launched += 1

    def launch_all_reduce(self, bucket: Bucket) -> None:
        """Start summing a bucket over the ranks."""
        # The checks write the flags of this rank after the gradients.
        for extension in self.extensions:
            extension.before_bucket_launch(self.step, bucket)
        self.reductions.launch(bucket, self._launch_collective)

    def _launch_collective(self, bucket: Bucket) -> Collective:
        # A compression or a communication hook launches its own collectives instead.
        for extension in self.extensions:
            collective = extension.launch(bucket, self._group)
            if collective is not None:
                return collective
        return all_reduce_buffer(bucket, self._group)

    @contextmanager
    def _attribute_errors(self, description: str, work: dist.Work | None = None) -> Iterator[None]:
        # Failure attribution replaces the error of a lost connection with one that names the rank.
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.attribute_errors(description, work))
            yield

    def finish(self, *, is_participating: bool = True) -> set[int]:
        """Launch the remaining buckets, wait for all, and close the step.

        Returns the indices of parameters for which no rank has a gradient. With
        `is_participating=False` this rank contributes zeros, so that the other ranks can complete
        their step.
        """
        step = self.step
        step.is_participating = is_participating
        step.wait_start = time.perf_counter()
        for bucket in self.buckets:
            if is_participating:
                self._fill(bucket)
                # The reduction of this bucket overlaps with filling the next one.
                self.launch_ready_buckets()
            else:
                contribute_zeros(bucket)
        self.launch_ready_buckets()
        reductions = self.reductions.wait()
        self.num_steps += 1
        self.is_open = False
        try:
            # The meter records the step. The agreement check evaluates the summed flags, and raises
            # an error on every rank if ranks differ.
            for extension in self.extensions:
                extension.on_step_end(step, reductions)
            if is_participating:
                for bucket in self.buckets:
                    bucket.set_final_grads(step.unused)
            return step.unused
        finally:
            for bucket in self.buckets:
                bucket.clear()

    def _add_to_bucket(self, bucket: Bucket, slot: int) -> None:
        """Copy a final gradient into its bucket, or defer the copy if the gradient is small."""
        if slot in bucket.ready:
            self._raise_gradient_in_parts(bucket, slot)
        bucket.ready.add(slot)
        if bucket.slot_bytes[slot] > SMALL_BYTES:
            bucket.copy_in(slot, self.step.scale)
        else:
            bucket.deferred.append(slot)

    def _fill(self, bucket: Bucket) -> None:
        """Copy in gradients that `mark_ready` did not add, and mark missing gradients."""
        if len(bucket.ready) == len(bucket.indices):
            return
        for slot, parameter in enumerate(bucket.parameters):
            if slot in bucket.ready:
                continue
            if parameter.grad is None:
                bucket.mark_missing(slot)
            else:
                self._add_to_bucket(bucket, slot)

    def _raise_gradient_in_parts(self, bucket: Bucket, slot: int) -> None:
        reason = (
            f"one backward pass computed the gradient of {bucket.names[slot]!r} in several parts, "
            "and the first part was reduced as if it were final"
        )
        self._on_failure(reason)
        raise RuntimeError(
            f"Expected to mark a variable ready only once. On rank {self._group.rank} {reason}; "
            "pass static_graph=True, or use checkpoint(..., use_reentrant=False)"
        )

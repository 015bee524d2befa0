"""The assignment of parameters to buckets, which changes once after the first step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddp.bucket import Bucket, check_separate_memory, make_bucket
from ddp.communication import AttributeErrors, run_collective
from ddp.options import Options
from ddp.process_group import ReduceGroup


class BucketAssignment:
    """The buckets of a model, and the bucket and slot of each parameter.

    Before the first step, gradients are expected in the reverse order of registration. The first
    step records the order in which they become ready. `rebuild` then reassigns the parameters, so
    that buckets become full in the order of launches.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        options: Options,
        group: ReduceGroup,
        attribute_errors: AttributeErrors,
    ) -> None:
        #: The buckets in the order of launches.
        self.buckets: list[Bucket] = []
        #: Bucket and slot of each parameter, by the index of the parameter.
        self.slots: dict[int, tuple[Bucket, int]] = {}
        #: Indices of the parameters in the expected order of gradients.
        self.order = list(reversed(range(len(parameters))))
        self._parameters = parameters
        self._names = names
        self._options = options
        self._group = group
        self._attribute_errors = attribute_errors
        self._bucket_bytes = options.compute_bucket_bytes(parameters)
        self._ready_order: dict[int, None] = {}
        self._has_rebuilt = False
        self._allocate(assign_buckets(parameters, self.order, self._bucket_bytes))

    def record_ready(self, index: int) -> None:
        """Record the first time that the gradient of parameter `index` becomes ready."""
        self._ready_order.setdefault(index)

    def rebuild(self) -> None:
        """Reassign the parameters in the order in which gradients became ready on rank 0.

        The first call is a collective, and later calls do nothing. Old buckets are freed before new
        buckets are allocated. Only accumulated gradients are in memory twice for a short time.
        """
        if self._has_rebuilt or not self._parameters:
            return
        self._has_rebuilt = True
        not_ready = [index for index in self.order if index not in self._ready_order]
        self.order = self._broadcast_order([*self._ready_order, *not_ready])
        assignment = assign_buckets(self._parameters, self.order, self._bucket_bytes)
        if assignment == [bucket.indices for bucket in self.buckets]:
            return
        accumulated: list[int] = []
        self.slots.clear()
        while self.buckets:
            accumulated += self.buckets.pop().release()
        self._allocate(assignment)
        for index in accumulated:
            bucket, slot = self.slots[index]
            if bucket.should_move_in(slot):
                bucket.move_in(slot)  # A new bucket has no aliased gradients.

    def _allocate(self, assignment: Sequence[Sequence[int]]) -> None:
        for number, indices in enumerate(assignment):
            bucket = make_bucket(
                indices,
                self._parameters,
                self._options.allocate,
                self._group.process_group,
                names=self._names,
                gradient_as_view=self._options.gradient_as_bucket_view,
            )
            bucket.index = number
            bucket.is_last = number == len(assignment) - 1
            self.buckets.append(bucket)
            for slot, index in enumerate(indices):
                self.slots[index] = (bucket, slot)
        if self._options.allocate is not None:
            check_separate_memory(self.buckets)

    def _broadcast_order(self, order: Sequence[int]) -> list[int]:
        """Return the `order` that rank 0 passes. This is a collective."""
        indices = torch.tensor(order, device=self._parameters[0].device)
        broadcast = partial(dist.broadcast, group=self._group.process_group, group_src=0)
        description = "the agreement on the order of buckets"
        run_collective(broadcast, indices, description, self._attribute_errors)
        order_of_rank0: list[int] = indices.tolist()
        return order_of_rank0


def assign_buckets(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    bucket_bytes: float | Sequence[float],
) -> list[tuple[int, ...]]:
    """Split `order`, the indices of parameters, into buckets of one dtype and device.

    Each bucket has at most `bucket_bytes`. A parameter larger than the limit gets a separate
    bucket. With a limit of 0, every parameter gets one. If `bucket_bytes` is a sequence, bucket i
    has limit i, and later buckets have the last limit. Returns the buckets as tuples of indices,
    sorted by the position of their last parameter in `order`.
    """
    limits = list(bucket_bytes) if isinstance(bucket_bytes, Sequence) else [bucket_bytes]
    position = {index: number for number, index in enumerate(order)}
    full: list[list[int]] = []
    # The open bucket of each dtype and device, and its free bytes.
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], float]] = {}
    for index in order:
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        members, free_bytes = open_buckets.get(key, ([], 0.0))
        if not members or size > free_bytes or limits[-1] == 0:
            if members:
                full.append(members)
            num_started = len(full) + len(open_buckets.keys() - {key})
            members = []
            free_bytes = limits[min(num_started, len(limits) - 1)]
        members.append(index)
        open_buckets[key] = (members, free_bytes - size)
    full += [members for members, _ in open_buckets.values()]
    return [tuple(members) for members in sorted(full, key=lambda members: position[members[-1]])]

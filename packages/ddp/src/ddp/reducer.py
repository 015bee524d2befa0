"""From a gradient that is final to its mean over the ranks: collect, send, wait, check."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.agreement import Lack, check_same_gradients
from ddp.bucket import (
    MISSING,
    NOT_A_NUMBER,
    PRESENT,
    Allocate,
    Bucket,
    assign_buckets,
    make_bucket,
)
from ddp.collective import Link
from ddp.compression import Compression
from ddp.flight import Flight
from ddp.meter import Meter
from ddp.watch import Watch

# The second call of a bucket's exchange starts when this many later buckets have been sent: by then
# the first has most likely ended, and every rank starts its calls in the same order.
LAG = 2
# Above this a sum of flags may be rounded in bfloat16, so that names are compared instead.
MOST_EXACT_RANKS = 256


class Reducer:
    """The buckets of one model and the state of its current step.

    A step begins with the first gradient that is to be sent and ends with `finish`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: float,
        link: Link,
        watch: Watch,
        meter: Meter,
        compression: Compression,
        allocate: Allocate | None,
        find_unused_parameters: bool,
        check_nan: bool,
    ) -> None:
        self._names, self._parameters = names, parameters
        self._bucket_bytes = bucket_bytes
        self._link, self._watch, self._meter = link, watch, meter
        self._compression, self._allocate = compression, allocate
        self._find_unused, self._check_nan = find_unused_parameters, check_nan
        self.begun = False
        self.divide_by_initial_world_size = True
        self._steps = 0
        self._rebuilt = False
        self._arrivals: list[int] = []
        self._flights: list[Flight] = []
        self._order = list(reversed(range(len(parameters))))
        self._make(assign_buckets(parameters, self._order, bucket_bytes))

    def begin(self) -> None:
        """Open a step: gradients that arrive from here on are final."""
        self.begun = True
        self.rebuild()

    def rebuild(self) -> None:
        """After the first step, order buckets as rank 0's gradients became ready. A collective."""
        if self._steps == 1 and not self._rebuilt and self._order:
            self._rebuilt = True
            self._follow_rank_0()

    def adopt(self, index: int) -> None:
        """Move a gradient into its bucket, to be added to by later backward passes."""
        bucket, slot = self._place[index]
        self._refuse_second(bucket, slot)
        parameter, view = bucket.parameters[slot], bucket.views[slot]
        if parameter.grad is not view:
            view.copy_(self._gradient(index))
            parameter.grad = view

    def collect(self, index: int) -> None:
        """Move a final gradient, scaled to its share of the mean, into its bucket; send if full."""
        bucket, slot = self._place[index]
        self._refuse_second(bucket, slot)
        parameter, view = bucket.parameters[slot], bucket.views[slot]
        if parameter.grad is None:
            view.zero_()
            bucket.flags[slot] = MISSING
        else:
            torch.mul(self._gradient(index), 1 / self._link.world, out=view)
            parameter.grad = view
            bucket.flags[slot] = PRESENT
        bucket.arrived.add(slot)
        if self._steps == 0 and bucket.flags[slot] == PRESENT:
            self._arrivals.append(index)
        self._send_complete()

    def finish(self, *, taking_part: bool = True) -> None:
        """Send what was not sent yet, wait for everything, compare flags, close the step.

        With `taking_part=False` this rank has no gradients and only keeps the others company.
        """
        begin = time.perf_counter()
        for index in self._order:
            bucket, slot = self._place[index]
            if not taking_part:
                bucket.views[slot].zero_()
                bucket.flags[slot] = PRESENT
                bucket.arrived.add(slot)
            elif slot not in bucket.arrived:
                self.collect(index)
        self._send_complete(taking_part)
        while flying := [flight for flight in self._flights if not flight.landed]:
            for flight in flying:
                flight.advance()
        records = [flight.record() for flight in self._flights]
        self._meter.record(records, (begin, time.perf_counter()))
        self._flights.clear()
        for bucket in self._buckets:
            bucket.arrived.clear()
        self._steps += 1
        self.begun = False
        self._settle(taking_part)

    def _send_complete(self, taking_part: bool = True) -> None:
        while len(self._flights) < len(self._buckets):
            bucket = self._buckets[len(self._flights)]
            if not bucket.complete:
                return
            if self._check_nan:
                _flag_nan(bucket)
            bucket.write_flags(taking_part)
            names = [self._names[index] for index in bucket.indices]
            flight = Flight(bucket, names, self._link, self._compression, self._watch)
            self._flights.append(flight)
            if len(self._flights) > LAG and self._flights[-1 - LAG].has_more:
                self._flights[-1 - LAG].advance()

    def _settle(self, taking_part: bool) -> None:
        """Act on the flags that came with the sums; they are the same on every rank."""
        tails = [bucket.tail.tolist() for bucket in self._buckets]
        if not tails:
            return
        world, active = self._link.world, tails[0][0]
        if active < world and not self.divide_by_initial_world_size:
            for bucket in self._buckets:
                bucket.gradients.mul_(world / active)
        flagged = {
            index: flag
            for bucket, (_, *flags) in zip(self._buckets, tails, strict=True)
            for index, flag in zip(bucket.indices, flags, strict=True)
            if flag != PRESENT
        }
        if not flagged:
            return
        nowhere = {self._names[index] for index in flagged}
        if world > MOST_EXACT_RANKS or any(flag != active for flag in flagged.values()):
            lack = self._lack(flagged) if taking_part else None
            nowhere = check_same_gradients(lack, self._link.group, allow=self._find_unused)
        for index in flagged:
            bucket, slot = self._place[index]
            if self._names[index] not in nowhere:
                bucket.parameters[slot].grad = bucket.views[slot]

    def _lack(self, flagged: dict[int, float]) -> Lack:
        own = {i: self._place[i][0].flags[self._place[i][1]] for i in sorted(flagged)}
        return Lack(
            missing=tuple(self._names[i] for i, flag in own.items() if flag == MISSING),
            not_a_number=tuple(self._names[i] for i, flag in own.items() if flag == NOT_A_NUMBER),
        )

    def _refuse_second(self, bucket: Bucket, slot: int) -> None:
        self._watch.check()
        if slot in bucket.arrived:
            reason = (
                f"a second backward pass reached {self._names[bucket.indices[slot]]!r} before "
                "finish_gradient_synchronization()"
            )
            self._watch.fail(reason)
            raise RuntimeError(
                f"rank {self._link.rank}: {reason}; call it after each backward pass, or run all "
                "but the last backward pass inside no_sync()"
            )

    def _gradient(self, index: int) -> Tensor:
        gradient = self._parameters[index].grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self._names[index]!r} is {gradient.layout}; buckets hold dense "
                "gradients: make that layer with sparse=False"
            )
        return gradient.detach()

    def _follow_rank_0(self) -> None:
        seen = set(self._arrivals)
        order = self._arrivals + [index for index in self._order if index not in seen]
        agreed = torch.tensor(order, device=self._parameters[0].device)
        doing = "the agreement on the order of buckets"
        with self._watch.naming(doing):
            handle = dist.broadcast(agreed, group=self._link.group, group_src=0, async_op=True)
        self._watch.wait(handle, doing, glance=agreed.device.type == "cpu")
        self._order = agreed.tolist()
        runs = assign_buckets(self._parameters, self._order, self._bucket_bytes)
        if runs == [bucket.indices for bucket in self._buckets]:
            return
        # The old buckets go before the new ones come, so that there is one set of gradients at any
        # time, unless some are kept from one step to the next.
        kept = {}
        for index, (bucket, slot) in self._place.items():
            parameter = bucket.parameters[slot]
            if parameter.grad is bucket.views[slot]:
                kept[index] = parameter.grad.clone()
                parameter.grad = None
        self._buckets.clear()
        self._place.clear()
        del bucket
        self._make(runs)
        for index, gradient in kept.items():
            self._parameters[index].grad = gradient
            self.adopt(index)

    def _make(self, runs: Sequence[Sequence[int]]) -> None:
        group = self._link.group
        self._buckets = [make_bucket(run, self._parameters, self._allocate, group) for run in runs]
        self._place = {
            index: (bucket, slot)
            for bucket in self._buckets
            for slot, index in enumerate(bucket.indices)
        }


def _flag_nan(bucket: Bucket) -> None:
    # The sum is NaN if any is, or if infinities cancel: then look closer.
    if not bool(bucket.gradients.sum().isnan()):
        return
    for slot, view in enumerate(bucket.views):
        if bool(view.isnan().any()):
            bucket.flags[slot] = NOT_A_NUMBER

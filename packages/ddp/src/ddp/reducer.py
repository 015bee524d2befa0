"""From a gradient that is final to its mean over the ranks: place, collect, send, wait.

Flags, timing and blame are the exchange's, which is handed in (see `exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Allocate, Bucket, assign_buckets, make_bucket
from ddp.exchange import Exchange, PendingBucket

# The second call of a bucket's exchange starts when this many later buckets have been sent: by then
# the first has most likely ended, and every rank starts its calls in the same order.
LAG = 2
# Gradients up to this size are moved into their bucket together, when the last of them is there:
# one call for all costs less than one each. Larger ones go at once, so that memory holds no second
# set of gradients.
SMALL_BYTES = 2**16


class Reducer:
    """The buckets of one model and the state of its current step.

    A step is open from the first gradient that is to be sent until `finish`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        exchange: Exchange,
        opens: Callable[[], bool],
        make_room: Callable[[nn.Parameter], None] | None = None,
        bucket_bytes: float,
        allocate: Allocate | None = None,
        static_graph: bool = False,
        as_view: bool = True,
    ) -> None:
        self.names, self.parameters, self.exchange = names, parameters, exchange
        self.open = False
        # Whether a newer wrapper averages these parameters.
        self.superseded = False
        # What each gradient is multiplied by before the sum.
        self.share = 1.0
        self._opens, self._make_room = opens, make_room
        self._bucket_bytes, self._allocate = bucket_bytes, allocate
        self._as_view = as_view
        self._steps = 0
        self._rebuilt = False
        self._arrivals: list[int] = []
        self._pending: list[PendingBucket] = []
        # A graph that is the same in each step may produce a gradient in several parts (reentrant
        # checkpoints of a shared layer): the first step counts them, and sends at its end.
        self._static = static_graph
        self._parts: list[int] = [0] * len(parameters)
        self._to_come: list[int] = []
        self._order = list(reversed(range(len(parameters))))
        self._make(assign_buckets(parameters, self._order, bucket_bytes))

    def arrive(self, index: int, _: Tensor) -> None:
        """A parameter's gradient was accumulated: the hook on each parameter."""
        if self.superseded:
            return
        if (not self.open and not self._opens()) or (self._static and self._more_to_come(index)):
            self.adopt(index)
        else:
            self.collect(index)

    def supersede(self, parameter: nn.Parameter) -> None:
        """Take `parameter` over from the wrappers that averaged it before."""
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            earlier = getattr(getattr(hook, "func", None), "__self__", None)
            if isinstance(earlier, Reducer) and earlier is not self:
                earlier.superseded = True

    def arrive_sparse(self, _: Tensor) -> None:
        """The hook on a parameter whose gradient no bucket holds: it may open a step, too."""
        if not self.open:
            self._opens()

    def begin(self, share: float | None = None) -> None:
        """Open a step: gradients that arrive from here on are final.

        Each is multiplied by `share` before the sum: so that it is the mean, if none is given.
        """
        self.open = True
        self.follow_order()
        if not self._steps and any(hasattr(p, "_in_backward_optimizers") for p in self.parameters):
            raise RuntimeError(
                "an optimizer that steps within the backward pass uses gradients before they are "
                "averaged; step it after backward()"
            )
        mean = self.exchange.begin(self.parameters)
        self.share = mean if share is None else share
        self._to_come = list(self._parts)

    def follow_order(self) -> None:
        """After the first step, order buckets as rank 0's gradients became ready. A collective."""
        if self._steps == 1 and not self._rebuilt and self._order:
            self._rebuilt = True
            self._follow_rank_0()

    def adopt(self, index: int) -> None:
        """Move a gradient into its bucket, to be added to by later backward passes."""
        bucket, slot = self._place[index]
        self._refuse_late(bucket, slot)
        if self._as_view and bucket.parameters[slot].grad is not None and not bucket.holds(slot):
            bucket.views[slot].copy_(self._gradient(bucket, slot))
            bucket.give(slot)

    def collect(self, index: int) -> None:
        """Take a final gradient, scaled to its share of the mean, into its bucket; send if full."""
        bucket, slot = self._place[index]
        if slot in bucket.arrived:
            self._refuse_late(bucket, slot)
        bucket.arrived.add(slot)
        gradient = bucket.parameters[slot].grad
        if gradient is None:
            bucket.views[slot].zero_()
            bucket.missing.add(slot)
        else:
            if bucket.bytes_of[slot] > SMALL_BYTES:
                self._move(bucket, slot)
            else:
                bucket.waiting.append(slot)
            if not self._steps and not self._static:
                self._arrivals.append(index)
        if len(bucket.arrived) == len(bucket.indices):
            self._send_complete()

    def finish(self, *, taking_part: bool = True) -> None:
        """Send what was not sent yet, wait for everything, look at the flags, close the step.

        With `taking_part=False` this rank has no gradients and only keeps the others company.
        """
        begin = time.perf_counter()
        if not taking_part:
            # Its own last gradients stay what they are.
            self.release()
            for bucket in self._buckets:
                bucket.gradients.zero_()
                bucket.arrived.update(range(len(bucket.indices)))
        for index in self._order:
            bucket, slot = self._place[index]
            if slot not in bucket.arrived:
                if self._make_room is not None:
                    self._make_room(bucket.parameters[slot])
                self.collect(index)
        self._send_complete(taking_part)
        while pending := [bucket for bucket in self._pending if not bucket.done]:
            for bucket_under_way in pending:
                bucket_under_way.advance()
        self.exchange.record(begin)
        self._pending.clear()
        self._steps += 1
        self.open = False
        try:
            unused = self.exchange.unused(self._buckets, self.names, taking_part)
            if taking_part:
                self._give_back(unused)
        finally:
            for bucket in self._buckets:
                bucket.clear()

    def release(self) -> None:
        """Let the buckets go: gradients that lie in them get memory of their own."""
        for bucket in self._buckets:
            for slot, parameter in enumerate(bucket.parameters):
                if bucket.holds(slot):
                    parameter.grad = bucket.views[slot].clone()

    def _give_back(self, unused: set[int]) -> None:
        """Make `.grad` the mean where it is not the bucket's memory already."""
        for bucket in self._buckets:
            everywhere = range(len(bucket.indices))
            for slot in bucket.missing if self._as_view else everywhere:
                parameter, view = bucket.parameters[slot], bucket.views[slot]
                if bucket.indices[slot] in unused:
                    continue
                if self._as_view:
                    bucket.give(slot)
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)

    def _send_complete(self, taking_part: bool = True) -> None:
        while len(self._pending) < len(self._buckets):
            bucket = self._buckets[len(self._pending)]
            if len(bucket.arrived) < len(bucket.indices):
                return
            self._move_waiting(bucket)
            names = [self.names[index] for index in bucket.indices]
            self._pending.append(self.exchange.send(bucket, names, taking_part=taking_part))
            if len(self._pending) > LAG and self._pending[-1 - LAG].has_more:
                self._pending[-1 - LAG].advance()

    def _move(self, bucket: Bucket, slot: int) -> None:
        """Scale a gradient into its place in one pass; `.grad` is that place from then on."""
        torch.mul(self._gradient(bucket, slot), self.share, out=bucket.views[slot])
        if self._as_view:
            bucket.give(slot)

    def _move_waiting(self, bucket: Bucket) -> None:
        """The same for all small gradients that wait, in one call for all."""
        slots, bucket.waiting = bucket.waiting, []
        if not slots:
            return
        views = [bucket.views[slot] for slot in slots]
        fresh = [slot for slot in slots if not bucket.holds(slot)]
        if fresh:
            into = [bucket.views[slot] for slot in fresh]
            torch._foreach_copy_(into, [self._gradient(bucket, slot) for slot in fresh])
        if len(slots) == len(bucket.views):
            bucket.gradients.mul_(self.share)
        else:
            torch._foreach_mul_(views, self.share)
        for slot in fresh if self._as_view else ():
            bucket.give(slot)

    def _more_to_come(self, index: int) -> bool:
        if not self._steps:
            self._parts[index] += 1
            if self._parts[index] == 1:
                self._arrivals.append(index)
            return True
        self._to_come[index] -= 1
        return self._to_come[index] > 0

    def _refuse_late(self, bucket: Bucket, slot: int) -> None:
        if slot in bucket.arrived:
            reason = (
                f"one backward pass made the gradient of {self.names[bucket.indices[slot]]!r} in "
                "several parts, and the first was taken for all of it"
            )
            self.exchange.blame.fail(reason)
            raise RuntimeError(
                f"rank {self.exchange.link.rank}: {reason}; pass static_graph=True, or use "
                "checkpoint(..., use_reentrant=False)"
            )

    def _gradient(self, bucket: Bucket, slot: int) -> Tensor:
        gradient, view = bucket.parameters[slot].grad, bucket.views[slot]
        assert gradient is not None
        name = self.names[bucket.indices[slot]]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is {gradient.layout}; buckets hold dense gradients: "
                "make that layer with sparse=False, or an nn.Embedding(sparse=True)"
            )
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {name!r} is part of a graph (create_graph=True), which its mean "
                "over the ranks cannot be; take second derivatives with torch.autograd.grad"
            )
        if gradient.shape != view.shape:
            raise RuntimeError(
                f"the gradient of {name!r} has shape {tuple(gradient.shape)}, not "
                f"{tuple(view.shape)} as when it was wrapped; wrap the changed model anew"
            )
        return gradient

    def _follow_rank_0(self) -> None:
        seen = set(self._arrivals)
        order = self._arrivals + [index for index in self._order if index not in seen]
        agreed = torch.tensor(order, device=self.parameters[0].device)
        doing, blame = "the agreement on the order of buckets", self.exchange.blame
        with blame.naming(doing):
            group = self.exchange.link.group
            handle = dist.broadcast(agreed, group=group, group_src=0, async_op=True)
        blame.wait(handle, doing, poll=agreed.device.type == "cpu")
        self._order = agreed.tolist()
        runs = assign_buckets(self.parameters, self._order, self._bucket_bytes)
        if runs == [bucket.indices for bucket in self._buckets]:
            return
        # The old buckets go before the new ones come, so that there is one set of gradients at any
        # time, unless some are kept from one step to the next.
        kept = {}
        for index, (bucket, slot) in self._place.items():
            if bucket.holds(slot):
                kept[index] = bucket.views[slot].clone()
                bucket.parameters[slot].grad = None
        self._buckets.clear()
        self._place.clear()
        del bucket
        self._make(runs)
        for index, gradient in kept.items():
            self.parameters[index].grad = gradient
            self.adopt(index)

    def _make(self, runs: Sequence[Sequence[int]]) -> None:
        group = self.exchange.link.group
        self._buckets = [make_bucket(run, self.parameters, self._allocate, group) for run in runs]
        for place, bucket in enumerate(self._buckets):
            bucket.place, bucket.is_last = place, place == len(self._buckets) - 1
        self._place = {
            index: (bucket, slot)
            for bucket in self._buckets
            for slot, index in enumerate(bucket.indices)
        }

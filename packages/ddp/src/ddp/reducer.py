"""From a gradient that is final to its mean over the ranks: place, collect, send, wait.

Flags, timing and blame are the exchange's, which is handed in (see `exchange`); which gradient lies
where is the layout's (see `layout`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn

from ddp.bucket import Bucket
from ddp.consistency.parts import Parts
from ddp.exchange import Exchange
from ddp.layout import Layout

# Gradients up to this size are moved into their bucket together, when the last of them is there:
# one call for all costs less than one each. Larger ones go at once, so that memory holds no second
# set of gradients.
SMALL_BYTES = 2**16


class Reducer:
    """The state of a model's current step: open from the first gradient to be sent to `finish`.

    `opens()` begins a step if a gradient that arrives now is to be sent; `make_room(parameter)`
    goes before a gradient that was there already is taken.
    """

    def __init__(
        self,
        layout: Layout,
        exchange: Exchange,
        *,
        opens: Callable[[], bool],
        make_room: Callable[[nn.Parameter], None] | None = None,
        static_graph: bool = False,
    ) -> None:
        self.layout, self.exchange, self.open = layout, exchange, False
        self._opens, self._make_room = opens, make_room
        # What each gradient is multiplied by before the sum.
        self.share = 1.0
        self.steps, self._sent, self._follows = 0, 0, False
        self._arrivals: dict[int, None] = {}
        # What the last step brought no gradient for, here.
        self.absent: list[int] = []
        self._parts = Parts(len(layout.parameters)) if static_graph else None
        # Small gradients that complete no bucket, if they come in the known order: while a step is
        # open their arrival is only noted, and the next one of another kind looks at the notes.
        self._small: frozenset[int] = frozenset()
        self._noting = self._small
        self._noted: list[int] = []

    def arrive(self, index: int, _: Tensor) -> None:
        """A parameter's gradient was accumulated: the hook on each parameter."""
        if index in self._noting:
            self._noted.append(index)
            return
        if self.open or self._opens():
            if not self.steps:
                self._arrivals.setdefault(index)
            if self._parts is None or not self._parts.more_to_come(index):
                self._collect_noted()
                self._collect(*self.layout.place[index])
                self._send_complete()
                return
        bucket, slot = self.layout.place[index]
        if slot in bucket.arrived:
            self.exchange.refuse_parts(bucket, slot)
        bucket.adopt(slot)

    def begin(self, share: float | None = None) -> None:
        """Open a step: gradients that arrive from here on are final.

        Each is multiplied by `share` before the sum: so that it is the mean, if none is given.
        """
        self.open, self._sent, self.absent = True, 0, []
        self.follow_order()
        for bucket in self.layout.buckets:
            bucket.part_with_held()
        mean = self.exchange.begin(self.layout.parameters)
        self.share = mean if share is None else share
        if self._parts is not None:
            self._parts.begin()
        else:
            self._noting = self._small

    def follow_order(self) -> None:
        """After the first step, order buckets as rank 0's gradients became ready. A collective."""
        if self.steps == 1 and not self._follows and self.layout.order:
            self._follows = True
            others = (index for index in self.layout.order if index not in self._arrivals)
            device = self.layout.parameters[0].device
            self.layout.follow(self.exchange.agree_on([*self._arrivals, *others], device))
            self._small = frozenset(
                index
                for bucket in self.layout.buckets
                for index, size in zip(bucket.indices[:-1], bucket.bytes_of, strict=False)
                if size <= SMALL_BYTES
            )

    def _collect_noted(self) -> None:
        noted, self._noted = self._noted, []
        for index in noted:
            self._collect(*self.layout.place[index])

    def _collect(self, bucket: Bucket, slot: int) -> None:
        """Take a final gradient, scaled to its share of the mean, into its bucket."""
        if slot in bucket.arrived:
            self.exchange.refuse_parts(bucket, slot)
        bucket.arrived.add(slot)
        if bucket.bytes_of[slot] > SMALL_BYTES:
            bucket.take(slot, self.share)
        else:
            bucket.waiting.append(slot)

    def _send_complete(self, taking_part: bool = True) -> None:
        """Start the sums in one order, the same on every rank, or they would be mixed up."""
        buckets = self.layout.buckets
        while self._sent < len(buckets):
            bucket = buckets[self._sent]
            if len(bucket.arrived) < len(bucket.indices):
                return
            bucket.take_waiting(self.share)
            self.exchange.send(bucket, taking_part=taking_part)
            self._sent += 1

    def finish(self, *, taking_part: bool = True) -> set[int]:
        """Send what was not sent yet, wait for all, close the step; return what no rank used.

        With `taking_part=False` this rank has no gradients and only makes the others' calls.
        """
        begin, buckets = time.perf_counter(), self.layout.buckets
        self._noting = frozenset()
        self._collect_noted()
        for bucket in buckets:
            if taking_part:
                self._take_what_did_not_arrive(bucket)
                self._send_complete()
            else:
                # Its own last gradients stay what they are.
                bucket.release()
                bucket.part_with_held()
                bucket.gradients.zero_()
                bucket.arrived.update(range(len(bucket.indices)))
        self._send_complete(taking_part)
        self.exchange.wait(begin)
        self.steps, self.open = self.steps + 1, False
        try:
            unused = self.exchange.unused(buckets, taking_part)
            for bucket in buckets if taking_part else ():
                bucket.give_back(unused)
            return unused
        finally:
            for bucket in buckets:
                bucket.clear()

    def _take_what_did_not_arrive(self, bucket: Bucket) -> None:
        """Gradients of earlier passes, which no hook brought in this one, or none at all."""
        for slot in range(len(bucket.indices) if len(bucket.arrived) < len(bucket.indices) else 0):
            if slot in bucket.arrived:
                continue
            self.absent.append(bucket.indices[slot])
            if self._make_room is not None:
                self._make_room(bucket.parameters[slot])
            if bucket.parameters[slot].grad is None:
                bucket.lack(slot)
            else:
                self._collect(bucket, slot)

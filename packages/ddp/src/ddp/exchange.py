"""The seam: what makes the sum of a bucket dependable attaches here, outside the reducer.

The reducer knows places and order. An exchange is handed to it, and owns what goes with the sum:
the flags that tell ranks they disagree, the look for NaN, how long each call took, and the name of
the rank that keeps one from ending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ddp.bucket import RANK_FLAGS, Bucket
from ddp.collective import Link
from ddp.compression.ways import Call, Compression
from ddp.consistency.agreement import Missing, check_same_gradients, checksum
from ddp.consistency.blame import Blame
from ddp.metering.meter import Meter
from ddp.metering.records import BucketRecord

# The second call of a bucket's exchange starts when this many later buckets have been sent: by then
# the first has most likely ended, and every rank starts its calls in the same order.
LAG = 2
# Above this a sum of flags may be rounded in bfloat16, so that names are compared instead.
MOST_EXACT_RANKS = 256


@dataclass
class Exchange:
    """How buckets are summed over the ranks, and what is looked at on the way."""

    link: Link
    blame: Blame
    meter: Meter
    compression: Compression
    find_unused_parameters: bool = False
    check_nan: bool = False
    divide_by_initial_world_size: bool = True
    # On how many ranks each parameter lacked a gradient in the last step, where it did on any.
    lacking: dict[int, int] = field(default_factory=dict)
    _parameters: Sequence[nn.Parameter] = ()
    _versions: int | None = None
    _stepped: bool = False
    _pending: list[PendingBucket] = field(default_factory=list)

    def begin(self, parameters: Sequence[nn.Parameter]) -> float:
        """Open a step; return what each gradient is multiplied by before the sum.

        Has an optimizer changed the parameters since the last step? The flags will tell.
        """
        versions = sum(parameter._version for parameter in parameters)
        self._stepped = self._versions is not None and versions != self._versions
        if parameters is not self._parameters:
            self._stepped, self._parameters = False, parameters
        self._versions = versions
        return 1 / self.link.world if getattr(self.compression, "scaled", True) else 1.0

    def agree_on(self, order: Sequence[int], device: torch.device) -> list[int]:
        """Rank 0's order in which gradients became ready. A collective."""
        agreed = torch.tensor(order, device=device)
        doing = "the agreement on the order of buckets"
        with self.blame.naming(doing):
            handle = dist.broadcast(agreed, group=self.link.group, group_src=0, async_op=True)
        self.blame.wait(handle, doing, poll=device.type == "cpu")
        told: list[int] = agreed.tolist()
        return told

    def send(self, bucket: Bucket, *, taking_part: bool) -> None:
        """Start the sum of `bucket` over the ranks."""
        if self.check_nan:
            bucket.look_for_nan()
        bucket.write_flags(taking_part=taking_part, stepped=self._stepped)
        self._pending.append(PendingBucket(bucket, self))
        if len(self._pending) > LAG and self._pending[-1 - LAG].has_more:
            self._pending[-1 - LAG].advance()

    def wait(self, begin: float) -> None:
        """Wait, since `begin`, until every sum that was started has ended."""
        while under_way := [pending for pending in self._pending if not pending.done]:
            for pending in under_way:
                pending.advance()
        records = [pending.record() for pending in self._pending]
        self._pending.clear()
        self.meter.record(records, (begin, time.perf_counter()))

    def unused(self, buckets: Sequence[Bucket], took_part: bool) -> set[int]:
        """Act on the summed flags, the same on every rank: who has no gradient on any rank.

        Raises RuntimeError on every rank where they disagree and may not.
        """
        if not getattr(self.compression, "carries_flags", True):
            self._sum_flags(buckets)
        world, stepped = self.link.world, self._stepped
        self.lacking = {}
        if took_part and all(bucket.says_nothing(world, stepped=stepped) for bucket in buckets):
            return set()
        flags = [bucket.flags.tolist() for bucket in buckets]
        if not flags:
            return set()
        active, told_stepped, _ = flags[0][:RANK_FLAGS]
        if active < world and not self.divide_by_initial_world_size:
            for bucket in buckets:
                bucket.gradients.mul_(world / active)
        missing = {
            index: flag
            for bucket, told in zip(buckets, flags, strict=True)
            for index, flag in zip(bucket.indices, told[RANK_FLAGS:], strict=True)
            if flag
        }
        self.lacking = {index: round(flag) for index, flag in missing.items()}
        partly = {index for index, flag in missing.items() if flag != active}
        inexact = world > MOST_EXACT_RANKS and bool(missing)
        nan = any(told[2] for told in flags)
        some_stepped = told_stepped not in (0, active)
        disagree = some_stepped or (partly and not self.find_unused_parameters)
        if not (inexact or nan or disagree):
            return set(missing) - partly
        own = self._own(buckets, with_weights=some_stepped) if took_part else None
        everywhere = check_same_gradients(own, self.link.group, allow=self.find_unused_parameters)
        names = {
            index: name for b in buckets for index, name in zip(b.indices, b.names, strict=True)
        }
        return {index for index in missing if names[index] in everywhere}

    def refuse_parts(self, bucket: Bucket, slot: int) -> NoReturn:
        """Raise RuntimeError, here and on the other ranks: a gradient came in several parts."""
        reason = (
            f"one backward pass made the gradient of {bucket.names[slot]!r} in several parts, "
            "and the first was taken for all of it"
        )
        self.blame.fail(reason)
        raise RuntimeError(
            f"Expected to mark a variable ready only once. On rank {self.link.rank} {reason}; pass "
            "static_graph=True, or use checkpoint(..., use_reentrant=False)"
        )

    def forget_versions(self) -> None:
        """The weights were given by another rank: the next step compares nothing."""
        self._versions = None

    def _sum_flags(self, buckets: Sequence[Bucket]) -> None:
        if not buckets:
            return
        flags = torch.cat([bucket.flags.float() for bucket in buckets])
        doing = "the sum of the flags"
        with self.blame.naming(doing):
            handle = dist.all_reduce(flags, group=self.link.group, async_op=True)
        self.blame.wait(handle, doing, poll=flags.device.type == "cpu")
        for bucket, told in zip(buckets, flags.split([len(b.flags) for b in buckets]), strict=True):
            bucket.flags.copy_(told)

    def _own(self, buckets: Sequence[Bucket], *, with_weights: bool) -> Missing:
        missing = [(b.indices[slot], b.names[slot]) for b in buckets for slot in b.missing]
        nan = [(b.indices[slot], b.names[slot]) for b in buckets for slot in b.not_a_number]
        return Missing(
            tuple(name for _, name in sorted(missing)),
            tuple(name for _, name in sorted(nan)),
            self._stepped,
            checksum(self._parameters) if with_weights else 0,
        )


class PendingBucket:
    """A bucket under way: the calls of its exchange, one after the other, and when they ended."""

    def __init__(self, bucket: Bucket, exchange: Exchange) -> None:
        names = self._names = bucket.names
        self._blame = exchange.blame
        self._doing = f"the sum of the gradients of {names[0]!r}" + (
            f" and {len(names) - 1} more" if len(names) > 1 else ""
        )
        self._on_host = bucket.buffer.device.type == "cpu"
        self._exchange = exchange.compression.exchange(bucket, exchange.link)
        self._calls: list[Call] = []
        self._ended: dict[int, float] = {}
        self._exposed = 0.0
        self._sent = time.perf_counter()
        self.done = False
        self._start_next()

    @property
    def has_more(self) -> bool:
        """Whether another call follows the one under way."""
        return not self.done and not self._calls[-1].last

    def advance(self) -> None:
        """Wait for the call under way, then start the next."""
        begin = time.perf_counter()
        handle = self._calls[-1].handle
        # NCCL's wait with a timeout would hold the host up, and its watchdog ends what hangs.
        self._blame.wait(handle, self._doing, poll=self._on_host and isinstance(handle, dist.Work))
        now = time.perf_counter()
        self._exposed += now - begin
        self._ended.setdefault(len(self._calls), now)
        self._start_next()

    def record(self) -> BucketRecord:
        """What this bucket took."""
        return BucketRecord(
            parameters=self._names,
            calls=len(self._calls),
            gradient_bytes=sum(call.gradient_bytes for call in self._calls),
            extra_bytes=sum(call.extra_bytes for call in self._calls),
            sent=self._sent,
            done=max(self._ended.values()),
            exposed_seconds=self._exposed,
        )

    def _start_next(self) -> None:
        with self._blame.naming(self._doing):
            call = next(self._exchange, None)
        if call is None:
            self.done = True
            return
        self._calls.append(call)
        if self._on_host and hasattr(call.handle, "get_future"):
            call.handle.get_future().add_done_callback(self._note_end(len(self._calls)))

    def _note_end(self, call: int) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self._ended.setdefault(call, time.perf_counter())

        return note

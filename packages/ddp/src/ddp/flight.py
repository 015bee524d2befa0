"""A bucket on its way: the calls of its exchange, one after the other, and when they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp.bucket import Bucket
from ddp.collective import Link
from ddp.compression import Call, Compression
from ddp.meter import BucketRecord
from ddp.watch import Watch


class Flight:
    """Sends `bucket`; `advance` waits for the call under way and starts the next, if any."""

    def __init__(
        self,
        bucket: Bucket,
        names: Sequence[str],
        link: Link,
        compression: Compression,
        watch: Watch,
    ) -> None:
        self._names, self._watch = names, watch
        self._doing = f"the sum of the gradients of {names[0]!r}" + (
            f" and {len(names) - 1} more" if len(names) > 1 else ""
        )
        self._on_host = bucket.buffer.device.type == "cpu"
        self._exchange = compression.exchange(bucket, link)
        self._calls: list[Call] = []
        self._ended: dict[int, float] = {}
        self._exposed = 0.0
        self._sent = time.perf_counter()
        self.landed = False
        self._start_next()

    @property
    def has_more(self) -> bool:
        """Whether another call follows the one under way."""
        return not self.landed and not self._calls[-1].last

    def advance(self) -> None:
        """Wait for the call under way, then start the next."""
        begin = time.perf_counter()
        handle = self._calls[-1].handle
        # NCCL's wait with a timeout would hold the host up, and its watchdog ends what hangs.
        glance = self._on_host and isinstance(handle, dist.Work)
        self._watch.wait(handle, self._doing, glance=glance)
        now = time.perf_counter()
        self._exposed += now - begin
        self._ended.setdefault(len(self._calls), now)
        self._start_next()

    def record(self) -> BucketRecord:
        """What this bucket took."""
        return BucketRecord(
            parameters=tuple(self._names),
            calls=len(self._calls),
            gradient_bytes=sum(call.gradient_bytes for call in self._calls),
            extra_bytes=sum(call.extra_bytes for call in self._calls),
            sent=self._sent,
            done=max(self._ended.values()),
            exposed_seconds=self._exposed,
        )

    def _start_next(self) -> None:
        with self._watch.naming(self._doing):
            call = next(self._exchange, None)
        if call is None:
            self.landed = True
            return
        self._calls.append(call)
        if self._on_host and hasattr(call.handle, "get_future"):
            call.handle.get_future().add_done_callback(self._note_end(len(self._calls)))

    def _note_end(self, call: int) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self._ended.setdefault(call, time.perf_counter())

        return note

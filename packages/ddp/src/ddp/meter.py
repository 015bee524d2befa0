"""What was sent in each step, how long it travelled, and for how much of that somebody waited.

Seconds are `time.perf_counter()`. On a GPU they are the host's: a wait that only orders streams
takes none, so look at torch.profiler's timeline there.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class BucketRecord:
    """One bucket of one step: `sent` is when its first call started, `done` when its last ended."""

    parameters: tuple[str, ...]
    calls: int
    gradient_bytes: int
    extra_bytes: int
    sent: float
    done: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Time under way, waiting behind earlier buckets included."""
        return self.done - self.sent

    @property
    def hidden_seconds(self) -> float:
        """Time under way while this rank did something else."""
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True)
class StepRecord:
    """One synchronised step: its forward passes, from the last one's end to the wait, the wait."""

    forwards: tuple[Span, ...]
    backward: Span
    waiting: Span
    buckets: tuple[BucketRecord, ...]

    @property
    def calls(self) -> int:
        """Collectives started."""
        return sum(bucket.calls for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients handed to the collective: of the arrays that were summed."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    @property
    def extra_bytes(self) -> int:
        """Bytes of flags and padding that went with them."""
        return sum(bucket.extra_bytes for bucket in self.buckets)

    @property
    def exposed_seconds(self) -> float:
        """From the end of the backward pass until the mean is in every gradient."""
        return self.waiting[1] - self.waiting[0]

    @property
    def hidden_seconds(self) -> float:
        """Time before that in which something was under way."""
        spans = [(b.sent, min(b.done, self.waiting[0])) for b in self.buckets]
        return _covered([span for span in spans if span[0] < span[1]])


class Meter:
    """Records of the last steps. A design without a wrapper is handed one: `meter=`."""

    def __init__(self, keep: int = 100) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=keep)
        # Forward passes that no backward pass follows, as in evaluation, fall out at the far end.
        self._forwards: deque[Span] = deque(maxlen=keep)

    @property
    def last(self) -> StepRecord:
        """The last synchronised step; RuntimeError before the first."""
        if not self.steps:
            raise RuntimeError("no step was recorded yet; run one and synchronise its gradients")
        return self.steps[-1]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time a forward pass."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._forwards.append((begin, time.perf_counter()))

    def record(self, buckets: Sequence[BucketRecord], waiting: Span) -> None:
        """Add a step that ends now."""
        backward = (self._forwards[-1][1] if self._forwards else waiting[0], waiting[0])
        self.steps.append(StepRecord(tuple(self._forwards), backward, waiting, tuple(buckets)))
        self._forwards.clear()

    def chrome_trace(self, rank: int = 0) -> dict[str, Any]:
        """The steps as a Chrome trace (chrome://tracing, Perfetto): a process a rank."""
        events: list[dict[str, Any]] = []

        def add(lane: int, name: str, begin: float, end: float, **details: object) -> None:
            events.append(
                {"name": name, "ph": "X", "pid": rank, "tid": lane, "args": details}
                | {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            )

        lanes: list[float] = []
        for step in self.steps:
            for span in step.forwards:
                add(0, "forward", *span)
            add(0, "loss and backward", *step.backward)
            add(0, "waiting for gradients", *step.waiting)
            for number, bucket in enumerate(step.buckets):
                # Ranges of one lane may not overlap: take the first lane that is free.
                free = (lane for lane, busy in enumerate(lanes) if busy <= bucket.sent)
                lane = next(free, len(lanes))
                lanes[lane : lane + 1] = [bucket.done]
                details = {
                    "parameters": ", ".join(bucket.parameters),
                    "gradient_bytes": bucket.gradient_bytes,
                    "exposed_ms": 1e3 * bucket.exposed_seconds,
                }
                add(1 + lane, f"bucket {number}", bucket.sent, bucket.done, **details)
        names = ["computation", *(f"communication {lane}" for lane in range(len(lanes)))]
        for lane, name in enumerate(names):
            named = {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane}
            events.append(named | {"args": {"name": name}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_trace(self, path: str | Path, rank: int = 0) -> None:
        """Write `chrome_trace` to `path`, whole or not at all."""
        beside = Path(f"{path}.{os.getpid()}.part")
        beside.write_text(json.dumps(self.chrome_trace(rank)))
        beside.replace(path)


def _covered(spans: list[Span]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total

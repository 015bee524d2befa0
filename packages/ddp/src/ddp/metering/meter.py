"""The meter: bytes, calls and times of the last steps.

Times are seconds of `time.perf_counter()`, which is a clock of the host. With a GPU, a wait only
orders streams and takes almost no time on the host, so use torch.profiler instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddp.communication import BucketReduction
from ddp.extensions import Extension, Step
from ddp.metering.records import BucketRecord, Span, StepRecord
from ddp.metering.trace import svg, write_atomically


class Meter(Extension):
    """Records of the last `keep` steps of a `DDP`, or of calls of `all_reduce_gradients`."""

    def __init__(self, keep: int = 100) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=keep)
        # The limit also drops forward passes without a backward pass, as in evaluation.
        self._forwards: deque[Span] = deque(maxlen=keep)

    @property
    def last(self) -> StepRecord:
        """The last synchronized step. Raises `RuntimeError` if no step was recorded."""
        if not self.steps:
            raise RuntimeError("no step was recorded; run a backward pass and average gradients")
        return self.steps[-1]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context that measures a forward pass."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self._forwards.append((start_time, time.perf_counter()))

    def on_step_end(self, step: Step, reductions: Sequence[BucketReduction]) -> None:
        """Record the step, and the bytes, calls and times of its buckets."""
        waiting = (step.wait_start, time.perf_counter())
        self.record([_make_bucket_record(reduction) for reduction in reductions], waiting)

    def record(self, buckets: Sequence[BucketRecord], waiting: Span) -> None:
        """Record a step. `waiting` is the start and stop of the wait for the buckets."""
        backward_start = self._forwards[-1][1] if self._forwards else waiting[0]
        backward = (backward_start, waiting[0])
        self.steps.append(StepRecord(tuple(self._forwards), backward, waiting, tuple(buckets)))
        self._forwards.clear()

    def write_trace(self, path: str | Path) -> None:
        """Write a chart of the last step to `path`; raise `ValueError` unless it ends in .svg."""
        if not str(path).endswith(".svg"):
            raise ValueError(
                f"expected a path that ends in .svg, got {str(path)!r}; use torch.profiler for a "
                "Chrome trace"
            )
        write_atomically(path, svg({"last step": self.last}))


def _make_bucket_record(reduction: BucketReduction) -> BucketRecord:
    collectives = reduction.collectives
    return BucketRecord(
        parameters=reduction.bucket.names,
        calls=len(collectives),
        gradient_bytes=sum(collective.gradient_bytes for collective in collectives),
        extra_bytes=sum(collective.extra_bytes for collective in collectives),
        sent=reduction.launch_time,
        done=max(reduction.completion_times.values()),
        exposed_seconds=reduction.exposed_seconds,
    )

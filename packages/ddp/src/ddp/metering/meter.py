"""What was sent in each step, how long it traveled, and for how much of that somebody waited.

Seconds are `time.perf_counter()`. On a GPU they are the host's: a wait that only orders streams
takes none, so look at torch.profiler's timeline there.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddp.metering.records import BucketRecord, Span, StepRecord
from ddp.metering.trace import chrome_trace, svg, write


class Meter:
    """Records of the last steps. A design without a wrapper is handed one: `meter=`."""

    def __init__(self, keep: int = 100) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=keep)
        # Forward passes that no backward pass follows, as in evaluation, fall out at the far end.
        self._forwards: deque[Span] = deque(maxlen=keep)

    @property
    def last(self) -> StepRecord:
        """The last synchronized step; RuntimeError before the first."""
        if not self.steps:
            raise RuntimeError("no step was recorded yet; run one and synchronize its gradients")
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

    def write_trace(self, path: str | Path, rank: int = 0) -> None:
        """Write a Chrome trace to `path`, or a picture of the last step if that ends in .svg."""
        if str(path).endswith(".svg"):
            write(path, svg({f"rank {rank}": self.last}))
        else:
            write(path, json.dumps(chrome_trace(self.steps, rank)))

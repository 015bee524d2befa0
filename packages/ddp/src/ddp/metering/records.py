"""Records of one bucket and of one step. Times are seconds of `time.perf_counter()`."""

from __future__ import annotations

from dataclasses import dataclass

#: Start time and stop time.
Span = tuple[float, float]


@dataclass(frozen=True)
class BucketRecord:
    """The reduction of one bucket in one step."""

    parameters: tuple[str, ...]
    #: Number of collectives.
    calls: int
    #: Bytes of the gradients as they are sent, or as a communication hook receives them.
    gradient_bytes: int
    #: Bytes of flags and padding.
    extra_bytes: int
    #: Time when the first collective was launched.
    sent: float
    #: Time when the last collective completed.
    done: float
    #: Seconds that this rank spent waiting.
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds from launch to completion. Waiting for earlier buckets is included."""
        return self.done - self.sent

    @property
    def hidden_seconds(self) -> float:
        """Seconds of the reduction in which this rank did not wait."""
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True)
class StepRecord:
    """One synchronized step."""

    forwards: tuple[Span, ...]
    #: The span from the end of the last forward pass to the start of the wait.
    backward: Span
    #: The span from the end of the backward pass until every gradient in a bucket is averaged.
    waiting: Span
    buckets: tuple[BucketRecord, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first forward pass to the end of the wait."""
        return self.waiting[1] - self.start

    @property
    def start(self) -> float:
        """Time when the first forward pass started, or the backward pass if no forward pass did."""
        return min([self.backward[0], *(start for start, _ in self.forwards)])

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return sum(bucket.calls for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients as they are sent, or as a communication hook receives them."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    @property
    def extra_bytes(self) -> int:
        """Bytes of flags and padding."""
        return sum(bucket.extra_bytes for bucket in self.buckets)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank waited for gradients after the backward pass."""
        return self.waiting[1] - self.waiting[0]

    @property
    def hidden_seconds(self) -> float:
        """Seconds before the wait in which at least one bucket was being reduced."""
        spans = []
        for bucket in self.buckets:
            stop = min(bucket.done, self.waiting[0])
            if bucket.sent < stop:
                spans.append((bucket.sent, stop))
        return _compute_covered_seconds(spans)


def _compute_covered_seconds(spans: list[Span]) -> float:
    total = 0.0
    covered_until = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return total

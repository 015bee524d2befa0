"""What one bucket and one step took, in seconds of `time.perf_counter()`."""

from __future__ import annotations

from dataclasses import dataclass

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
    """One synchronized step: its forward passes, from the last one's end to the wait, the wait."""

    forwards: tuple[Span, ...]
    backward: Span
    waiting: Span
    buckets: tuple[BucketRecord, ...]

    @property
    def seconds(self) -> float:
        """From the first forward pass to the end of the wait."""
        return self.waiting[1] - min(self.backward[0], *(begin for begin, _ in self.forwards), 1e99)

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


def _covered(spans: list[Span]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total

"""The collectives that reduce one bucket over the ranks."""

# Note [Callbacks at exit]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# gloo runs the callbacks of a collective on its own thread. If the interpreter ends at that time,
# as after an exception in a backward pass, the callback aborts the process. The process therefore
# waits up to `EXIT_SECONDS` for running collectives. That is longer than a failed rank waits for
# the reasons of the other ranks. Their connections are closed by then, which ends a collective.

from __future__ import annotations

import atexit
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp.bucket import Bucket
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.process_group import ReduceGroup

#: Time that the exit of the process waits for running collectives. See Note [Callbacks at exit].
EXIT_SECONDS = 3.0


@dataclass(frozen=True)
class Collective:
    """A launched collective of one bucket."""

    #: A `Work` or `Future` with a `wait()` method; None if the collective has completed.
    work: Any
    gradient_bytes: int
    #: Bytes of flags and padding that are sent with the gradients.
    extra_bytes: int
    #: Called once, after the collective has completed. It stores the result in the bucket, and
    #: returns the next collective if the reduction needs another one.
    on_completion: Callable[[], Collective | None] | None = None
    #: True if `on_completion` launches another collective.
    has_next: bool = False


class Compression(ABC):
    """A method to reduce a bucket over the ranks."""

    #: True if each gradient is divided by the number of ranks before it is copied in.
    uses_scaled_gradients = True
    #: True if the flags of the bucket are summed together with its gradients.
    reduces_flags = True

    @abstractmethod
    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        """Launch the first collective that leaves the sum over ranks in `bucket.buffer`."""


@dataclass(frozen=True)
class Uncompressed(Compression):
    """One all-reduce of the whole buffer, in place."""

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        """Launch the all-reduce."""
        work = group.all_reduce(bucket.buffer, async_op=True)
        return Collective(work, tensor_bytes(bucket.gradients), tensor_bytes(bucket.flags))


class BucketReduction:
    """The reduction of one bucket: its collectives in order, and the time each completed."""

    def __init__(
        self,
        bucket: Bucket,
        compression: Compression,
        group: ReduceGroup,
        failures: FailureAttribution,
    ) -> None:
        self.bucket = bucket
        self.collectives: list[Collective] = []
        #: `time.perf_counter()` when each collective completed, by its number from 1.
        self.completion_times: dict[int, float] = {}
        #: Seconds that this rank spent waiting.
        self.exposed_seconds = 0.0
        self.is_done = False
        self._failures = failures
        self._description = f"the sum of the gradients of {bucket.description}"
        self._is_on_cpu = bucket.buffer.device.type == "cpu"
        self.launch_time = time.perf_counter()
        with self._failures.attribute(self._description):
            self._track(compression.launch(bucket, group))

    @property
    def has_next(self) -> bool:
        """True if another collective follows the one that is running."""
        return not self.is_done and self.collectives[-1].has_next

    def advance(self) -> None:
        """Wait for the running collective, then launch the next one if there is one."""
        collective = self.collectives[-1]
        wait_start = time.perf_counter()
        # NCCL's wait with a timeout would block the host, and its watchdog aborts hanging calls.
        can_poll = self._is_on_cpu and isinstance(collective.work, dist.Work)
        self._failures.wait(collective.work, self._description, poll=can_poll)
        now = time.perf_counter()
        self.exposed_seconds += now - wait_start
        self.completion_times.setdefault(len(self.collectives), now)
        following = None
        if collective.on_completion is not None:
            with self._failures.attribute(self._description):
                following = collective.on_completion()
        if following is None:
            self.is_done = True
        else:
            self._track(following)

    def _track(self, collective: Collective) -> None:
        self.collectives.append(collective)
        # A future's callback runs when the collective completes, which may be long before `wait`.
        if self._is_on_cpu and hasattr(collective.work, "get_future"):
            number = len(self.collectives)

            def record_completion(_: Any) -> None:
                self.completion_times.setdefault(number, time.perf_counter())

            _observed.add(self)
            collective.work.get_future().add_done_callback(record_completion)


#: The reductions whose collectives have callbacks.
_observed: weakref.WeakSet[BucketReduction] = weakref.WeakSet()


@atexit.register
def wait_for_callbacks() -> None:
    """Return when every running collective has called back. See Note [Callbacks at exit]."""
    deadline = time.monotonic() + EXIT_SECONDS
    for reduction in list(_observed):
        while len(reduction.collectives) not in reduction.completion_times:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()

"""The collectives that reduce one bucket over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp.bucket import Bucket
from ddp.process_group import ReduceGroup

#: A function like `Extension.attribute_errors`, which returns a context for a collective.
AttributeErrors = Callable[[str, dist.Work | None], AbstractContextManager[None]]

#: The second collective of a bucket is launched once this many further buckets have been launched.
#: By then the first collective has most likely completed. The lag is fixed, so all ranks launch
#: collectives in the same order.
SECOND_COLLECTIVE_LAG = 2


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
    #: True if a callback of `work` may launch further collectives. On CPUs it runs on a thread of
    #: the backend, so with two buckets in flight ranks could launch them in different orders.
    launches_in_callbacks: bool = False


def wait_for_work(
    work: Any, description: str, attribute_errors: AttributeErrors, *, is_on_cpu: bool
) -> None:
    """Wait for a launched collective. A `work` of None means that it has completed already."""
    if work is None:
        return
    # NCCL's `wait` would block the host if it had a timeout. NCCL's watchdog aborts hanging calls.
    can_poll = is_on_cpu and isinstance(work, dist.Work)
    with attribute_errors(description, work if can_poll else None):
        work.wait()


def run_collective(
    function: Callable[..., Any],
    tensor: Tensor,
    description: str,
    attribute_errors: AttributeErrors,
) -> None:
    """Call `function(tensor, async_op=True)`, and wait for the collective that it launches."""
    with attribute_errors(description, None):
        work = function(tensor, async_op=True)
    wait_for_work(work, description, attribute_errors, is_on_cpu=tensor.device.type == "cpu")


def all_reduce_buffer(bucket: Bucket, group: ReduceGroup) -> Collective:
    """Launch one all-reduce of the whole buffer, in place."""
    work = group.all_reduce(bucket.buffer, async_op=True)
    return Collective(work, bucket.gradients.nbytes, bucket.flags.nbytes)


class BucketReduction:
    """The reduction of one bucket: its collectives in order, and the time each completed."""

    def __init__(
        self,
        bucket: Bucket,
        launch_collective: Callable[[Bucket], Collective],
        attribute_errors: AttributeErrors,
    ) -> None:
        self.bucket = bucket
        self.collectives: list[Collective] = []
        #: `time.perf_counter()` when each collective completed, by its number from 1.
        self.completion_times: dict[int, float] = {}
        #: Seconds that this rank spent waiting.
        self.exposed_seconds = 0.0
        self.is_done = False
        self._attribute_errors = attribute_errors
        self._description = f"the sum of the gradients of {bucket.description}"
        self._is_on_cpu = bucket.buffer.device.type == "cpu"
        self.launch_time = time.perf_counter()
        with self._attribute_errors(self._description, None):
            self._track(launch_collective(bucket))

    @property
    def has_next(self) -> bool:
        """True if another collective follows the current one."""
        return not self.is_done and self.collectives[-1].has_next

    @property
    def blocks_next_bucket(self) -> bool:
        """True if no other bucket may be launched before this reduction is done."""
        launches_in_callbacks = self.collectives[-1].launches_in_callbacks
        return launches_in_callbacks and self._is_on_cpu and not self.is_done

    def advance(self) -> None:
        """Wait for the current collective, then launch the next one if there is one."""
        collective = self.collectives[-1]
        wait_start = time.perf_counter()
        wait_for_work(
            collective.work, self._description, self._attribute_errors, is_on_cpu=self._is_on_cpu
        )
        now = time.perf_counter()
        self.exposed_seconds += now - wait_start
        self.completion_times.setdefault(len(self.collectives), now)
        following = None
        if collective.on_completion is not None:
            with self._attribute_errors(self._description, None):
                following = collective.on_completion()
        if following is None:
            self.is_done = True
        else:
            self._track(following)

    def poll(self) -> bool:
        """Record the time if the current collective has completed, without waiting for it.

        Returns True if the collective need not be polled again.
        """
        # A callback would be more precise. But gloo calls it on a separate thread, which aborts a
        # process whose interpreter exits meanwhile, as after an exception in a backward pass.
        work = self.collectives[-1].work
        if not self._is_on_cpu or type(work) is not dist.Work:
            return True
        if not work.is_completed():
            return False
        self.completion_times.setdefault(len(self.collectives), time.perf_counter())
        return True

    def _track(self, collective: Collective) -> None:
        self.collectives.append(collective)
        work = collective.work
        # torch's own collectives are polled. The caller's collectives can report their completion.
        if self._is_on_cpu and type(work) is not dist.Work and hasattr(work, "get_future"):
            number = len(self.collectives)

            def record_completion(_: Any) -> None:
                self.completion_times.setdefault(number, time.perf_counter())

            work.get_future().add_done_callback(record_completion)


class RunningReductions:
    """The reductions of one step, in the order of their launches."""

    def __init__(self, attribute_errors: AttributeErrors) -> None:
        self._attribute_errors = attribute_errors
        #: Launched reductions that `wait` has not returned yet.
        self.launched: list[BucketReduction] = []
        #: Reductions whose current collective is polled for the time of its completion.
        self._polled: list[BucketReduction] = []

    def would_wait(self) -> bool:
        """Return True if `launch` would wait for the communication hook of an earlier bucket."""
        last = self.launched[-1] if self.launched else None
        if last is None or not last.blocks_next_bucket:
            return False
        return not last.collectives[-1].work.done()

    def launch(self, bucket: Bucket, launch_collective: Callable[[Bucket], Collective]) -> None:
        """Launch the first collective of a bucket with `launch_collective`.

        With a communication hook on CPUs, first wait until the previous bucket has been reduced.
        Then launch the second collective, if any, of the bucket that was launched
        SECOND_COLLECTIVE_LAG buckets before.
        """
        if self.launched and self.launched[-1].blocks_next_bucket:
            self.launched[-1].advance()
        self._polled = [earlier for earlier in self._polled if not earlier.poll()]
        reduction = BucketReduction(bucket, launch_collective, self._attribute_errors)
        self.launched.append(reduction)
        self._polled.append(reduction)
        if len(self.launched) > SECOND_COLLECTIVE_LAG:
            earlier = self.launched[-1 - SECOND_COLLECTIVE_LAG]
            if earlier.has_next:
                earlier.advance()
                self._polled.append(earlier)

    def wait(self) -> list[BucketReduction]:
        """Wait until all buckets are reduced, and return their reductions."""
        for reduction in self._polled:
            reduction.poll()
        self._polled = []
        # Each round waits for the current collective of every bucket and launches the bucket's next
        # one, so that the next collectives of all buckets overlap.
        while not all(reduction.is_done for reduction in self.launched):
            for reduction in self.launched:
                if not reduction.is_done:
                    reduction.advance()
        reductions = self.launched
        self.launched = []
        return reductions

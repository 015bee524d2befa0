"""The communicator of a process group: the path of a call from its arguments to its result.

    collective.py, lists.py       validate the arguments and describe the call
    Communicator.run              orders the call after all earlier calls of the group
    _Execution.run                runs the call on the caller's thread or on the progress thread
    algorithms/dispatch.py        compares the ranks' calls, chooses an algorithm and moves the data
    Communicator.fail             turns an error into one that names the ranks that caused it

A process group has one communicator per rank. On the registered backend, the group creates it. On
other backends, the first collective creates it (see `groups.py`). The calls of a group run one at a
time, in the order in which they are made: see Note [Engine hand-over].

A call that fails makes the group unusable. The exception is a mismatch that all ranks find before
data moves: the group can still be used.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from collectives.algorithms.gloo import GlooGroups
from collectives.algorithms.point_to_point import PointToPoint
from collectives.choice.cost import CostModel
from collectives.choice.topology import Topology
from collectives.errors import UNUSABLE, RankLost
from collectives.execution.progress import ProgressQueue
from collectives.execution.threads import is_daemon_of_user, start_thread
from collectives.execution.timeouts import call_timeout
from collectives.execution.work import Work
from collectives.failure_detection import (
    MIN_POLL_SECONDS,
    POLL_FRACTION,
    FailureDetector,
    Operation,
)
from collectives.shared_memory.engine import Job, is_done
from collectives.shared_memory.fingerprint import Call
from collectives.store import STORE_SECONDS, query_store

# Number of past calls to remember, because ranks may run ahead of each other.
CALLS_REMEMBERED = 16
#: The communicators of this process, including those of registered backends.
all_communicators: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
#: Set when the process starts to exit: see Note [Threads at exit].
is_exiting = threading.Event()


class Communicator:
    """The state of one rank in one process group, which all of its collectives use.

    Args:
        group: torch's process group, or its gloo backend.
        store: a store that only this group uses: see `create_fresh_store`.
        deadline: the time by which all ranks must have set up the group, a value of
            time.monotonic.
    """

    def __init__(self, group: Any, *, store: Store, timeout: timedelta, deadline: float) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._process_id = os.getpid()
        self._initial_timeout = timeout.total_seconds()
        #: The timeout of the current call in seconds.
        self.timeout = self._initial_timeout
        self.store = store
        self.gloo = GlooGroups(group, store)
        self.point_to_point = PointToPoint(group, range(self.world_size), self.rank, self.gloo.base)
        self.topology = Topology(
            store,
            self.rank,
            self.world_size,
            timeout=self.timeout,
            deadline=deadline,
            find_ended=self.point_to_point.find_disconnected_peers,
        )
        self.failures = FailureDetector(
            store,
            self.rank,
            self.world_size,
            self.topology,
            self.point_to_point,
            self.gloo,
            deadline=deadline,
        )
        self.progress = ProgressQueue(self.topology.arena, on_end=self._announce_progress_end)
        self.cost_models: dict[str, CostModel] = {}
        #: The algorithm that "auto" has chosen, by collective, size in bytes and whether gloo can
        #: run the call.
        self.choices: dict[tuple[str, int, bool], str] = {}
        #: True inside `checked`: the ranks compare their calls before data moves.
        self.compare_calls = False
        #: False inside `checked(shapes=False)`: numbers of elements are compared, not shapes.
        self.compare_shapes = True
        #: The call that is running, or the last call.
        self.operation = Operation()
        self._recent_calls: deque[bytes] = deque(maxlen=CALLS_REMEMBERED)
        #: True after `close` was called: this rank can make no further calls.
        self.is_closed = False
        self._is_stopping = False
        self._stop_watching = threading.Event()
        if not self.topology.is_single_host:
            seconds = max(0.0, deadline - time.monotonic()) + STORE_SECONDS
            query_store(seconds, self.gloo.open_store)
            watch = partial(_publish_long_waits, weakref.ref(self), self._stop_watching)
            start_thread("collectives watch", watch)
        all_communicators.add(self)

    def run(
        self,
        call: Call,
        result: Tensor | Sequence[Tensor],
        body: Callable[[], None],
        *,
        async_op: bool,
        make_job: Callable[[], Job | None] = lambda: None,
    ) -> Work | None:
        """Run a call after all earlier calls of the group.

        Return None when the call has finished, or raise the error that `fail` chooses. With
        `async_op`, return the call's handle at once; its `wait` raises that error.

        Args:
            call: the call that the ranks compare.
            result: the tensors of the handle's result, which the call may write to.
            body: the function that runs the collective.
            make_job: returns the call as a job for the engine, or None if the engine cannot run it.
        """
        outputs = [result] if isinstance(result, Tensor) else list(result)
        execution = _Execution(
            communicator=self,
            packed=call.packed,
            body=body,
            # These settings are read now, because the call may run after their context has ended.
            compare_calls=self.compare_calls,
            timeout=call_timeout.get(),
            in_inference_mode=any(output.is_inference() for output in outputs),
        )
        # Recording costs microseconds, so nothing is recorded unless the profiler runs. The event
        # of an asynchronous call covers its start only, because it must not outlive the profiler.
        event = (
            record_function(f"collectives:{call.kind}") if _profiler_enabled() else nullcontext()
        )
        if not async_op:
            self.progress.wait_for_last()
            with event:
                execution.run(None)
            return None
        with event:
            return self._submit(execution, outputs, make_job)

    def _submit(
        self, execution: "_Execution", outputs: list[Tensor], make_job: Callable[[], Job | None]
    ) -> Work:
        """Queue an asynchronous call and return its handle."""
        with self.progress.submitting:
            job = self.progress.assign(make_job, is_usable=self.failures.group_error is None)

            def run() -> None:
                try:
                    execution.run(job)
                finally:
                    self.progress.finish_first()

            work = Work(
                run,
                outputs,
                timeout=execution.timeout or self.group_timeout,
                count_calls=lambda: self.operation.number,
                has_moved=partial(is_done, job),
            )
            self.progress.submit(work, job)
        return work

    def can_skip_queue(self, output: Tensor) -> bool:
        """Return True if no earlier call is pending, and no feature is active that needs `run`."""
        if self.progress.last or self.compare_calls or _profiler_enabled():
            return False
        return call_timeout.get() is None and not output.is_inference()

    def run_without_queue(self, call: Call, *tensors: Tensor) -> None:
        """Run a synchronous call for which a gloo group exists, with less overhead than `run`.

        The caller must check `can_skip_queue` before it flattens the tensors, because earlier calls
        may still write to them.
        """
        with self.progress.running:
            self.start_call(call.packed)
            try:
                self.gloo.run(call.kind, call.packed, tensors, call.op, call.root, self.timeout)
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Raise the error that explains why the current call failed."""
        reason = self.failures.explain(error, self.operation, self.timeout)
        if reason is error:
            raise error
        raise reason from error

    def start_call(
        self, packed: bytes, *, compare_calls: bool = False, timeout: float | None = None
    ) -> None:
        """Register a call as the group's current call; raise RankLost if the group has failed.

        `compare_calls` is True if the ranks compare the call before data moves. `timeout` is the
        timeout of the call in seconds; None means the group's timeout.
        """
        if is_exiting.is_set() and is_daemon_of_user():
            raise SystemExit  # ends the thread silently: see Note [Threads at exit]
        group_error = self.failures.group_error
        if group_error is not None:
            raise RankLost(group_error.ranks, f"an earlier call has failed: {group_error}")
        self.timeout = timeout or self.group_timeout
        if self.topology.arena is not None:
            self.topology.arena.timeout = self.timeout
        self._recent_calls.append(packed)
        number = self.operation.number + 1
        self.operation = Operation(
            number, self._recent_calls, range(self.world_size), compare_calls
        )
        self.point_to_point.finish_within(self.timeout)
        self.point_to_point.tag_by(b"")

    def abort(self, event: str = "called abort") -> None:
        """Leave the group at once, so that calls fail on all ranks; `event` is the reason."""
        if not self.is_inherited:
            reason = RankLost([self.rank], f"rank {self.rank} {event}; {UNUSABLE}")
            self.failures.leave_group_with_reason(reason, self.operation)

    def stop(self) -> None:
        """End the threads after the queued calls; called when the process exits.

        The rank does not leave the group: if other ranks make further calls, they notice that this
        process has ended.
        """
        self._stop_watching.set()
        self._is_stopping = True
        self.progress.stop()

    def close(self) -> None:
        """Leave the group after the queued calls, and announce this to the other ranks."""
        if self.is_closed or self.is_inherited:
            return
        self.is_closed = True
        self._stop_watching.set()
        self.progress.close()

    @property
    def group_timeout(self) -> float:
        """The timeout of the group in seconds, which torch may have changed."""
        return self.gloo.get_timeout_seconds() or self._initial_timeout

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one that created this object.

        A forked process shares the counters of its parent, so it must not make calls or leave.
        """
        return self._process_id != os.getpid()

    @property
    def is_waiting(self) -> bool:
        """True while a call runs on a group that has not failed."""
        return self.progress.running.locked() and self.failures.group_error is None

    def _announce_progress_end(self) -> None:
        """Announce that this rank makes no further calls, unless the process ends."""
        if not self._is_stopping and self.failures.group_error is None:
            self.failures.announce_end(self.operation)


@dataclass(slots=True)
class _Execution:
    """A call and its settings, to run on the caller's thread or on the progress thread."""

    communicator: Communicator
    packed: bytes
    body: Callable[[], None]
    compare_calls: bool
    #: The timeout of this call in seconds, or None for the timeout of the group.
    timeout: float | None
    #: True if the call writes to a tensor that was created in inference mode. torch allows such a
    #: write only in that mode, which the calling thread may have left.
    in_inference_mode: bool

    def run(self, job: Job | None) -> None:
        """Run the call in the engine if `job` is given, otherwise in Python."""
        comm = self.communicator
        # The engine owns the lock while it has jobs: see Note [Engine hand-over].
        with comm.progress.running if job is None else nullcontext():
            comm.start_call(self.packed, compare_calls=self.compare_calls, timeout=self.timeout)
            try:
                if job is None:
                    with torch.inference_mode() if self.in_inference_mode else nullcontext():
                        self.body()
                elif not is_done(job):
                    comm.topology.require_arena().run_job(job)
            except BaseException as error:
                comm.fail(error)


def _publish_long_waits(ref: weakref.ref[Communicator], stop: threading.Event) -> None:
    """Publish that this rank waits while two successive polls find it in the same call.

    The other ranks then do not mistake it for a late rank: see Note [Attribution of a failure].
    """
    previous: Operation | None = None
    published: Operation | None = None
    seconds = 0.0
    while not stop.wait(seconds):
        comm = ref()
        if comm is None:
            return
        current = comm.operation if comm.is_waiting else None
        waiting = current if current is previous else None
        previous = current
        if waiting is not published:
            comm.failures.publish_waiting(waiting)
            published = waiting
        seconds = max(MIN_POLL_SECONDS, POLL_FRACTION * comm.timeout)
        # The thread must not keep the communicator alive while it sleeps.
        del comm

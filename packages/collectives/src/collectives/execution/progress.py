"""The queue of a group's asynchronous calls, and the thread that runs them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from collectives.execution.threads import start_thread
from collectives.execution.work import Work
from collectives.shared_memory.arena import Arena
from collectives.shared_memory.engine import Job

# Note [Engine hand-over]
# ~~~~~~~~~~~~~~~~~~~~~~~
# The calls of a group run one at a time, in the order in which they were made. A call runs only
# while the lock `running` is acquired. A synchronous call acquires it on the caller's thread. An
# asynchronous call is queued for one of two executors:
#
#   ENGINE  The progress thread waits inside the compiled engine, without the GIL, and
#           starts the call as soon as it is queued. The caller acquires `running` for the first of
#           these calls. The progress thread releases it after the last one.
#   PYTHON  The progress thread acquires `running`, runs the call's Python body and releases it.
#
# The executors of the calls that have not finished determine the state:
#
#   state                executors       owner of `running`             executor of a new call
#   IDLE                 none            none, or a synchronous call    ENGINE if `running` is free
#   ENGINE               E ... E         the engine                     ENGINE
#   ENGINE_THEN_PYTHON   E ... E P ... P the engine                     PYTHON
#   PYTHON               P ... P         the call that runs, if any     PYTHON
#
# ENGINE also requires that the engine supports the call and that the group has not failed.
# Otherwise the executor is PYTHON. A call behind a PYTHON call never gets the executor ENGINE:
# `running` would stay acquired for it, so the earlier call could not acquire the lock, and neither
# call could finish.

# Time that `close` waits for calls that are still queued.
CLOSE_SECONDS = 1.0


class Executor(Enum):
    """The part of the program that runs an asynchronous call: see Note [Engine hand-over]."""

    ENGINE = auto()
    PYTHON = auto()


class State(Enum):
    """The state of a group's queue: see Note [Engine hand-over]."""

    IDLE = auto()
    ENGINE = auto()
    ENGINE_THEN_PYTHON = auto()
    PYTHON = auto()


class ProgressQueue:
    """The asynchronous calls of one group.

    Args:
        arena: the shared memory whose engine runs jobs, or None.
        on_end: called once after the last call of a group that is closed.
    """

    def __init__(self, arena: Arena | None, on_end: Callable[[], None]) -> None:
        #: Owned by the call that runs: see Note [Engine hand-over].
        self.running = threading.Lock()
        #: Acquired while a call is queued, so that executors and the queue have the same order.
        self.submitting = threading.Lock()
        #: The last asynchronous call, or None if it has finished.
        self.last: Work | None = None
        self._arena = arena
        self._on_end = on_end
        self._executors: deque[Executor] = deque()
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        """The state that the unfinished calls determine."""
        if not self._executors:
            return State.IDLE
        if self._executors[0] is Executor.PYTHON:
            return State.PYTHON
        if self._executors[-1] is Executor.ENGINE:
            return State.ENGINE
        return State.ENGINE_THEN_PYTHON

    def wait_for_last(self) -> None:
        """Wait as `Work.join` does, until all asynchronous calls so far have finished."""
        last = self.last
        if last is None:
            return
        last.join()
        self._forget(last)

    def assign(self, make_job: Callable[[], Job | None], *, is_usable: bool) -> Job | None:
        """Choose the executor of a new call; return its job if the executor is the engine.

        The caller must have acquired `submitting`, and then call `submit`. `is_usable` is False if
        the engine must not run the call, for example because the group has failed.
        """
        job = None
        state = self.state
        if is_usable and state is State.ENGINE:
            job = make_job()
        elif is_usable and state is State.IDLE and self.running.acquire(blocking=False):
            try:
                job = make_job()
            finally:
                if job is None:
                    self.running.release()
        self._executors.append(Executor.PYTHON if job is None else Executor.ENGINE)
        return job

    def submit(self, work: Work, job: Job | None) -> None:
        """Queue a call whose executor `assign` has chosen."""
        if self._thread is None:
            self._thread = start_thread("collectives", self._serve)
        self.last = work
        self._put(work, job)

    def finish_first(self) -> None:
        """Record that the first unfinished call has ended; the progress thread calls this."""
        with self.submitting:
            executor = self._executors.popleft()
            if executor is Executor.ENGINE and self.state in (State.IDLE, State.PYTHON):
                self.running.release()

    def close(self) -> None:
        """End the progress thread after the queued calls.

        These calls may wait for lost ranks, so this method waits at most `CLOSE_SECONDS`.
        """
        with self.submitting:
            thread = self._thread
            self._put(None, None)
        if thread is None:
            self._on_end()
        elif thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def stop(self) -> None:
        """End the progress thread, if there is one, after the queued calls."""
        with self.submitting:
            if self._thread is not None and self._thread.is_alive():
                self._put(None, None)

    def join(self, deadline: float) -> bool:
        """Return True if the progress thread and the call that runs end by `deadline`.

        `deadline` is a value of time.monotonic. The call may run on a daemon thread of the user.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                return False
        if not self.running.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        self.running.release()
        return True

    def _put(self, work: Work | None, job: Job | None) -> None:
        # The caller has acquired `submitting`, so that both queues have the same order.
        self._queue.put(work)
        if self._arena is not None:
            self._arena.put(job)

    def _serve(self) -> None:
        """Run queued calls until the group is closed."""
        while True:
            if self._arena is not None:
                # `serve` waits for the next call, and runs its job as far as the engine can.
                self._arena.serve()
            work = self._queue.get()
            if work is None:
                self._on_end()
                return
            work.run()
            # Neither the queue nor this thread, which waits now, may keep the call's tensors alive.
            self._forget(work)
            del work

    def _forget(self, finished: Work) -> None:
        """Reset `last` if it is this call, which has finished."""
        with self.submitting:
            if self.last is finished:
                self.last = None

"""Handles of asynchronous operations.

Callbacks of a future may start collectives and wait for them, as torch's `powerSGD_hook` does. They
therefore run on a separate thread: the progress thread would wait for itself.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from collectives.execution.threads import start_thread
from collectives.shared_memory.process import yield_core

# At the timeout, the operation itself raises an error that names the lost ranks. `wait` must not
# raise its less specific error earlier.
GRACE_SECONDS = 3.0


class Work(dist.Work):
    """The handle of one operation.

    Args:
        operation: the function that runs the operation.
        result: the value of `result()` and of the future.
        timeout: the operation's timeout in seconds. `wait` raises an error if the operation has not
            finished `GRACE_SECONDS` after it.
        count_calls: returns the number of calls that the group has started. While it increases, a
            queued operation is not late.
        has_moved: returns True if all data has moved, even if the thread that runs the operation
            still waits for the GIL.
    """

    def __init__(
        self,
        operation: Callable[[], None],
        result: Any = None,
        *,
        timeout: float = float("inf"),
        count_calls: Callable[[], int] = lambda: 0,
        has_moved: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._operation: Callable[[], None] | None = operation
        self._result = result
        self._timeout = timeout
        self._count_calls = count_calls
        self._has_moved = has_moved
        self._error: BaseException | None = None
        self._done = threading.Event()
        # Completing `_trigger` computes the result of `_future`, which callers get.
        self._trigger: Future[Any] | None = None
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    @classmethod
    def make_completed(cls, result: Any = None) -> "Work":
        """Return the handle of an operation that has finished already."""
        work = cls(lambda: None, result)
        work.run()
        return work

    def run(self) -> None:
        """Run the operation; the progress thread calls this."""
        assert self._operation is not None
        try:
            self._operation()
        except BaseException as error:
            self._error = error
        # The operation refers to tensors, which this handle must not keep alive.
        self._operation = None
        with self._lock:
            self._done.set()
            trigger = self._trigger
        if trigger is not None:
            start_thread("collectives callbacks", partial(trigger.set_result, None))

    def join(self) -> None:
        """Wait until the operation has succeeded or failed; raise RuntimeError if it is late."""
        seconds = min(self._timeout + GRACE_SECONDS, threading.TIMEOUT_MAX)
        count = self._count_calls()
        while not self._done.wait(seconds):
            previous = count
            count = self._count_calls()
            if count == previous:
                raise RuntimeError(
                    f"timed out: the operation has not finished {seconds:g} s after the one before "
                    "it; check that every rank makes this call"
                )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation has finished; raise an error if it failed or is late."""
        seconds = timeout.total_seconds() if timeout else 0.0
        if not seconds:
            self.join()
        elif not self._done.wait(seconds):
            raise RuntimeError(
                f"timed out: the operation has not finished after {seconds:g} s; check that every "
                "rank makes this call"
            )
        if self._future is not None:
            # As on gloo, the future is completed too. Its callbacks may still run.
            with contextlib.suppress(Exception):
                self._future.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return True if the operation has finished; otherwise yield the core and return False."""
        if self._future is not None:
            is_finished = self._future.done()
        else:
            is_finished = self._done.is_set() or self._has_moved()
        if is_finished:
            return True
        yield_core()
        return False

    def is_success(self) -> bool:
        """Return True if the operation has finished without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self._error

    def result(self) -> Any:
        """Return the tensors of the operation."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future that is completed with the result or the error."""
        if self._has_moved():
            # `is_completed` returns True already, so the future must be completed too. The wait is
            # short: the executing thread only needs the GIL.
            self._done.wait()
        with self._lock:
            if self._future is None:
                self._trigger = Future()
                self._future = self._trigger.then(self._finish)
                if self._done.is_set():
                    self._trigger.set_result(None)
            return self._future

    def _finish(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class CoalescedWork(dist.Work):
    """The handle of several operations that were started together.

    `wait` returns when all operations are done, or raises the error of the first one that failed.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for every operation, also after an error; raise the first error."""
        seconds = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + seconds
        first_error: BaseException | None = None
        for work in self._works:
            try:
                # Zero means the operation's own timeout.
                remaining = max(1e-3, deadline - time.monotonic()) if seconds else 0.0
                work.wait(timedelta(seconds=remaining))
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return True

    def is_completed(self) -> bool:
        """Return True if every operation has ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return True if every operation has ended without an error."""
        return all(work.is_completed() and work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error of an operation, or None."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)


class MessageWork(dist.Work):
    """The handle of a message that gloo sends or receives, with the timeout of the group.

    The default of gloo's own handle is the timeout with which the connections were created. The
    registered backend disables that timeout: see Note [One gloo group per kind of call].
    """

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        super().__init__()
        self._work = work
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been transferred; raise RuntimeError at the timeout."""
        return self._work.wait(timeout or self._timeout)

    def is_completed(self) -> bool:
        """Return True if `wait` has returned or raised an error, as gloo does for messages."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return True if the message has been transferred."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of `wait`, or None."""
        return self._work.exception()

    def _source_rank(self) -> int:
        """Return the rank that sent the message."""
        return self._work._source_rank()

"""The handle of an asynchronous operation, as torch.distributed gives it.

Notable:
- callbacks of a future may start collectives and wait for them (torch's `powerSGD_hook` does), so
  they never run on the progress thread, which would wait for itself, but on one of their own;
- `wait` ends: an operation that is not done a while after the group's timeout is an error.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future, collect_all

from collectives.shared_memory.process import yield_core

# The operation itself says at the timeout who is lost, which is the better error.
GRACE_SECONDS = 3.0


class Work(dist.Work):
    """`wait` returns when the operation is done, or raises what it raised.

    `progress()` counts what the group has done: while it rises, an operation that is still queued
    is not late. `timeout` is the group's, in seconds. `moved()` tells that it is done, though the
    thread that does it may not have said so yet: it waits for the interpreter.
    """

    def __init__(
        self, operation: Callable[[], None], result: Any = None, *, timeout: float = float("inf"),
        progress: Callable[[], int] = lambda: 0, moved: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._operation: Callable[[], None] | None = operation
        self._result = result
        self._timeout, self._progress, self._moved = timeout, progress, moved
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    @classmethod
    def done(cls, result: Any = None) -> "Work":
        """The handle of something that has been done already."""
        work = cls(lambda: None, result)
        work.run()
        return work

    def run(self) -> None:
        """Do it (the progress thread calls this)."""
        assert self._operation is not None
        try:
            self._operation()
        except BaseException as error:
            self._error = error
        self._operation = None
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            # On a thread of its own, as whatever waits for it may start collectives and wait too.
            threading.Thread(target=future.set_result, args=(None,), daemon=True).start()

    def join(self) -> None:
        """Return when it has ended, well or not; raise if it does not end."""
        seconds = min(self._timeout + GRACE_SECONDS, threading.TIMEOUT_MAX)
        before = self._progress()
        while not self._done.wait(seconds):
            now = self._progress()
            if now == before:
                raise RuntimeError(
                    f"timed out: the operation is not done {seconds:g} s after the one before it"
                )
            before = now

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when done; raise what the operation raised."""
        if seconds := timeout.total_seconds() if timeout else 0.0:
            if not self._done.wait(seconds):
                raise RuntimeError(f"timed out: the operation is not done after {seconds:g} s")
        else:
            self.join()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return True if the operation has ended; otherwise give the core to who works on it."""
        if self._done.is_set() or self._moved():
            return True
        yield_core()
        return False

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What the operation raised."""
        return self._error

    def result(self) -> Any:
        """The tensors of the operation."""
        return self._result

    def get_future(self) -> Future[Any]:
        """A future that holds the result, or the error."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._done.is_set():
                    self._future.set_result(None)
            started = self._future
        return started.then(self._finish)

    def _finish(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class CoalescedWork(dist.Work):
    """The handle of several operations that were started together.

    `wait` returns when all of them are done, or raises the error of the first one that failed.
    """

    def __init__(self, works: Sequence[dist.Work], result: Any = None) -> None:
        super().__init__()
        self._works, self._result = list(works), result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for every operation, also after an error; raise the first error."""
        seconds = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + seconds
        first: BaseException | None = None
        for work in self._works:
            try:
                if seconds:
                    # Zero would mean the operation's own timeout.
                    left = max(1e-3, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left))
                else:
                    work.wait()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        """Return True if every operation has ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return True if every operation has ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first operation's error, or None."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> Any:
        """Return the tensors of all operations."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future that holds the result, or the first error."""
        return collect_all([work.get_future() for work in self._works]).then(self._finish)

    def _finish(self, _: Any) -> Any:
        self.wait()
        return self._result

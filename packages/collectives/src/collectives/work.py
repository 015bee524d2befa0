"""The handle of an asynchronous operation, as torch.distributed gives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future


class Work(dist.Work):
    """`wait` returns when the operation is done, or raises what it raised."""

    def __init__(self, operation: Callable[[], None], result: Any = None) -> None:
        super().__init__()
        self._operation: Callable[[], None] | None = operation
        self._result = result
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    @classmethod
    def done(cls, result: Any = None) -> Work:
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
            future.set_result(None)

    def join(self) -> None:
        """Return when it has ended, well or not."""
        self._done.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when done; raise what the operation raised."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):
            raise RuntimeError(f"the operation is not done after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.is_set() and self._error is None

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

"""The calls that torch coalesces into one: they share a count, an error and a handle."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Coalesced:
    """The calls of one coalesced call.

    Once a call has failed, the ones after it are skipped. All ranks get the same error at the same
    call, so they stay in step even if their counts differ.
    """

    def __init__(self, count: int) -> None:
        #: The number of calls.
        self.count = count
        #: The first error.
        self.error: Exception | None = None
        self._jobs: list[ctypes.Structure] = []

    def add(self, job: ctypes.Structure | None) -> None:
        """Skip a call's job in the engine, too, once an earlier call has failed."""
        if job is not None:
            # Added before the check: `fail`, on the progress thread, sets the error first.
            self._jobs.append(job)
            self._skip_jobs()

    def fail(self, error: Exception) -> None:
        """Skip the calls that have not started."""
        self.error = self.error or error
        self._skip_jobs()

    def _skip_jobs(self) -> None:
        if self.error is not None:
            for job in list(self._jobs):
                job.done = 1


_current: ContextVar[Coalesced | None] = ContextVar("coalesced", default=None)


def current() -> Coalesced | None:
    """Return the coalesced call that this thread is making, or None."""
    return _current.get()


@contextmanager
def coalesced(count: int) -> Iterator[None]:
    """Make the calls inside parts of one coalesced call."""
    token = _current.set(Coalesced(count))
    try:
        yield
    finally:
        _current.reset(token)

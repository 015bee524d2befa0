"""Coalesced calls: several calls that torch combines, with one count, one error and one handle."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class CoalescedCalls:
    """The calls that are combined into one.

    Once a call has failed, the calls after it are skipped. All ranks get the same error at the same
    call, so they stay synchronized even if their counts differ.
    """

    def __init__(self, count: int) -> None:
        #: The number of calls.
        self.count = count
        #: The first error.
        self.error: Exception | None = None
        self._jobs: list[ctypes.Structure] = []

    def add(self, job: ctypes.Structure | None) -> None:
        """Register a call's job, so that the engine skips it after an earlier call has failed."""
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


_current: ContextVar[CoalescedCalls | None] = ContextVar("coalesced", default=None)


def current_coalesced_calls() -> CoalescedCalls | None:
    """Return the coalesced calls that this thread is making, or None."""
    return _current.get()


@contextmanager
def coalesced(count: int) -> Iterator[None]:
    """Combine the calls inside the context, whose number is `count`."""
    token = _current.set(CoalescedCalls(count))
    try:
        yield
    finally:
        _current.reset(token)

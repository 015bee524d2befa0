"""Timeouts of single calls, which replace the timeout of the group."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

#: The timeout in seconds of the calls in a `limit_calls` context; None outside of it.
call_timeout: ContextVar[float | None] = ContextVar("call_timeout", default=None)


@contextmanager
def limit_calls(timeout: timedelta | None) -> Iterator[None]:
    """Limit each call in the context to `timeout`; None leaves the group's timeout in effect."""
    if timeout is None:
        yield
        return
    check_timeout(timeout)
    token = call_timeout.set(timeout.total_seconds())
    try:
        yield
    finally:
        call_timeout.reset(token)


def check_timeout(timeout: timedelta) -> None:
    """Raise ValueError unless the timeout is positive."""
    if timeout <= timedelta():
        raise ValueError(
            f"expected a positive timeout, got {timeout.total_seconds():g} s; omit it to use the "
            "default"
        )

"""The background threads of this package, which the process waits for before it ends."""

# Note [Threads at exit]
# ~~~~~~~~~~~~~~~~~~~~~~
# A daemon thread may return from torch's C++ code while the interpreter shuts down. It is then
# terminated inside a C++ destructor, which aborts the process ("terminate called without an active
# exception"). Every thread of this package may be inside torch. At exit, queued calls, and calls on
# daemon threads of the user, therefore get `CLOSE_SECONDS` to finish. A group whose calls wait for
# other ranks is aborted, which ends these waits. Then all threads are joined for at most
# `EXIT_SECONDS`. A thread whose caller has stopped waiting may never return, for example if a store
# hangs. On a busy machine, such a thread often returns, but late. The exit therefore waits for it
# too, for at most `ABANDONED_SECONDS`. A daemon thread of the user that makes another call is ended
# by `SystemExit`. The main thread can still make calls, in functions that run at exit.

import threading
import time
import weakref
from collections.abc import Callable, Iterable

# Time that the exit of the process waits for all threads whose callers have stopped waiting.
ABANDONED_SECONDS = 1.0
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_abandoned: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start_thread(name: str, function: Callable[[], object]) -> threading.Thread:
    """Run `function` on a daemon thread that `join_threads` waits for."""
    thread = threading.Thread(target=function, daemon=True, name=name)
    _threads.add(thread)
    thread.start()
    return thread


def is_daemon_of_user() -> bool:
    """Return True if the current thread is a daemon that this package has not started."""
    thread = threading.current_thread()
    return thread.daemon and thread not in _threads


def abandon(thread: threading.Thread) -> None:
    """Mark a thread that may never return: `join_threads` waits for it only for a short time."""
    _abandoned.add(thread)


def join_threads(seconds: float) -> None:
    """Wait until all threads have ended.

    Wait at most `seconds`, and then at most `ABANDONED_SECONDS` for abandoned threads.
    """
    _join(_threads - _abandoned, seconds)
    _join(_abandoned, ABANDONED_SECONDS)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

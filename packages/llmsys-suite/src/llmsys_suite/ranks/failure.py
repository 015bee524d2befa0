"""Failure handling: a failure on one rank ends the run on every rank.

Note [Failure of a rank]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank that fails must end the run. It cannot rely on collectives: the other ranks may wait in a
collective of another process group, in a queue, or in a loop on the store. Closing the connections
of the failed rank ends only some of these waits.

Every rank therefore polls one key of the rendezvous store in a separate thread (`FailureWatch`).
A rank that fails writes its message under that key (`report_failure`) and ends its process. The
watch of every other rank reads the message and ends that process too, with exit status 1. A store
that is lost counts as a failure, because the process that served it has ended.

A process that is killed reports nothing. The launcher, ours or torchrun, notices its exit status.
Processes that a rank or the launcher has started end with it (`end_with_parent`).
A training run that saves a checkpoint before it ends defers SIGTERM (`collect_stop_requests`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

KEY = "failure"
POLL_SECONDS = 0.2


def report_failure(store: dist.Store, message: str) -> str:
    """Publish `message` to all ranks; return the message of the rank that failed first."""
    return store.compare_set(KEY, "", message).decode()


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process once the process id of its parent is not `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def collect_stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM signals in the yielded list; until exit, they do not end the process."""
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, previous)


class FailureWatch:
    """A thread that calls `on_failure(message)` after a failure.

    A failure is a message from a rank, the loss of the store, or the removal of `folder`.

    Args:
        store: the store that all ranks share. The watch polls a clone, because a client of a
            `TCPStore` serves one call at a time and the main thread may wait in one.
        on_failure: called in the thread of the watch, at most once.
        folder: the run folder, or None on ranks that do not write to it. Its removal is reported to
            all ranks, because a stage that writes nothing for minutes would not notice it.
    """

    def __init__(
        self, store: dist.Store, on_failure: Callable[[str], None], folder: Path | None = None
    ) -> None:
        self._store = store.clone()
        self._on_failure = on_failure
        self._folder = folder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="failure watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The store may be closed afterwards."""
        self._stopped.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            message = self._read_failure()
            if not message and self._folder is not None and not os.path.exists(self._folder):
                message = report_failure(self._store, f"the run folder {self._folder} was deleted")
            if message:
                self._on_failure(message)
                return

    def _read_failure(self) -> str:
        """Return the message of the first failed rank or of a lost store, or an empty string."""
        try:
            return self._store.get(KEY).decode() if self._store.check([KEY]) else ""
        except Exception as error:
            return f"the rendezvous store is lost: {error}"

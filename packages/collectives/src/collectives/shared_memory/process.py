"""System calls about other processes of this host."""

import os
import time
from contextlib import suppress
from pathlib import Path


def yield_core() -> None:
    """Let another process run on this core."""
    try:
        os.sched_yield()
    except (AttributeError, OSError):
        time.sleep(0)


class PeerProcess:
    """Another process of this host, identified by its process ID and start time.

    The start time differs if the process has ended and a new process has the same ID. A process
    that does not exist has ended.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        status = self._read_status()
        self._start_time = status[1] if status is not None else ""

    def has_ended(self) -> bool:
        """Return True if the process has ended, even if its parent has not waited for it."""
        status = self._read_status()
        return status is None or status[0] in "ZX" or status[1] != self._start_time

    def _read_status(self) -> tuple[str, str] | None:
        """Return the state and the start time of the process with this ID, or None."""
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses may contain spaces and parentheses.
            fields = self._stat.read_text().rpartition(")")[2].split()
            return fields[0], fields[19]
        return None

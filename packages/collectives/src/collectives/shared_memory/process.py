"""System calls about other processes of this host, with fallbacks for platforms that lack them."""

import os
import select
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
    """Another process, which may end and whose process ID may then be reused.

    A process handle detects both events. Without `pidfd_open`, which is missing from older kernels,
    some builds of Python and some sandboxes, the process is identified by its start time in /proc.

    Raises ProcessLookupError if the process does not exist.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._handle: int | None = None
        self._start_time = ""
        try:
            self._poll = select.poll()
            # The constant is read first: a handle that is not registered would never report an end.
            event = select.POLLIN
            self._handle = os.pidfd_open(pid)
            self._poll.register(self._handle, event)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError):
            status = self._read_status()
            if status is None:
                raise ProcessLookupError(f"no process {pid}") from None
            self._start_time = status[1]

    def has_ended(self) -> bool:
        """Return True once the process has ended, even if its parent has not waited for it."""
        if self._handle is not None:
            return bool(self._poll.poll(0))
        status = self._read_status()
        return status is None or status[0] in "ZX" or status[1] != self._start_time

    def close(self) -> None:
        """Release the handle."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _read_status(self) -> tuple[str, str] | None:
        """Return the state and the start time of the process with this ID, if it exists."""
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses may contain spaces and parentheses.
            fields = self._stat.read_text().rpartition(")")[2].split()
            return fields[0], fields[19]
        return None

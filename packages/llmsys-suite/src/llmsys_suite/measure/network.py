"""Counts of the bytes that this process receives over TCP and sums in shared memory.

The kernel counts the bytes of each TCP socket. The count does not depend on reports of a library or
on other programs on the same interface. Most transports of NCCL do not use TCP sockets. In shared
memory, each rank announces the array that it is about to sum; if the announcements differ, the call
fails.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from collectives.shared_memory.arena import Arena
from collectives.shared_memory.fingerprint import Call

#: Bytes to read of Linux's struct tcp_info, and offset of tcpi_bytes_received (since Linux 4.1).
_BUFFER_BYTES, _BYTES_RECEIVED_OFFSET = 256, 128


class Received:
    """A counter of the bytes received over TCP since its creation."""

    def __init__(self) -> None:
        self._before = _read_bytes_by_connection()

    def count_bytes(self) -> int:
        """Return the bytes received since the creation, on the connections that are still open."""
        after = _read_bytes_by_connection()
        return sum(nbytes - self._before.get(inode, 0) for inode, nbytes in after.items())


def is_available() -> bool:
    """Return True if this platform reports the bytes received by a socket."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir("/proc/self/fd")


@contextmanager
def record_announcements() -> Iterator[list[int]]:
    """Yield a list that records the bytes of each all-reduce in shared memory in the block."""
    sums: list[int] = []
    announce = Arena.announce

    def record(arena: Arena, call: bytes, note: bytes = b"") -> None:
        announced_call = Call.unpack(call)
        if announced_call.kind == "all_reduce":
            sums.append(math.prod(announced_call.shape) * announced_call.dtype.itemsize)
        announce(arena, call, note)

    with mock.patch.object(Arena, "announce", record):
        yield sums


def _read_bytes_by_connection() -> dict[int, int]:
    """Return the bytes that this process has received on each open TCP connection, by inode."""
    counts: dict[int, int] = {}
    if not is_available():
        return counts
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # Declare the socket as TCP, so that Python does not query the kernel for its type.
            # Sockets of other protocols fail below, because they have no TCP_INFO.
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
        except OSError:  # another thread has closed the descriptor
            continue
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BUFFER_BYTES)
            (counts[status.st_ino],) = struct.unpack_from("Q", info, _BYTES_RECEIVED_OFFSET)
        except (OSError, struct.error):
            pass
        finally:
            # Do not close the descriptor, because another object owns it.
            connection.detach()
    return counts

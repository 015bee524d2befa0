"""Bytes that this process received, as the kernel counts them, and bytes summed in shared memory.

The counter of a TCP socket does not depend on what a library reports, and other programs on the
same interface do not change it. NCCL's transports do not use these sockets. In shared memory, each
rank announces the array that it is about to sum; if the announcements differ, the call fails.
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

# Buffer size, and offset of tcpi_bytes_received in Linux's struct tcp_info (since 4.1).
_ROOM, _BYTES_RECEIVED_AT = 256, 128


class Received:
    """Counts the bytes received on TCP connections since this object was created."""

    def __init__(self) -> None:
        self._before = _by_connection()

    def bytes(self) -> int:
        """Return the bytes received on all connections that are still open."""
        now = _by_connection()
        return sum(count - self._before.get(name, 0) for name, count in now.items())


def available() -> bool:
    """Return True if this kernel reports the bytes received by a socket."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir("/proc/self/fd")


@contextmanager
def announced() -> Iterator[list[int]]:
    """Record the bytes of each all-reduce that is announced in shared memory in the block."""
    sums: list[int] = []
    announce = Arena.announce

    def record(arena: Arena, call: bytes, note: bytes = b"") -> None:
        announced_call = Call.unpack(call)
        if announced_call.kind == "all_reduce":
            sums.append(math.prod(announced_call.shape) * announced_call.dtype.itemsize)
        announce(arena, call, note)

    with mock.patch.object(Arena, "announce", record):
        yield sums


def _by_connection() -> dict[int, int]:
    counts: dict[int, int] = {}
    if not available():
        return counts
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            there = os.fstat(fd)
            if not stat.S_ISSOCK(there.st_mode):
                continue
            # Declare the socket as TCP; otherwise Python would query the kernel. Sockets of other
            # protocols have no TCP_INFO.
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
        except OSError:  # closed by now
            continue
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROOM)
            (counts[there.st_ino],) = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)
        except (OSError, struct.error):
            pass
        finally:
            connection.detach()  # not ours to close
    return counts

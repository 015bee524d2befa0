"""Memory that several processes of one host map.

A segment is an anonymous file (memfd). It has no name in /dev/shm and is not limited by the size of
that mount. The kernel frees it with the last process that maps it, however that process ends. The
fallback without memfd is an unlinked file in /dev/shm.

A peer opens the file through /proc/PID/fd/FD. Opening it proves that both processes are on one
host: the device, the inode and a random token in the first bytes must be the published ones.
"""

import mmap
import os
import platform
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from collectives.shared_memory import engine

TOKEN_BYTES = 16
# The token occupies a whole page, so that the memory after it is aligned to a page.
HEADER_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class Address:
    """The location of a segment, and the properties that prove its identity."""

    host: str
    pid: int
    descriptor: int
    device: int
    inode: int
    size: int
    token: str


class Segment:
    """Memory of `size` bytes that this process creates and other processes may map."""

    def __init__(self, size: int) -> None:
        self._descriptor = _create_anonymous_file()
        try:
            # Reserve the pages: if memory is full, raise OSError now instead of SIGBUS later.
            os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + size)
            self.mapping = _map(self._descriptor, HEADER_BYTES + size)
        except OSError:
            os.close(self._descriptor)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        self.mapping[:TOKEN_BYTES] = token
        status = os.fstat(self._descriptor)
        self.address = Address(
            host=identify_host(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            device=status.st_dev,
            inode=status.st_ino,
            size=size,
            token=token.hex(),
        )

    def seal(self) -> None:
        """Close the file, so that no other process can open it; existing mappings remain valid."""
        os.close(self._descriptor)


def open_segment(address: Address) -> mmap.mmap | None:
    """Return a mapping of a peer's segment, or None unless it is proved to be the same memory."""
    if not address.token or address.host != identify_host():
        return None
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (address.device, address.inode):
            return None
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapping = _map(descriptor, HEADER_BYTES + address.size)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    return mapping if mapping[:TOKEN_BYTES].hex() == address.token else None


def identify_host() -> str:
    """Return an identifier of the running kernel and the network namespace.

    Processes in different network namespaces count as different hosts. Without /proc, every call
    returns another identifier. Except on x86-64, processes with different engines count as
    different hosts too, because only an engine has memory fences.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink('/proc/self/ns/net')}"
        if platform.machine() in ("x86_64", "AMD64"):
            return host
        return f"{host} {engine.get_name()}"
    except OSError:
        # Nothing can be proved, so every process counts as a separate host.
        return secrets.token_hex(TOKEN_BYTES)


def _create_anonymous_file() -> int:
    """Return a descriptor of a file in memory that has no name.

    Without `memfd_create`, which is missing from older kernels, some builds of Python and some
    sandboxes, the file is created in /dev/shm and unlinked immediately.
    """
    with suppress(AttributeError, OSError):
        return os.memfd_create("collectives")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        return os.dup(file.fileno())


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Pages are populated now, because page faults cost more than a first reduction.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

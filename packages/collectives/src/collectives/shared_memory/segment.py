"""Memory that several processes of one host map.

Notable:
- a segment is an anonymous file (memfd): it never has a name in /dev/shm, is not limited by the
  size of that mount, and the kernel frees it with the last process that maps it, however it dies;
- a peer opens it through /proc/PID/fd/FD. That the two are on one host is proved by the
  opening: device and inode must be the published ones and the first bytes the published token.
"""

import errno
import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TOKEN_BYTES = 16
# The token has a page to itself, so that the memory after it is aligned to one.
HEADER_BYTES = mmap.PAGESIZE
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Address:
    """Where a segment can be opened, and what must be found there."""

    host: str
    pid: int
    descriptor: int
    device: int
    inode: int
    size: int
    token: str


class Segment:
    """`size` bytes that this process made and others may open; `memory` maps them."""

    def __init__(self, size: int) -> None:
        self._descriptor = _anonymous_file()
        try:
            _reserve(self._descriptor, HEADER_BYTES + size)
            self.mapping = _map(self._descriptor, HEADER_BYTES + size)
        except OSError:
            os.close(self._descriptor)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        self.mapping[:TOKEN_BYTES] = token
        status = os.fstat(self._descriptor)
        self.address = Address(
            host=host_identity(), pid=os.getpid(), descriptor=self._descriptor,
            device=status.st_dev, inode=status.st_ino, size=size, token=token.hex(),
        )  # fmt: skip

    def seal(self) -> None:
        """Close the file: nobody else can open it; the maps that exist live on."""
        os.close(self._descriptor)


def open_segment(address: Address) -> mmap.mmap | None:
    """Map a peer's segment, or None where it cannot be proved to be the same memory."""
    if not address.token or address.host != host_identity():
        return None
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (address.device, address.inode):
            return None
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            mapping = _map(descriptor, HEADER_BYTES + address.size)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    return mapping if mapping[:TOKEN_BYTES].hex() == address.token else None


def host_identity() -> str:
    """The running kernel and the network namespace: what has its own network counts as a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        # No /proc: nothing can be proved, so every process is alone.
        return secrets.token_hex(TOKEN_BYTES)


def _anonymous_file() -> int:
    """Return a descriptor of a file in memory that has no name.

    Older kernels, some builds of Python and some sandboxes lack memfd_create. Then the file is one
    in /dev/shm that has been unlinked already.
    """
    with suppress(AttributeError, OSError):
        return os.memfd_create("collectives")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        return os.dup(file.fileno())


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the file's pages: a full memory is an OSError here instead of a SIGBUS later."""
    try:
        os.posix_fallocate(descriptor, 0, size)
        return
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for start in range(0, size, PIECE_BYTES):
            file.write(bytes(min(PIECE_BYTES, size - start)))


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated now, if possible: page faults cost more than the sums do on first use.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))

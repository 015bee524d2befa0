"""Channels between processes of one host: data in shared memory, messages in a pipe.

Notable:
- the memory is an anonymous file (memfd): the size of /dev/shm, 64 MB in a container, is no limit,
  and nothing is left behind by a crash; a dead process closes its end of the pipe;
- parameters are read where the server has them. Before it changes them it copies them for who is
  not done, and says so: then the copy is read. Of gradients one piece is checked as the next comes.
"""

import itertools
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from paramserver.protocol.messages import Message
from paramserver.transport.connection import Channel, Channels
from paramserver.transport.pieces import PIECE

# Only there is what one process writes, and reads, seen in that order by the other.
_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
_LENT, _RETURNED = 0, 8  # words, in cache lines of their own: the server's, and the worker's
_WORDS = 128  # bytes of them
Ends = tuple["SharedMemoryChannel", "SharedMemoryChannel"]


class SharedMemoryChannel(Channel):
    """One end. The buffers are the same bytes at the other end. Picklable into a child process.

    A server's memory: its parameters, then two buffers and words for each worker, by `number`.
    """

    def __init__(
        self, descriptor: int, peer: str, pipe: Connection, nbytes: int, number: int
    ) -> None:
        self.peer = peer
        self._pipe, self._descriptor, self._nbytes, self._number = pipe, descriptor, nbytes, number
        start, end = _start(nbytes, number), _start(nbytes, number + 1)
        memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        self.home: Tensor = memory[:nbytes]
        self.parameters = memory[start : start + nbytes]
        self.gradients = memory[start + nbytes : end - _WORDS]
        self._words = memory[end - _WORDS : end].numpy().data.cast("q")

    def send(self, message: Message) -> None:
        """Send a message."""
        self._send(message.to_text().encode())

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds."""
        return Message.from_text(self._receive(timeout))

    def push(self, data: Tensor, written: Iterable[int]) -> None:
        """Tell how far they are written: the peer sees the same memory."""
        told = 0
        for stop in itertools.chain(written, [len(data)]):
            if stop - told >= PIECE or told < stop == len(data):
                told = stop
                self._send(stop.to_bytes(8, "big"))

    def take(self, data: Tensor, see: Callable[[int], None]) -> None:
        """See how far they are written."""
        stop = 0
        while stop < len(data):
            said = self._receive(None)
            if len(said) != 8:  # it gave up while it wrote
                raise ConnectionResetError(Message.from_text(said).text or "half a push came")
            stop = int.from_bytes(said, "big")
            see(stop)

    def deliver(self, given: Tensor) -> Callable[[], None] | None:
        """See Buffers."""
        lent = _IN_ORDER and given.data_ptr() == self.home.data_ptr() and len(given) == self._nbytes
        self._words[_RETURNED], self._words[_LENT] = 0, lent
        if lent:
            return self._keep
        self.parameters[: len(given)] = given
        return None

    def read(self, use: Callable[[Tensor], object]) -> None:
        """See Buffers."""
        if self._words[_LENT]:
            use(self.home)
            if self._words[_LENT]:  # nothing had changed up to here: it was one version
                self._words[_RETURNED] = 1
                return
        use(self.parameters)

    def close(self) -> None:
        """Close this process's end."""
        self._pipe.close()
        os.close(self._descriptor)

    def _keep(self) -> None:
        if not self._words[_RETURNED]:
            self.parameters.copy_(self.home)
            self._words[_LENT] = 0

    def _send(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise ConnectionResetError(f"its process has ended ({error})") from error

    def _receive(self, timeout: float | None) -> bytes:
        try:
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{self.peer} did not answer for {timeout:g} s")
            return self._pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise ConnectionResetError("its process has ended") from error

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        descriptor = DupFd(self._descriptor)
        return _rebuild, (descriptor, self.peer, self._pipe, self._nbytes, self._number)


def _rebuild(descriptor: Any, *others: Any) -> SharedMemoryChannel:
    return SharedMemoryChannel(descriptor.detach(), *others)


def _start(nbytes: int, number: int) -> int:
    return nbytes + number * (2 * nbytes + _WORDS)


def channel_pairs(workers: list[str], server: str, nbytes: int) -> list[Ends]:
    """Of each worker its end, and the server's, of a new connection."""
    descriptor = _anonymous_file(_start(nbytes, len(workers)))
    pairs = []
    for number, worker in enumerate(workers):
        ours, theirs = Pipe()
        mine, its = os.dup(descriptor), os.dup(descriptor)
        one = SharedMemoryChannel(mine, server, ours, nbytes, number)
        pairs.append((one, SharedMemoryChannel(its, worker, theirs, nbytes, number)))
    os.close(descriptor)
    return pairs


def _anonymous_file(nbytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        memory = hasattr(os, "memfd_create")
        descriptor = os.memfd_create("paramserver") if memory else os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def wire(sizes: list[int], workers: int) -> tuple[list[Channels], list[Channels]]:
    """Connect servers whose buffers have these `sizes` with workers: the channels of each."""
    names = [f"worker {w}" for w in range(workers)]
    pairs = [channel_pairs(names, f"server {s}", nbytes) for s, nbytes in enumerate(sizes)]
    ends = [tuple(tuple(pair[i] for pair in row) for row in pairs) for i in (0, 1)]
    return list(ends[1]), list(zip(*ends[0], strict=True))

"""Channels between processes of one host: data in shared memory, messages in a pipe.

The memory is an anonymous file (memfd), which the system frees after a crash. Its size is not
limited by /dev/shm, which has 64 MB in many containers. A dead process closes its end of the pipe.

Note [Reading parameters in place]
A worker reads the parameters in the server's memory. Two words in shared memory coordinate this:
- Before the server answers a read, it clears DONE and sets IN_PLACE.
- After the worker has read, it sets DONE if IN_PLACE is still set, and otherwise reads the copy.
- Before the server changes the parameters, it checks DONE. If DONE is not set, it copies the
  parameters into the worker's buffer and clears IN_PLACE.
This requires a processor on which other processes see writes in program order, such as x86-64.
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
from paramserver.transport.chunks import CHUNK_BYTES
from paramserver.transport.connection import Channel, Channels

#: True on processors where other processes see the writes of a process in program order.
_HAS_ORDERED_WRITES = platform.machine().lower() in ("x86_64", "amd64")
#: Index of the word that only the server writes, see Note [Reading parameters in place].
_IN_PLACE = 0
#: Index of the word that the worker sets and the server clears, in another cache line.
_DONE = 8
#: Size in bytes of one worker's words, including padding between cache lines.
_WORDS_BYTES = 128
#: The worker's end and the server's end of a connection.
Ends = tuple["SharedMemoryChannel", "SharedMemoryChannel"]


class SharedMemoryChannel(Channel):
    """One end of a connection, which shares its buffers with the other end.

    The memory contains the server's parameters, followed by three parts per worker: a buffer of
    parameters, a buffer of gradients, and the words of Note [Reading parameters in place]. A
    channel can be pickled into a child process.

    Args:
        descriptor: file descriptor of the memory.
        peer: name of the process at the other end.
        pipe: pipe to that process.
        nbytes: size of each buffer in bytes.
        index: index of the worker's buffers in the memory.
    """

    def __init__(
        self, descriptor: int, peer: str, pipe: Connection, nbytes: int, index: int
    ) -> None:
        self.peer = peer
        self._pipe = pipe
        self._descriptor = descriptor
        self._nbytes = nbytes
        self._index = index
        start = _compute_start(nbytes, index)
        end = _compute_start(nbytes, index + 1)
        memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        self.server_memory: Tensor = memory[:nbytes]
        self.parameters = memory[start : start + nbytes]
        self.gradients = memory[start + nbytes : end - _WORDS_BYTES]
        self._words = memory[end - _WORDS_BYTES : end].numpy().data.cast("q")

    def send(self, message: Message) -> None:
        """Send a message."""
        self._send(message.to_text().encode())

    def receive(self, timeout: float | None = None) -> Message:
        """Receive the next message; raise `TimeoutError` after `timeout` seconds."""
        return Message.from_text(self._receive(timeout))

    def send_gradients(self, data: Tensor, write_chunks: Iterable[int]) -> None:
        """Write the gradients into shared memory, and send the number of bytes written so far."""
        reported = 0
        for stop in itertools.chain(write_chunks, [len(data)]):
            if stop - reported >= CHUNK_BYTES or reported < stop == len(data):
                reported = stop
                self._send(stop.to_bytes(8, "big"))

    def receive_gradients(self, data: Tensor, on_progress: Callable[[int], None]) -> None:
        """Wait until the peer has written the gradients; see `Channel.receive_gradients`."""
        stop = 0
        while stop < len(data):
            raw = self._receive(None)
            if len(raw) != 8:  # the worker failed while it wrote, and sent an ABORT
                reason = Message.from_text(raw).text or "expected more gradients of a push"
                raise ConnectionResetError(reason)
            stop = int.from_bytes(raw, "big")
            on_progress(stop)

    def deliver(self, data: Tensor) -> Callable[[], None] | None:
        """Let the worker read in place if possible, otherwise copy; see `ConnectionBuffers`."""
        is_whole = data.data_ptr() == self.server_memory.data_ptr() and len(data) == self._nbytes
        is_in_place = _HAS_ORDERED_WRITES and is_whole
        self._words[_DONE] = 0
        self._words[_IN_PLACE] = is_in_place
        if is_in_place:
            return self._copy_out
        self.parameters[: len(data)] = data
        return None

    def read(self, consume: Callable[[Tensor], object]) -> None:
        """Call `consume` with the server's memory or a copy: Note [Reading parameters in place]."""
        if self._words[_IN_PLACE]:
            consume(self.server_memory)
            if self._words[_IN_PLACE]:
                self._words[_DONE] = 1
                return
        consume(self.parameters)

    def close(self) -> None:
        """Close this process's end."""
        self._pipe.close()
        os.close(self._descriptor)

    def _copy_out(self) -> None:
        if not self._words[_DONE]:
            self.parameters.copy_(self.server_memory)
            self._words[_IN_PLACE] = 0

    def _send(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise ConnectionResetError(f"its process has ended ({error})") from error

    def _receive(self, timeout: float | None) -> bytes:
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:  # OSError in the middle of a message
            raise ConnectionResetError("its process has ended") from error
        raise TimeoutError(f"{self.peer} did not answer for {timeout:g} s")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        descriptor = DupFd(self._descriptor)
        return _rebuild, (descriptor, self.peer, self._pipe, self._nbytes, self._index)


def _rebuild(descriptor: Any, *others: Any) -> SharedMemoryChannel:
    return SharedMemoryChannel(descriptor.detach(), *others)


def _compute_start(nbytes: int, index: int) -> int:
    return nbytes + index * (2 * nbytes + _WORDS_BYTES)


def create_channel_pairs(workers: list[str], server: str, nbytes: int) -> list[Ends]:
    """Return the worker's end and the server's end of a new connection per worker."""
    descriptor = _create_anonymous_file(_compute_start(nbytes, len(workers)))
    pairs = []
    for index, worker in enumerate(workers):
        worker_pipe, server_pipe = Pipe()
        worker_end = SharedMemoryChannel(os.dup(descriptor), server, worker_pipe, nbytes, index)
        server_end = SharedMemoryChannel(os.dup(descriptor), worker, server_pipe, nbytes, index)
        pairs.append((worker_end, server_end))
    os.close(descriptor)
    return pairs


def _create_anonymous_file(nbytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        has_memfd = hasattr(os, "memfd_create")
        descriptor = os.memfd_create("paramserver") if has_memfd else os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def connect_all(sizes: list[int], workers: int) -> tuple[list[Channels], list[Channels]]:
    """Return the channels of each server and of each worker.

    `sizes` are the buffer sizes of the servers in bytes. Every worker is connected to every server.
    """
    names = [f"worker {w}" for w in range(workers)]
    server_channels: list[Channels] = []
    worker_channels: list[list[Channel]] = [[] for _ in names]
    for server, nbytes in enumerate(sizes):
        pairs = create_channel_pairs(names, f"server {server}", nbytes)
        server_channels.append(tuple(server_end for _, server_end in pairs))
        for channels, (worker_end, _) in zip(worker_channels, pairs, strict=True):
            channels.append(worker_end)
    return server_channels, [tuple(channels) for channels in worker_channels]

"""Channels between processes of one host: data in shared memory, messages in a pipe.

Notable:
- the memory is an anonymous file (memfd), so the size of /dev/shm, 64 MB in a container, is no
  limit, nothing is left behind by a crash, and it travels to a child as a file descriptor;
- a dead process closes its end of the pipe: the peer knows at once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from paramserver.protocol.messages import Message
from paramserver.transport.connection import Channel


class SharedMemoryChannel:
    """One end. Both buffers are the same bytes at the other end. Picklable into a child process."""

    def __init__(self, peer: str, pipe: Connection, descriptor: int, nbytes: int) -> None:
        self.peer = peer
        self._pipe, self._descriptor, self._nbytes = pipe, descriptor, nbytes
        self._tensors: tuple[Tensor, Tensor] | None = None

    @property
    def parameters(self) -> Tensor:
        """Flat bytes that the server writes and the worker reads."""
        return self._map()[0]

    @property
    def gradients(self) -> Tensor:
        """Flat bytes that the worker writes and the server reads."""
        return self._map()[1]

    def send(self, message: Message) -> None:
        """Send a message."""
        try:
            self._pipe.send_bytes(message.to_text().encode())
        except OSError as error:
            raise ConnectionResetError(f"its process has ended ({error})") from error

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds."""
        try:
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{self.peer} did not answer for {timeout:g} s")
            return Message.from_text(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise ConnectionResetError("its process has ended") from error

    def send_data(self, data: Tensor) -> None:
        """Nothing: the peer sees the same memory."""

    def receive_data(self, data: Tensor) -> None:
        """Nothing: the peer wrote into the same memory."""

    def close(self) -> None:
        """Close this process's end."""
        self._pipe.close()
        if self._tensors is None:
            os.close(self._descriptor)

    def _map(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            memory = mmap.mmap(self._descriptor, 2 * self._nbytes)
            os.close(self._descriptor)
            both = torch.frombuffer(memory, dtype=torch.uint8)
            self._tensors = both[: self._nbytes], both[self._nbytes :]
        return self._tensors

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (self.peer, self._pipe, DupFd(self._descriptor), self._nbytes)


def _rebuild(peer: str, pipe: Connection, descriptor: Any, nbytes: int) -> SharedMemoryChannel:
    return SharedMemoryChannel(peer, pipe, descriptor.detach(), nbytes)


def channel_pair(
    worker: str, server: str, nbytes: int
) -> tuple[SharedMemoryChannel, SharedMemoryChannel]:
    """The worker's end and the server's end of a new connection."""
    ours, theirs = Pipe()
    descriptor = _anonymous_file(2 * nbytes)
    return (
        SharedMemoryChannel(server, ours, descriptor, nbytes),
        SharedMemoryChannel(worker, theirs, os.dup(descriptor), nbytes),
    )


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paramserver", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


@dataclass(frozen=True)
class Endpoint:
    """The channels of one process, ready as they are."""

    channels: tuple[Channel, ...]

    def open(self) -> tuple[Channel, ...]:
        """The channels, by peer."""
        return self.channels

    def close(self) -> None:
        """Close this process's ends."""
        for channel in self.channels:
            channel.close()


def wire(sizes: list[int], workers: int) -> tuple[list[Endpoint], list[Endpoint]]:
    """Connect servers whose buffers have these `sizes` with workers: endpoints of each."""
    pairs = [
        [channel_pair(f"worker {w}", f"server {s}", nbytes) for w in range(workers)]
        for s, nbytes in enumerate(sizes)
    ]
    return (
        [Endpoint(tuple(pair[1] for pair in row)) for row in pairs],
        [Endpoint(tuple(row[w][0] for row in pairs)) for w in range(workers)],
    )

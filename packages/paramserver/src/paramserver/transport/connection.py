"""Connections between workers and servers, in one process or over a channel of a transport.

A connection carries one request at a time: a message, its data if any, and an answer. While a
worker waits, the server sends it a WAIT message every few seconds, so that only a server that hangs
exceeds the timeout.
"""

import importlib
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paramserver.protocol.messages import Kind, Message, PeerLost, raise_failure

#: Seconds that a server may be silent after the timeout.
GRACE_SECONDS = 10.0
#: Longest wait in seconds. System calls accept no infinite or much longer timeout.
MAX_WAIT_SECONDS = 7 * 24 * 3600.0


class ConnectionBuffers:
    """The buffers at one end of a connection: `nbytes` bytes each of parameters and gradients."""

    #: The server's parameters, if this process can read them in place.
    server_memory: Tensor | None = None

    def __init__(self, nbytes: int) -> None:
        # Allocate on the CPU even if torch's default device is a GPU.
        self.parameters = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.gradients = torch.zeros_like(self.parameters)

    def deliver(self, data: Tensor) -> Callable[[], None] | None:
        """Make parameters available to the worker.

        Return None if they are copied. Otherwise return a function that copies them. The caller
        must call that function before the parameters change.
        """
        self.parameters[: len(data)] = data
        return None

    def read(self, consume: Callable[[Tensor], object]) -> None:
        """Call `consume` with the parameters of the last answer.

        The parameters are valid until the next request. If the server changes them during the call,
        `consume` is called again with a copy of the old values.
        """
        consume(self.parameters)


class Connection(ConnectionBuffers):
    """A worker's end of a connection.

    A STAGE is followed by gradients, and an answer by data if it has a size.
    """

    #: Number that identifies the worker's session to the server; None if the transport identifies
    #: the sender.
    session: int | None = None

    def request(self, message: Message, write_chunks: Iterable[int] = ()) -> Message:
        """Send a request and return its answer.

        A STAGE also sends the buffer `gradients`. Iterating over `write_chunks` fills the
        buffer chunk by chunk, and yields the number of bytes written so far. An answer with a
        `size` fills the buffer `parameters`.
        """
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Report to the server that this worker has failed."""


class Channel(ConnectionBuffers):
    """One end of a connection between processes; raises `ConnectionError` if the peer is gone."""

    peer: str

    def send(self, message: Message) -> None:
        """Send a message, followed by the delivered data if it is an answer with a size."""

    def receive(self, timeout: float | None = None) -> Message:
        """Receive the next message and its data; raise `TimeoutError` after `timeout` seconds."""
        raise NotImplementedError

    def send_gradients(self, data: Tensor, write_chunks: Iterable[int]) -> None:
        """Send gradients while iterating over `write_chunks`; see `Connection.request`."""

    def receive_gradients(self, data: Tensor, on_progress: Callable[[int], None]) -> None:
        """Receive gradients; `on_progress` may be called with the bytes received so far."""

    def close(self) -> None:
        """Release the resources of the channel."""


#: The channels of one process, by peer.
Channels = tuple[Channel, ...]


def drain(write_chunks: Iterable[int]) -> None:
    """Write the whole payload by iterating over all chunks."""
    for _ in write_chunks:
        pass


def import_zmq() -> Any:
    """Import ZeroMQ; raise `RuntimeError` if pyzmq is not installed."""
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise RuntimeError(
            "expected pyzmq for this transport; run pip install 'paramserver[zeromq]'"
        ) from error


class RemoteConnection(Connection):
    """A connection to a server over a channel. The server may be silent for `timeout` seconds."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        #: True from the start of a request until its answer is complete.
        self._awaits_answer = False
        #: Acquired while a request is sent, because `abort` may be called from another thread.
        self._sending = threading.Lock()
        self._timeout = min(timeout, MAX_WAIT_SECONDS)
        self.parameters = channel.parameters
        self.gradients = channel.gradients
        self.read = channel.read  # type: ignore[method-assign]

    def request(self, message: Message, write_chunks: Iterable[int] = ()) -> Message:
        """Send a request and return its answer; see `Connection.request`.

        Raises:
            PeerLost: the server is gone, or an earlier request failed before it was answered.
            TimeoutError: the server has been silent for `timeout` seconds.
        """
        channel = self._channel
        if self._awaits_answer:
            # The earlier answer may still arrive and be mistaken for the answer to this request.
            raise PeerLost(
                f"an earlier request to {channel.peer} failed before it was answered; start the "
                "job again"
            )
        self._awaits_answer = True
        try:
            with self._sending:
                channel.send(message)
                if message.kind is Kind.STAGE:
                    channel.send_gradients(self.gradients[: message.size], write_chunks)
            while (answer := channel.receive(self._timeout)).kind is Kind.WAIT:
                pass
        except ConnectionError as error:
            raise PeerLost(
                f"{channel.peer} is gone: {error}; start the job again, or use ZeroMQ, where lost "
                "servers can be restarted"
            ) from error
        self._awaits_answer = False
        raise_failure(channel.peer, answer)
        return answer

    def abort(self, reason: str) -> None:
        """Report the failure to the server, if it is still connected."""
        with suppress(ConnectionError), self._sending:
            self._channel.send(Message(Kind.ABORT, text=reason))

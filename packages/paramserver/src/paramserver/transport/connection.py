"""How a worker reaches a server: in its own process, or behind a channel of a transport.

Notable:
- one request at a time on a connection: a message, its data if any, an answer;
- the two buffers of a connection are made by the transport. In one process, or in shared memory,
  they are the same bytes at both ends and nothing is sent but the message;
- a worker that is kept waiting is told so every few seconds: it blames only a server that hangs.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from paramserver.protocol.messages import Kind, Message, PeerLost, raise_failure

GRACE = 10.0
"""Seconds, beyond the timeout, for which a server may say nothing."""
SENDS = (Kind.STAGE, Kind.PUSH)
"""Requests that gradients come with. An answer says by its size whether parameters do."""


class Connection(Protocol):
    """A worker's end."""

    parameters: Tensor
    gradients: Tensor

    def ask(self, message: Message) -> Message:
        """The answer to a request; `gradients` go with it or `parameters` come, by its kind."""

    def abort(self, reason: str) -> None:
        """Tell the server that this worker fails."""


class Channel(Protocol):
    """One end of a connection between processes. Raises ConnectionError if the peer is gone."""

    peer: str

    @property
    def parameters(self) -> Tensor:
        """Flat bytes that the server fills."""

    @property
    def gradients(self) -> Tensor:
        """Flat bytes that the worker fills."""

    def send(self, message: Message) -> None:
        """Send a message."""

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds."""

    def send_data(self, data: Tensor) -> None:
        """Send one of the two buffers."""

    def receive_data(self, data: Tensor) -> None:
        """Receive into one of the two buffers."""

    def close(self) -> None:
        """Let go of whatever carries the messages."""


def used(buffer: Tensor, message: Message) -> Tensor:
    """The part of a buffer that goes with a message."""
    return buffer[: message.size] if message.size else buffer


def extra(name: str, extra: str) -> Any:
    """An optional package. RuntimeError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"{name} is missing: pip install 'paramserver[{extra}]'") from error


class RemoteConnection:
    """A server behind a channel. `timeout` is for how long it may say nothing, in seconds."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel, self._timeout = channel, timeout
        self.parameters, self.gradients = channel.parameters, channel.gradients

    def ask(self, message: Message) -> Message:
        """Send a request and wait for its answer."""
        channel = self._channel
        try:
            channel.send(message)
            if message.kind in SENDS:
                channel.send_data(used(self.gradients, message))
            answer = channel.receive(self._timeout)
            while answer.kind is Kind.WAIT:
                answer = channel.receive(self._timeout)
            if answer.size:
                channel.receive_data(used(self.parameters, answer))
        except ConnectionError as error:
            raise PeerLost(
                f"{channel.peer} is gone: {error}; start again from its last state_dict()"
            ) from error
        raise_failure(channel.peer, answer)
        return answer

    def abort(self, reason: str) -> None:
        """Tell the server why, if it is still there."""
        with suppress(ConnectionError):
            self._channel.send(Message(Kind.ABORT, text=reason))

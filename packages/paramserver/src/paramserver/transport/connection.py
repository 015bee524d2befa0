"""How a worker reaches a server: in its own process, or behind a channel of a transport.

Notable:
- one request at a time on a connection: a message, its data if any, an answer;
- a worker that is kept waiting is told so every few seconds: it blames only a server that hangs.
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paramserver.protocol.messages import Kind, Message, PeerLost, raise_failure

GRACE = 10.0
"""Seconds, beyond the timeout, for which a server may say nothing."""
SENDS = (Kind.STAGE, Kind.PUSH)
"""Requests that gradients come with. An answer says by its size whether parameters do."""


class Buffers:
    """What one end of a connection keeps: flat bytes of parameters, and of gradients."""

    home: Tensor | None = None
    """Where a server's parameters may lie, to be read there."""

    def __init__(self, nbytes: int) -> None:
        self.parameters = torch.zeros(nbytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)

    def deliver(self, given: Tensor) -> Callable[[], None] | None:
        """Keep parameters. If they are not copied: what is to be called before they change."""
        self.parameters[: len(given)] = given
        return None

    def read(self, use: Callable[[Tensor], object]) -> None:
        """`use` what came, before the next request. Perhaps twice: then the second time counts."""
        use(self.parameters)


class Connection(Buffers):
    """A worker's end."""

    session: int | None = None
    """The number by which the server recognizes this sender; None if the transport does so."""

    def ask(self, message: Message, written: Iterable[int] = ()) -> Message:
        """The answer to a request; `gradients` go with it or `parameters` come, by its kind. They
        are `written` while they travel, which yields how many bytes are there."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Tell the server that this worker fails."""


class Channel(Buffers):
    """One end of a connection between processes. Raises ConnectionError if the peer is gone."""

    peer: str

    def send(self, message: Message) -> None:
        """Send a message, and what was delivered if it is an answer of some size."""

    def receive(self, timeout: float | None = None) -> Message:
        """The next message, and what comes with it; TimeoutError after `timeout` seconds."""
        raise NotImplementedError

    def push(self, data: Tensor, written: Iterable[int]) -> None:
        """Send gradients while they are `written`, which yields how many bytes are there."""

    def take(self, data: Tensor, see: Callable[[int], None]) -> None:
        """Receive gradients; `see` may be told how many bytes are there."""

    def close(self) -> None:
        """Let go of whatever carries the messages."""


Channels = tuple[Channel, ...]
"""Those of one process, by peer."""


def extra(name: str, extra: str) -> Any:
    """An optional package. RuntimeError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"{name} is missing: pip install 'paramserver[{extra}]'") from error


class RemoteConnection(Connection):
    """A server behind a channel. `timeout` is for how long it may say nothing, in seconds."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel, self._timeout = channel, timeout
        self.parameters, self.gradients = channel.parameters, channel.gradients
        self.home, self.read = channel.home, channel.read  # type: ignore[method-assign]

    def ask(self, message: Message, written: Iterable[int] = ()) -> Message:
        """Send a request and wait for its answer."""
        channel = self._channel
        try:
            channel.send(message)
            if message.kind in SENDS:
                channel.push(self.gradients[: message.size or None], written)
            while (answer := channel.receive(self._timeout)).kind is Kind.WAIT:
                pass
        except ConnectionError as error:
            text = f"{channel.peer} is gone: {error}; start again from its last state_dict()"
            raise PeerLost(text) from error
        raise_failure(channel.peer, answer)
        return answer

    def abort(self, reason: str) -> None:
        """Tell the server why, if it is still there."""
        with suppress(ConnectionError):
            self._channel.send(Message(Kind.ABORT, text=reason))

"""What a worker and a server say to each other, whatever carries it.

Notable:
- one request at a time on a connection: a message, its data if any, a reply;
- the two buffers of a connection are made by the transport. In one process, or in shared memory,
  they are the same bytes at both ends and nothing is sent but the message;
- an error at the server crosses as its type and text, and is raised at the worker.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paramserver.server import Server


class PeerLost(RuntimeError):
    """A worker or a server is gone; the message names it."""


class Kind(IntEnum):
    """The first word of a message."""

    HELLO = 1
    PULL = 2
    PUSH = 3
    FINISH = 4
    ABORT = 5
    OK = 6
    FAILED = 7


@dataclass(frozen=True)
class Message:
    """`number` is a clock in a request and a version in a reply."""

    kind: Kind
    number: int = 0
    text: str = ""


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


class Connection(Protocol):
    """A worker's end: two buffers, and requests that fill or send them."""

    parameters: Tensor
    gradients: Tensor

    def hello(self, layout: str) -> None:
        """Check that both ends hold the same shard."""

    def pull(self, clock: int) -> int:
        """Fill `parameters`; return their version."""

    def push(self, clock: int) -> int:
        """Hand over `gradients`."""

    def finish(self) -> int:
        """Push no more; fill `parameters` with the final ones once all have finished."""

    def abort(self, reason: str) -> None:
        """Tell the server that this worker fails."""


class LocalConnection:
    """A server in this process."""

    def __init__(self, server: Server, worker: int) -> None:
        self._server, self._worker = server, worker
        self.parameters = torch.zeros(server.shard.buffer_bytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)

    def hello(self, layout: str) -> None:
        """Raise ValueError unless the server's shard has this layout."""
        check_layout(f"worker {self._worker}", layout, self._server.shard.digest())

    def pull(self, clock: int) -> int:
        """See Server.pull."""
        return self._server.pull(self._worker, clock, self.parameters)

    def push(self, clock: int) -> int:
        """See Server.push."""
        return self._server.push(self._worker, clock, self.gradients)

    def finish(self) -> int:
        """See Server.finish."""
        return self._server.finish(self._worker, self.parameters)

    def abort(self, reason: str) -> None:
        """See Server.lose."""
        self._server.lose(self._worker, reason)


class RemoteConnection:
    """A server behind a channel. `timeout` is how long a reply may take, in seconds."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel, self._timeout = channel, timeout
        self.parameters, self.gradients = channel.parameters, channel.gradients

    def hello(self, layout: str) -> None:
        """Raise ValueError unless the server's shard has this layout."""
        self._ask(Message(Kind.HELLO, text=layout))

    def pull(self, clock: int) -> int:
        """Ask for the parameters and wait for them."""
        return self._ask(Message(Kind.PULL, clock), receive=self.parameters)

    def push(self, clock: int) -> int:
        """Send the gradients and wait until the server has them."""
        return self._ask(Message(Kind.PUSH, clock), send=self.gradients)

    def finish(self) -> int:
        """Push no more; wait for the final parameters."""
        return self._ask(Message(Kind.FINISH), receive=self.parameters)

    def abort(self, reason: str) -> None:
        """Tell the server why, if it is still there."""
        with suppress(ConnectionError):
            self._channel.send(Message(Kind.ABORT, text=reason))

    def _ask(
        self, request: Message, *, send: Tensor | None = None, receive: Tensor | None = None
    ) -> int:
        try:
            self._channel.send(request)
            if send is not None:
                self._channel.send_data(send)
            reply = self._channel.receive(self._timeout)
            if receive is not None and reply.kind is Kind.OK:
                self._channel.receive_data(receive)
        except ConnectionError as error:
            raise PeerLost(
                f"{self._channel.peer} is gone: {error}; start again from its last state_dict()"
            ) from error
        if reply.kind is Kind.FAILED:
            name, _, text = reply.text.partition(": ")
            if name in _ERRORS:
                raise _ERRORS[name](text)
            raise RuntimeError(f"{self._channel.peer}: {reply.text}")
        return reply.number


def answer(server: Server, worker: int, channel: Channel) -> None:
    """Answer one worker's requests until it finishes, fails or is gone. Never raises for those."""
    try:
        while _answer_one(server, worker, channel):
            pass
    except ConnectionError as error:
        server.lose(worker, f"{channel.peer}: {error}")


def check_layout(who: str, theirs: str, ours: str) -> None:
    """Raise ValueError unless both layouts are the same."""
    if theirs != ours:
        raise ValueError(
            f"{who} has parameters of layout {theirs}, the server of layout {ours}; build "
            "the same module (names, shapes, types, requires_grad) on every rank"
        )


def _answer_one(server: Server, worker: int, channel: Channel) -> bool:
    request = channel.receive()
    data = None
    version = 0
    try:
        if request.kind is Kind.HELLO:
            check_layout(f"worker {worker}", request.text, server.shard.digest())
        elif request.kind is Kind.PULL:
            version, data = server.pull(worker, request.number, channel.parameters), True
        elif request.kind is Kind.PUSH:
            channel.receive_data(channel.gradients)
            version = server.push(worker, request.number, channel.gradients)
        elif request.kind is Kind.FINISH:
            version, data = server.finish(worker, channel.parameters), True
        else:
            server.lose(worker, request.text)
            return False
    except ConnectionError:
        raise
    except Exception as error:  # whatever the optimizer raises, its worker is who has to know
        channel.send(Message(Kind.FAILED, text=f"{type(error).__name__}: {error}"))
        return request.kind is not Kind.FINISH
    channel.send(Message(Kind.OK, version))
    if data:
        channel.send_data(channel.parameters)
    return request.kind is not Kind.FINISH


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (PeerLost, RuntimeError, TimeoutError, ValueError)
}

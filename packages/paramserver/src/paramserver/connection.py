"""What a worker and a server say to each other, whatever carries it.

Notable:
- one request at a time on a connection: a message, its data if any, a reply;
- a worker that is kept waiting is told so every few seconds, so that only a server that hangs or is
  gone is ever blamed by the worker itself;
- the two buffers of a connection are made by the transport. In one process, or in shared memory,
  they are the same bytes at both ends and nothing is sent but the message;
- an error at the server crosses as its type and text, and is raised at the worker.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from paramserver.ledger import Log


class PeerLost(RuntimeError):
    """A worker or a server is gone; the message names it."""


class Kind(IntEnum):
    """The first word of a message."""

    HELLO = 1
    PULL = 2
    PUSH = 3
    STAGE = 4
    COMMIT = 5
    READ = 6
    FETCH = 7
    FOLLOW = 8
    SYNC = 9
    FINISH = 10
    END = 11
    ABORT = 12
    OK = 13
    FAILED = 14
    WAIT = 15


@dataclass(frozen=True)
class Message:
    """Numbers (a clock or a version, a place in the log) and a text (a layout, a log, an error)."""

    kind: Kind
    number: int = 0
    text: str = ""
    since: int = 0


@dataclass(frozen=True)
class Greeting:
    """Where a server stands when a worker comes."""

    position: int
    """Entries of the log that it has followed."""
    base_version: int
    """The version with which the log began."""


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
    """A worker's end: two buffers, and requests that fill or send them; `Server` has the same."""

    parameters: Tensor
    gradients: Tensor

    def hello(self, layout: str) -> Greeting:
        """Check that both ends hold the same shard."""

    def pull(self, clock: int) -> int:
        """Fill `parameters`; return their version."""

    def push(self, clock: int) -> None:
        """Hand over `gradients`."""

    def stage(self) -> None:
        """Hand over `gradients`, to be applied when the log says so."""

    def commit(self, clock: int, since: int) -> Log:
        """What is staged everywhere is to be applied."""

    def read(self, clock: int, since: int) -> Log:
        """Be promised a version, when the consistency allows it."""

    def fetch(self, log: Log) -> int:
        """Fill `parameters` with the version that was promised, and return it."""

    def follow(self, log: Log) -> int:
        """Bring the log, nothing else."""

    def sync(self, since: int) -> tuple[bool, Log]:
        """Ask for the log, and whether the last push waits for others."""

    def finish(self, since: int) -> tuple[int, Log]:
        """Push no more; fill `parameters` with the final ones once all have finished."""

    def end(self, log: Log) -> int:
        """Fill `parameters` with the final ones, at a server that is not the first."""

    def abort(self, reason: str) -> None:
        """Tell the server that this worker fails."""


class RemoteConnection:
    """A server behind a channel. `timeout` is for how long it may say nothing, in seconds."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel, self._timeout = channel, timeout
        self.parameters, self.gradients = channel.parameters, channel.gradients

    def hello(self, layout: str) -> Greeting:
        """Raise ValueError unless the server's shard has this layout."""
        reply = self._ask(Message(Kind.HELLO, text=layout))
        return Greeting(reply.number, reply.since)

    def pull(self, clock: int) -> int:
        """Ask for the parameters and wait for them."""
        return self._ask(Message(Kind.PULL, clock), receive=self.parameters).number

    def push(self, clock: int) -> None:
        """Send the gradients and wait until the server has accepted them."""
        self._ask(Message(Kind.PUSH, clock), send=self.gradients)

    def stage(self) -> None:
        """Send the gradients and wait until the server holds them."""
        self._ask(Message(Kind.STAGE), send=self.gradients)

    def commit(self, clock: int, since: int) -> Log:
        """Ask the first server to accept what is staged."""
        return Log.from_text(self._ask(Message(Kind.COMMIT, clock, since=since)).text)

    def read(self, clock: int, since: int) -> Log:
        """Ask the first server for a version, and wait until it may be read."""
        return Log.from_text(self._ask(Message(Kind.READ, clock, since=since)).text)

    def fetch(self, log: Log) -> int:
        """Bring the log and receive the parameters."""
        return self._ask(Message(Kind.FETCH, text=log.to_text()), receive=self.parameters).number

    def follow(self, log: Log) -> int:
        """Bring the log."""
        return self._ask(Message(Kind.FOLLOW, text=log.to_text())).number

    def sync(self, since: int) -> tuple[bool, Log]:
        """Ask for the log."""
        reply = self._ask(Message(Kind.SYNC, since=since))
        return bool(reply.number), Log.from_text(reply.text)

    def finish(self, since: int) -> tuple[int, Log]:
        """Push no more; wait for the final parameters."""
        reply = self._ask(Message(Kind.FINISH, since=since), receive=self.parameters)
        return reply.number, Log.from_text(reply.text)

    def end(self, log: Log) -> int:
        """Receive the final parameters."""
        return self._ask(Message(Kind.END, text=log.to_text()), receive=self.parameters).number

    def abort(self, reason: str) -> None:
        """Tell the server why, if it is still there."""
        with suppress(ConnectionError):
            self._channel.send(Message(Kind.ABORT, text=reason))

    def _ask(
        self, request: Message, *, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Message:
        try:
            self._channel.send(request)
            if send is not None:
                self._channel.send_data(send)
            reply = self._channel.receive(self._timeout)
            while reply.kind is Kind.WAIT:
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
        return reply


def check_layout(who: str, theirs: str, ours: str) -> None:
    """Raise ValueError unless both layouts are the same."""
    if theirs != ours:
        raise ValueError(
            f"{who} has parameters of layout {theirs}, the server of layout {ours}; build "
            "the same module (names, shapes, types, requires_grad) on every rank"
        )


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (PeerLost, RuntimeError, TimeoutError, ValueError)
}

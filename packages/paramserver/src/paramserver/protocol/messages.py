"""What a worker and a server say to each other, whatever carries it.

Notable:
- a message is a kind, some whole numbers and a text, so that any transport can write it; the bytes
  of parameters or gradients follow it by themselves and are never pickled;
- every request may be sent again when its answer does not come: what was done once is not done
  twice, because a push has a name (worker, epoch, clock) and a read a number;
- `check_request` is the schema of all requests. A server applies it before anything else.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

LIMIT = 2**62
"""Numbers of a message are below it."""
OBSERVER = -1
"""The number of a sender that asks for the final state and takes no part."""


class PeerLost(RuntimeError):
    """A worker or a server is gone; the message names it."""


class Kind(IntEnum):
    """What a message asks or answers."""

    JOIN = 1
    PULL = 2  # READ and FETCH, at an only server
    PUSH = 3  # STAGE and COMMIT, at an only server
    STAGE = 4
    COMMIT = 5
    READ = 6
    FETCH = 7
    FOLLOW = 8
    SYNC = 9
    LEAVE = 10
    FINISH = 11
    END = 12
    ABORT = 13
    BEAT = 14
    OK = 15
    FAILED = 16
    WAIT = 17  # the answer takes its time; the server is well
    AGAIN = 18  # what was promised is gone: read again


@dataclass(frozen=True)
class Message:
    """A request or an answer."""

    kind: Kind
    epoch: int = 0
    """Which of a worker's lives this is."""
    clock: int = 0
    """Gradients that the worker has pushed."""
    number: int = 0
    """Of a read; in an answer a version, or whatever the kind says."""
    position: int = 0
    """A place in the log: the asker has followed so far."""
    size: int = 0
    """Bytes of data that come with it."""
    have: int = -1
    """The version that the asker holds, if a change of it will do; in an answer, the fragment that
    has changed since, or -1: all of the shard comes."""
    text: str = ""
    """A layout, a log, an error."""

    def __post_init__(self) -> None:
        """Raise ValueError unless every field has its type and fits into 64 bits."""
        numbers = list(vars(self).values())[1:7]
        whole = isinstance(self.kind, Kind) and isinstance(self.text, str)
        if not whole or not all(type(n) is int and -1 <= n < LIMIT for n in numbers):
            raise ValueError(f"{str(list(vars(self).values()))[:80]} is no message")

    def fields(self) -> tuple[Any, ...]:
        """Its numbers and its text, in order."""
        return tuple(vars(self).values())  # `astuple` copies deeply: most of a message's time

    def to_text(self) -> str:
        """JSON, for transports that carry text."""
        return json.dumps(self.fields(), separators=(",", ":"))

    @staticmethod
    def from_text(text: str | bytes) -> "Message":
        """The message that `to_text` wrote; ValueError for anything else."""
        return Message.from_fields(json.loads(text))

    @staticmethod
    def from_fields(fields: Any) -> "Message":
        """The message with these `fields()`; ValueError for anything else."""
        if not isinstance(fields, list) or len(fields) != 8 or type(fields[0]) is not int:
            raise ValueError(f"{str(fields)[:80]} is no message")
        return Message(Kind(fields[0]), *fields[1:])


def check_request(worker: int, message: Message) -> None:
    """Raise ValueError unless `message` is a request that `worker` may send to some server."""
    text, kind = message.text, message.kind
    if kind > Kind.BEAT:
        raise ValueError(f"{kind!r} is no request")
    if worker == OBSERVER and kind not in (Kind.SYNC, Kind.END):
        raise ValueError(f"worker {OBSERVER} only observes: expected SYNC or END, got {kind!r}")
    if type(worker) is not int or not OBSERVER <= worker < 2**31:
        raise ValueError(f"expected a worker number from 0 to {2**31 - 1}, got {str(worker)[:80]}")
    numbers = message.epoch, message.clock, message.number, message.position, message.size
    if min(numbers) < 0:
        raise ValueError(f"{kind!r} has negative fields: {str(message.fields())[:80]}")
    if text and kind not in _WITH_TEXT:
        raise ValueError(f"{kind!r} has no text, got {text[:80]!r}")
    if text and kind in (Kind.PUSH, Kind.COMMIT):
        loss_and_bytes(text)


def loss_and_bytes(text: str) -> tuple[float, int]:
    """Return the loss and the bytes pushed so far that the text of a push contains."""
    match json.loads(text):
        case [float() | int() as loss, int(pushed)] if 0 <= pushed < LIMIT:
            with suppress(OverflowError):  # an integer that is larger than any float
                return float(loss), pushed
    raise ValueError(f"expected [loss, bytes pushed], got {text[:80]!r}")


def failure(error: BaseException) -> Message:
    """An exception as an answer."""
    return Message(Kind.FAILED, text=f"{type(error).__name__}: {error}")


def pushed_twice(worker: int) -> RuntimeError:
    """What is wrong with a second push before the step that the first is of has been applied."""
    text = f"worker {worker} pushes twice in one bulk-synchronous step"
    return RuntimeError(f"{text}; pull in between")


def raise_failure(peer: str, answer: Message) -> None:
    """Raise the exception that an answer carries, if it carries one."""
    if answer.kind is Kind.FAILED:
        name, _, text = answer.text.partition(": ")
        if name in _ERRORS:
            raise _ERRORS[name](text)
        raise RuntimeError(f"{peer}: {answer.text}")


_WITH_TEXT = (
    Kind.JOIN, Kind.PUSH, Kind.COMMIT, Kind.FETCH, Kind.FOLLOW, Kind.END, Kind.ABORT
)  # fmt: skip
_TOLD: tuple[type[Exception], ...] = PeerLost, RuntimeError, TimeoutError, ValueError
_ERRORS = {error.__name__: error for error in _TOLD}

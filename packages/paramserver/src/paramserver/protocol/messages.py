"""What a worker and a server say to each other, whatever carries it.

Notable:
- a message is a kind, some whole numbers and a text, so that any transport can write it; the bytes
  of parameters or gradients follow it by themselves and are never pickled;
- every request may be sent again when its answer does not come: what was done once is not done
  twice, because a push has a name (worker, epoch, clock) and a read a number.
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


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
        whole = isinstance(fields, list) and len(fields) == 8 and isinstance(fields[7], str)
        if not whole or not all(type(field) is int for field in fields[:7]):
            raise ValueError(f"{str(fields)[:80]} is no message")
        return Message(Kind(fields[0]), *fields[1:])


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


_TOLD: tuple[type[Exception], ...] = PeerLost, RuntimeError, TimeoutError, ValueError
_ERRORS = {error.__name__: error for error in _TOLD}

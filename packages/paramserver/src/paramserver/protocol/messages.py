"""Messages between workers and servers, independent of the transport.

A message is a kind, some integers and a text, so that any transport can encode it. The bytes of
parameters or gradients follow it separately and are never pickled.

Every request may be sent again if its answer does not arrive. A push is identified by (worker,
epoch, clock) and a read by a number, so a repeated request has no second effect.

`check_request` validates the fields of a request. A server calls it before anything else.
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

#: Upper limit (exclusive) of the integers of a message.
LIMIT = 2**62
#: Worker number of a sender that reads the final state and does not train.
OBSERVER = -1


class PeerLost(RuntimeError):
    """A worker or a server is lost; the message names it."""


class Kind(IntEnum):
    """The kind of a request or an answer."""

    JOIN = 1
    STAGE = 2  # to every server: store the gradients
    COMMIT = 3  # to the first server: accept the staged gradients
    READ = 4  # to the first server: fix the version to read
    FETCH = 5  # to every server: replay the log and send the fixed version
    REPLAY = 6  # to every server except the first: replay the log
    SYNC = 7  # to the first server: send the log
    LEAVE = 8  # to the first server: stop pushing without waiting for other workers
    FINISH = 9  # to the first server: stop pushing, and wait until all workers have done so
    END = 10  # to every server except the first, or from an observer: replay, send the parameters
    ABORT = 11  # to every server: the worker has failed
    HEARTBEAT = 12  # to every server: the worker's process is alive
    NORMS = 13  # to the first server: the norms of the gradients on the other servers
    OK = 14  # the first kind of answer; all kinds before it are requests
    FAILED = 15  # the text is the error
    WAIT = 16  # the server is alive, but the answer is not available yet
    # Answer to a FETCH: the version of this read is not stored any more, so read again.
    # Answer to a JOIN: a server may have lost a part of the log, so request all positions again.
    REREAD = 17
    # Answer of the first server: an update waits for NORMS. The text is the log; send the request
    # again after NORMS.
    NORMS_REQUIRED = 18


@dataclass(frozen=True)
class Message:
    """A request or an answer."""

    kind: Kind
    #: Epoch of the worker's membership; each join that the ledger records increases it by one.
    epoch: int = 0
    #: In a JOIN: the number of the session. Otherwise: the worker's clock, see `Member.clock`.
    clock: int = 0
    #: In a request: sequence number of a read, index of the server in a JOIN, or version in NORMS.
    #: In an answer: a version, or after a SYNC, 1 if the worker's last push is not applied yet.
    number: int = 0
    #: In a request: number of log entries that all servers are known to have replayed. In an
    #: answer: number of log entries that this server has replayed.
    position: int = 0
    #: Number of bytes of data that follow the message.
    size: int = 0
    #: In a request: version that the worker pulled last. The server may send the change since then.
    pulled_version: int = -1
    #: In an answer: the fragment that the data update, or -1 if the data are the whole shard.
    fragment: int = -1
    #: A layout, a log, an error, or another value that depends on the kind.
    text: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` unless each field has its type, and integers are in [-1, `LIMIT`)."""
        values = list(vars(self).values())
        has_types = isinstance(self.kind, Kind) and isinstance(self.text, str)
        if not has_types or not all(type(n) is int and -1 <= n < LIMIT for n in values[1:8]):
            raise ValueError(f"expected the fields of a message, got {str(values)[:80]}")

    def to_fields(self) -> tuple[Any, ...]:
        """Return all fields in order."""
        # `astuple` would copy deeply, which takes longer than all other work on a message.
        return tuple(vars(self).values())

    def to_text(self) -> str:
        """Return the message as JSON, for transports that carry text."""
        return json.dumps(self.to_fields(), separators=(",", ":"))

    @staticmethod
    def from_text(text: str | bytes) -> "Message":
        """Return the message that `to_text` wrote; raise `ValueError` for any other text."""
        return Message.from_fields(json.loads(text))

    @staticmethod
    def from_fields(fields: Any) -> "Message":
        """Return the message with these `to_fields()`; raise `ValueError` for any other value."""
        if not isinstance(fields, list) or len(fields) != 9 or type(fields[0]) is not int:
            raise ValueError(f"expected the fields of a message, got {str(fields)[:80]}")
        return Message(Kind(fields[0]), *fields[1:])


def check_request(worker: int, message: Message) -> None:
    """Raise `ValueError` unless `message` is a request that `worker` may send to a server."""
    kind = message.kind
    if kind >= Kind.OK:
        raise ValueError(f"expected a request, got {kind!r}")
    if worker == OBSERVER and kind not in (Kind.SYNC, Kind.END):
        raise ValueError(f"expected SYNC or END from an observer (worker {OBSERVER}), got {kind!r}")
    numbers = message.epoch, message.clock, message.number, message.position, message.size
    if min(numbers) < 0:
        raise ValueError(f"expected fields >= 0 in {kind!r}, got {str(message.to_fields())[:80]}")
    if message.text and kind not in _KINDS_WITH_TEXT:
        raise ValueError(f"expected {kind!r} without a text, got {message.text[:80]!r}")


def build_failure(error: BaseException) -> Message:
    """Return an answer that carries an exception."""
    return Message(Kind.FAILED, text=f"{type(error).__name__}: {error}")


def build_pushed_twice_error(worker: int) -> RuntimeError:
    """Return the error of a second push before the update of the first has been applied."""
    return RuntimeError(
        f"worker {worker} pushed twice in one bulk-synchronous step; pull between pushes"
    )


def raise_failure(peer: str, answer: Message) -> None:
    """Raise the exception that an answer of `peer` carries, if any."""
    if answer.kind is Kind.FAILED:
        name, _, text = answer.text.partition(": ")
        if name in _ERRORS:
            raise _ERRORS[name](text)
        raise RuntimeError(f"{peer}: {answer.text}")


_KINDS_WITH_TEXT = (Kind.JOIN, Kind.FETCH, Kind.REPLAY, Kind.END, Kind.ABORT, Kind.NORMS)
#: Exceptions that a worker raises with the server's type, by name. Others become `RuntimeError`.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (PeerLost, RuntimeError, TimeoutError, ValueError)
}

"""The log of the ledger: its entries, and their text in messages and journals.

Every server replays the same log. A digest of all earlier entries identifies the history of a log.
A server stores the replayed entries and the staged gradients as records of its journal.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paramserver.protocol.messages import LIMIT

#: Identity of a push: worker, epoch, clock.
Push = tuple[int, int, int]


@dataclass(frozen=True)
class Start:
    """Entry: a job that had ended starts again, and waits for workers 0 to `workers` - 1."""

    workers: int


@dataclass(frozen=True)
class Join:
    """Entry: `worker` takes part from now on, as if it had pushed `clock` gradients."""

    worker: int
    epoch: int
    clock: int
    session: int


@dataclass(frozen=True)
class Accept:
    """Entry: a push is accepted. Its update is applied once the other workers have pushed."""

    push: Push


@dataclass(frozen=True)
class Write:
    """Entry: one update with the mean of `pushes`, which are summed in the stored order."""

    pushes: tuple[Push, ...]
    #: Staleness of each push: number of updates between the worker's last read and this update.
    staleness: tuple[int, ...]


@dataclass(frozen=True)
class Norm:
    """Entry: the last update is applied; `value` is the norm of its gradients on all servers.

    Only servers that clip by a norm of which each of them knows a part use this entry.
    """

    value: float


@dataclass(frozen=True)
class Read:
    """Entry: read `number` of `worker` returns the parameters at this position of the log."""

    worker: int
    epoch: int
    number: int


@dataclass(frozen=True)
class Leave:
    """Entry: `worker` has finished, has left or is lost.

    Its pushes that are staged but not accepted are discarded.
    """

    worker: int


Entry = Start | Join | Accept | Write | Norm | Read | Leave


@dataclass(frozen=True)
class Log:
    """Entries `start`, `start` + 1, ... of the ledger."""

    start: int
    entries: tuple[Entry, ...]
    #: Digest of all entries before `start`. Only equal histories have equal digests.
    before: str = ""

    @property
    def stop(self) -> int:
        """Number of the next entry."""
        return self.start + len(self.entries)

    def select_from(self, position: int) -> "Log":
        """Return the part of the log from `position` on, or the whole log if it starts later."""
        skipped = max(0, position - self.start)
        before = self.before
        for entry in self.entries[:skipped]:
            before = compute_digest(before, entry)
        return Log(max(position, self.start), self.entries[skipped:], before)

    def to_text(self) -> str:
        """Return the log as JSON, for messages and the journal."""
        lists = [_to_list(entry) for entry in self.entries]
        if self.before:
            lists.insert(0, ["after", self.before])
        return json.dumps([self.start, *lists], separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "Log":
        """Return the log that `to_text` wrote; raise `ValueError` for any other text."""
        match json.loads(text):
            case [int(start), ["after", str(before)], *lists] if _is_number(start):
                return Log(start, tuple(map(_parse_entry, lists)), before)
            case [int(start), *lists] if _is_number(start):
                return Log(start, tuple(map(_parse_entry, lists)))
        raise ValueError(f"expected a log [start, entry, ...], got {text[:80]!r}")


@dataclass(frozen=True)
class Staged:
    """Record of a staged push, with its gradients as the bytes that were received."""

    push: Push
    gradients: Tensor


@dataclass(frozen=True)
class Replayed:
    """Record of log entries that were replayed."""

    log: Log


Record = Staged | Replayed


class Journal(Protocol):
    """Append-only storage of one server's records; see `DiskJournal`."""

    def record(self, record: Record) -> None:
        """Store a record; return when it is written."""


def compute_digest(before: str, entry: Entry) -> str:
    """Return the digest of a history that ends with `entry`; `before` is the digest without it."""
    text = before + json.dumps(_to_list(entry), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_list(entry: Entry) -> list[Any]:
    return [type(entry).__name__.lower(), *vars(entry).values()]


def _parse_entry(fields: Any) -> Entry:
    match fields:
        case ["start", workers] if _is_number(workers) and workers < 2**20:
            return Start(workers)
        case ["join", worker, epoch, clock, session] if _are_numbers(fields[1:]):
            return Join(worker, epoch, clock, session)
        case ["accept", list(push)]:
            return Accept(parse_push(push))
        case ["write", list(pushes), list(staleness)] if _are_numbers(staleness):
            return Write(tuple(map(parse_push, pushes)), tuple(staleness))
        case ["norm", value]:
            return Norm(parse_norm(value))
        case ["read", worker, epoch, number] if _are_numbers(fields[1:]):
            return Read(worker, epoch, number)
        case ["leave", worker] if _is_number(worker):
            return Leave(worker)
    raise ValueError(f"expected an entry of a ledger, got {str(fields)[:80]}")


def parse_push(fields: Any) -> Push:
    """Return a push from its fields; raise `ValueError` if they are invalid."""
    if not isinstance(fields, list | tuple) or len(fields) != 3 or not _are_numbers(fields):
        raise ValueError(f"expected an entry of a ledger with a push, got {str(fields)[:80]}")
    worker, epoch, clock = fields
    return worker, epoch, clock


def parse_norm(field: Any) -> float:
    """Return a norm; raise `ValueError` unless it is a float of at least 0, possibly infinite."""
    if type(field) is not float or math.isnan(field) or field < 0:
        raise ValueError(f"expected a norm >= 0, got {str(field)[:80]}")
    return field


def _are_numbers(fields: Iterable[Any]) -> bool:
    return all(_is_number(field) for field in fields)


def _is_number(field: Any) -> bool:
    return type(field) is int and 0 <= field < LIMIT

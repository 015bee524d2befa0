"""The order of all updates and reads, decided in one place and followed by every server.

Notable:
- it is pure: no lock, no clock, no tensor. What goes in are requests, what comes out is a log;
- the first server keeps the ledger. A push is staged at every server and then committed here, in
  one message, so that it is in the log or it is not: a worker that dies half-way leaves nothing;
- reads stand in the same log as writes (state-machine replication; Schneider, "Implementing
  Fault-Tolerant Services Using the State Machine Approach", 1990). Servers that follow one log
  answer a read with one version, wherever each of them has got to;
- a worker carries the log from the ledger to the other servers, so servers need no links between
  them: whoever reads brings it, and what nobody reads is not missed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from paramserver.consistency import Clocks, Consistency


@dataclass(frozen=True)
class Write:
    """One update: the mean of the pushes of these workers, in this order."""

    workers: tuple[int, ...]
    staleness: tuple[int, ...]
    """By how many versions each push is behind the parameters that it changes."""


@dataclass(frozen=True)
class Read:
    """`worker` is promised the parameters as they are at this place of the log."""

    worker: int


@dataclass(frozen=True)
class Leave:
    """`worker` finished or is lost; what it staged without committing is void."""

    worker: int


Entry = Write | Read | Leave


@dataclass(frozen=True)
class Log:
    """Entries `start`, `start` + 1, ... of the ledger."""

    start: int
    entries: tuple[Entry, ...]

    @property
    def stop(self) -> int:
        """The number of the entry that comes next."""
        return self.start + len(self.entries)

    def after(self, position: int) -> Log:
        """The part from `position` on."""
        return Log(max(position, self.start), self.entries[max(0, position - self.start) :])

    def to_text(self) -> str:
        """JSON, for the wire."""
        return json.dumps([self.start, *map(_to_list, self.entries)], separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Log:
        """The log that `to_text` wrote."""
        start, *entries = json.loads(text)
        return Log(start, tuple(map(_from_list, entries)))


class Ledger:
    """Who takes part, how far each one is, and the log."""

    def __init__(self, workers: int, consistency: Consistency, version: int = 0) -> None:
        self.clocks = Clocks(workers, consistency.bound)
        self.version = version
        """Updates in the log, and before it."""
        self._averages = consistency.averages
        self._read_version = dict.fromkeys(range(workers), version)
        self._committed: set[int] = set()  # pushes of a bulk-synchronous step, not complete yet
        self._first = 0
        self._entries: list[Entry] = []

    @property
    def stop(self) -> int:
        """The number of the entry that comes next."""
        return self._first + len(self._entries)

    def awaits(self, worker: int) -> bool:
        """Whether a push of `worker` is accepted but not in the log yet."""
        return worker in self._committed

    def commit(self, worker: int) -> None:
        """What `worker` staged everywhere is accepted: an update, or a part of the next one."""
        self.clocks.tick(worker)
        if self._averages:
            self._committed.add(worker)
            self._write_if_complete()
        else:
            self._write((worker,), (self.version - self._read_version[worker],))

    def read(self, worker: int) -> None:
        """Promise `worker` the version of now."""
        self._read_version[worker] = self.version
        self._entries.append(Read(worker))

    def leave(self, worker: int) -> None:
        """Nobody waits for `worker` any more; what it has committed stays."""
        self.clocks.leave(worker)
        self._entries.append(Leave(worker))
        self._write_if_complete()

    def since(self, position: int) -> Log:
        """The log from `position` on. Every server has followed as far as that, so that what lies
        before is forgotten: the ledger stays as short as the slowest server is close."""
        forget = min(max(0, position - self._first), len(self._entries))
        del self._entries[:forget]
        self._first += forget
        return Log(self._first, tuple(self._entries))

    def _write_if_complete(self) -> None:
        if self._committed and self.clocks.active <= self._committed:
            # In the order of the workers, not of arrival: a sum of floats depends on the order.
            step = tuple(sorted(self._committed))
            self._committed.clear()
            self._write(step, (0,) * len(step))

    def _write(self, workers: tuple[int, ...], staleness: tuple[int, ...]) -> None:
        self.version += 1
        self._entries.append(Write(workers, staleness))


def _to_list(entry: Entry) -> list[object]:
    if isinstance(entry, Write):
        return ["write", entry.workers, entry.staleness]
    return ["read" if isinstance(entry, Read) else "leave", entry.worker]


def _from_list(fields: list[object]) -> Entry:
    match fields:
        case ["write", list(workers), list(staleness)]:
            return Write(tuple(workers), tuple(staleness))
        case ["read", int(worker)]:
            return Read(worker)
        case ["leave", int(worker)]:
            return Leave(worker)
    raise ValueError(f"{fields!r} is no entry of a ledger")

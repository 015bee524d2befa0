"""The order of all updates and reads, and who takes part: decided in one place, followed by all.

Notable:
- it is pure: no lock, no clock, no tensor. Its state is what its log says (`replay`);
- every server replays the log. An entry that this ledger would not have made itself is refused, as
  is a log whose digest shows that it continues another history;
- the first server makes the entries. A push is staged at every server and then committed here, in
  one message, so that it is in the log or it is not: a worker that dies half-way leaves nothing;
- reads stand in the same log as writes (state-machine replication; Schneider 1990): servers that
  follow one log answer a read with one version, wherever each of them has got to;
- workers carry the log to the other servers, which need no links between them;
- a worker that joins again begins a new epoch. What an older one still sends is refused.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paramserver.consistency import Consistency
from paramserver.protocol.messages import LIMIT

Push = tuple[int, int, int]
"""The name of a push: worker, epoch, clock."""


@dataclass(frozen=True)
class Join:
    """`worker` takes part from here on, as if it had pushed `clock` gradients."""

    worker: int
    epoch: int
    clock: int
    session: int


@dataclass(frozen=True)
class Accept:
    """A push of a step that others have yet to complete: it will be in its Write."""

    push: Push


@dataclass(frozen=True)
class Write:
    """One update: the mean of these pushes, in this order."""

    pushes: tuple[Push, ...]
    staleness: tuple[int, ...]
    """By how many versions each push is behind the parameters that it changes."""


@dataclass(frozen=True)
class Read:
    """`worker` is promised, for its read `number`, the parameters as they are at this place."""

    worker: int
    epoch: int
    number: int


@dataclass(frozen=True)
class Leave:
    """`worker` finished or is lost; what it staged without committing is void."""

    worker: int


Entry = Join | Accept | Write | Read | Leave


@dataclass(frozen=True)
class Log:
    """Entries `start`, `start` + 1, ... of the ledger."""

    start: int
    entries: tuple[Entry, ...]
    before: str = ""
    """Digest of all entries before `start`: equal only for equal histories."""

    @property
    def stop(self) -> int:
        """The number of the entry that comes next."""
        return self.start + len(self.entries)

    def after(self, position: int) -> "Log":
        """The part from `position` on."""
        skipped = max(0, position - self.start)
        before = self.before
        for entry in self.entries[:skipped]:
            before = _digest(before, entry)
        return Log(max(position, self.start), self.entries[skipped:], before)

    def to_text(self) -> str:
        """JSON, for the wire and the journal."""
        lists = [_to_list(entry) for entry in self.entries]
        if self.before:
            lists.insert(0, ["after", self.before])
        return json.dumps([self.start, *lists], separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "Log":
        """The log that `to_text` wrote; ValueError for anything else."""
        match json.loads(text):
            case [int(start), ["after", str(before)], *lists] if _is_number(start):
                return Log(start, tuple(map(_from_list, lists)), before)
            case [int(start), *lists] if _is_number(start):
                return Log(start, tuple(map(_from_list, lists)))
        raise ValueError(f"expected a log [start, entry, ...], got {text[:80]!r}")


@dataclass
class Member:
    """What the ledger knows of a worker."""

    active: bool = True
    epoch: int = 0
    clock: int = 0
    """Gradients pushed, by which the consistency compares workers."""
    first_clock: int = 0
    """Its clock when this epoch began."""
    pushes: int = 0
    """Gradients accepted in all its lives: where it is in its data."""
    reads: int = 0
    read_version: int = 0
    sessions: list[int] = field(default_factory=list)


class Ledger:
    """Who takes part, how far each one is, and the log. `workers` take part from the start."""

    def __init__(self, workers: int, consistency: Consistency, version: int = 0) -> None:
        self.version = version
        """Updates in the log, and before it."""
        self.members = {w: Member(read_version=version) for w in range(workers)}
        self._consistency = consistency
        self._accepted: list[Push] = []  # of a bulk-synchronous step that is not complete yet
        self._first = 0
        self._entries: list[Entry] = []
        self._digests = [""]  # of the history before each entry, and of all of it

    @property
    def stop(self) -> int:
        """The number of the entry that comes next."""
        return self._first + len(self._entries)

    @property
    def active(self) -> dict[int, Member]:
        """The workers that neither finished nor were lost."""
        return {w: member for w, member in self.members.items() if member.active}

    def behind(self, clock: int) -> list[int]:
        """The workers for which a reader at `clock` has to wait."""
        bound = self._consistency.bound
        return [w for w, member in self.active.items() if clock - member.clock > bound]

    def awaits(self, worker: int) -> bool:
        """Whether a push of `worker` is accepted but no update yet."""
        member = self.members.get(worker)
        return bool(member and (worker, member.epoch) in {push[:2] for push in self._accepted})

    # What a worker may ask. An answer that was lost may be asked for again.

    def join(self, worker: int, session: int) -> Member:
        """`worker` begins a new epoch, unless this very session, or a later one, already has."""
        member = self.members.get(worker, Member(active=False))
        if session in member.sessions:
            return member
        if member.active and member.epoch == 0:
            clock = member.clock  # one who was expected from the start: the others wait for it
        else:
            # It joins where the slowest is: nobody waits for it longer than for that one, and the
            # bound holds from its first read on. A step that only its old life held up is complete.
            self.leave(worker)
            clock = self._slowest()
        self._append(Join(worker, member.epoch + 1, clock, session))
        return self.members[worker]

    def commit(self, push: Push) -> None:
        """What was staged everywhere is accepted: an update, or a part of the next one."""
        worker, epoch, clock = push
        member = self.members[worker]
        if clock == member.clock - 1 and clock >= member.first_clock:
            return  # asked again: it is in the log
        if clock != member.clock:
            raise at_another_clock(worker, clock, member.clock)
        if self._consistency.averages:
            self._append(Accept((worker, epoch, clock)))
            self._write_if_complete()
        else:
            self._append(Write((push,), (self.version - member.read_version,)))

    def read(self, worker: int, number: int) -> None:
        """Promise `worker` the version of now, once for each `number`."""
        member = self.members[worker]
        if number > member.reads:
            self._append(Read(worker, member.epoch, number))

    def leave(self, worker: int) -> None:
        """Nobody waits for `worker` any more; what it has committed stays."""
        if worker in self.active:
            self._append(Leave(worker))
            self._write_if_complete()

    def since(self, position: int) -> Log:
        """The log from `position` on."""
        skipped = min(max(0, position - self._first), len(self._entries))
        entries = tuple(self._entries[skipped:])
        return Log(max(position, self._first), entries, self._digests[skipped])

    def forget(self, position: int) -> None:
        """All servers have followed as far as `position`: what lies before is needed no more."""
        gone = min(max(0, position - self._first), len(self._entries))
        del self._entries[:gone], self._digests[:gone]
        self._first += gone

    # What a log, from the wire or a disk, does to the state.

    def replay(self, log: Log) -> None:
        """Bring the ledger to where `log` ends.

        ValueError if it does not continue the history of this ledger; then nothing has changed.
        """
        new = self._continuation(log)
        if not new.entries:
            return
        trial = self.copy()
        for entry in new.entries:
            trial._check(entry)
            trial._append(entry)
        for entry in new.entries:
            self._append(entry)

    def copy(self) -> "Ledger":
        """A ledger with the same state that has forgotten its log."""
        copied = Ledger(0, self._consistency, self.version)
        copied.members = {w: replace(member) for w, member in self.members.items()}
        copied._accepted = list(self._accepted)
        copied._first, copied._digests = self.stop, self._digests[-1:]
        return copied

    def state(self) -> dict[str, Any]:
        """All of it, as what JSON knows."""
        return {
            "version": self.version,
            "members": {str(w): asdict(member) for w, member in self.members.items()},
            "accepted": list(self._accepted),
            "log": self.since(self._first).to_text(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        log = Log.from_text(state["log"])
        self.version = state["version"]
        self.members = {int(w): Member(**member) for w, member in state["members"].items()}
        self._accepted = [_push(push) for push in state["accepted"]]
        self._first, self._entries = log.start, list(log.entries)
        self._digests = [log.before]
        for entry in log.entries:
            self._digests.append(_digest(self._digests[-1], entry))

    def _continuation(self, log: Log) -> Log:
        """The part of `log` that is new."""
        if log.start > self.stop:
            text = f"the log begins at entry {log.start}, this server has followed {self.stop}"
            raise ValueError(text)
        new = log.after(self.stop)
        if log.stop >= self.stop and new.before != self._digests[-1]:
            text = f"the log is of another history than this server's first {self.stop} entries"
            raise ValueError(f"{text}: a journal was taken back, or another job's server answers")
        return new

    def _check(self, entry: Entry) -> None:
        """Raise ValueError unless this ledger may append `entry` next."""
        match entry:
            case Join():
                valid = self._may_join(entry)
            case Accept(push):
                valid = self._consistency.averages and self._may_push(push)
            case Write(pushes, staleness):
                valid = self._may_write(pushes, staleness)
            case Read(worker, epoch, number):
                member = self.active.get(worker)
                valid = bool(
                    member
                    and epoch == member.epoch
                    and number > member.reads
                    and not self.behind(member.clock)
                )
            case Leave(worker):
                valid = worker in self.active
        if not valid:
            raise ValueError(f"{entry} cannot be entry {self.stop} of this server's log")

    def _may_join(self, entry: Join) -> bool:
        member = self.members.get(entry.worker, Member(active=False))
        if entry.session in member.sessions or entry.epoch != member.epoch + 1:
            return False
        if member.active:
            return member.epoch == 0 and entry.clock == member.clock
        return entry.clock == self._slowest()

    def _may_push(self, push: Push) -> bool:
        worker, epoch, clock = push
        member = self.active.get(worker)
        current = member is not None and (epoch, clock) == (member.epoch, member.clock)
        return current and not self.awaits(worker)

    def _may_write(self, pushes: tuple[Push, ...], staleness: tuple[int, ...]) -> bool:
        if self._consistency.averages:
            step = tuple(sorted(self._accepted))
            return self._is_complete() and (pushes, staleness) == (step, (0,) * len(step))
        if len(pushes) != 1 or not self._may_push(pushes[0]):
            return False
        return staleness == (self.version - self.members[pushes[0][0]].read_version,)

    def _slowest(self) -> int:
        clocks = [member.clock for member in self.active.values()]
        return min(clocks or [member.clock for member in self.members.values()], default=0)

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._digests.append(_digest(self._digests[-1], entry))
        match entry:
            case Join(worker, epoch, clock, session):
                member = self.members.setdefault(worker, Member())
                member.active, member.epoch, member.reads = True, epoch, 0
                member.clock = member.first_clock = clock
                member.read_version = self.version
                member.sessions = [*member.sessions[-7:], session]
            case Accept(push):
                self._accepted.append(push)
                self._count(push)
            case Write(pushes):
                self.version += 1
                if self._accepted:
                    self._accepted = []
                else:
                    self._count(pushes[0])
            case Read(worker, _, number):
                self.members[worker].reads = number
                self.members[worker].read_version = self.version
            case Leave(worker):
                self.members[worker].active = False

    def _count(self, push: Push) -> None:
        member = self.members[push[0]]
        member.clock += 1
        member.pushes += 1

    def _write_if_complete(self) -> None:
        if self._is_complete():
            # In the order of the workers, not of arrival: a sum of floats depends on the order.
            step = tuple(sorted(self._accepted))
            self._append(Write(step, (0,) * len(step)))

    def _is_complete(self) -> bool:
        """Whether all who take part have pushed their gradients of this step."""
        have = {(worker, epoch) for worker, epoch, _ in self._accepted}
        wanted = {(w, member.epoch) for w, member in self.active.items()}
        return bool(have) and wanted <= have


def at_another_clock(worker: int, clock: int, known: int) -> ValueError:
    """What is wrong with a push or a pull that is not the worker's next."""
    text = f"worker {worker} is at clock {clock}, but the server has {known} of its gradients"
    return ValueError(f"{text}; one Worker per worker number")


def _digest(before: str, entry: Entry) -> str:
    text = before + json.dumps(_to_list(entry), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_list(entry: Entry) -> list[Any]:
    return [type(entry).__name__.lower(), *vars(entry).values()]


def _from_list(fields: Any) -> Entry:
    match fields:
        case ["join", worker, epoch, clock, session] if _are_numbers(fields[1:]):
            return Join(worker, epoch, clock, session)
        case ["accept", list(push)]:
            return Accept(_push(push))
        case ["write", list(pushes), list(staleness)] if _are_numbers(staleness):
            return Write(tuple(map(_push, pushes)), tuple(staleness))
        case ["read", worker, epoch, number] if _are_numbers(fields[1:]):
            return Read(worker, epoch, number)
        case ["leave", worker] if _is_number(worker):
            return Leave(worker)
    raise ValueError(f"{str(fields)[:80]} is no entry of a ledger")


def _push(fields: Any) -> Push:
    if not isinstance(fields, list | tuple) or len(fields) != 3 or not _are_numbers(fields):
        raise ValueError(f"{str(fields)[:80]} is no entry of a ledger: not a push")
    worker, epoch, clock = fields
    return worker, epoch, clock


def _are_numbers(fields: Iterable[Any]) -> bool:
    return all(_is_number(field) for field in fields)


def _is_number(field: Any) -> bool:
    return type(field) is int and 0 <= field < LIMIT

"""The ledger: the order of all updates and reads, and the membership of workers.

The first server creates the entries of the log, and every server replays them (state-machine
replication; Schneider 1990). The ledger uses no locks, wall-clock time or tensors: its state is a
function of its log. A server refuses an entry that its ledger would not have created. It also
refuses a log whose digest shows that the log continues another history.

A push is staged on every server and then committed on the first server in one message. The log
contains the whole push or nothing of it, even if the worker dies between these messages.
Reads are entries of the same log, so all servers answer a read with the same version. Workers
forward the log to the other servers, so that servers need no connections to each other. A worker
that rejoins starts a new epoch, and servers refuse the requests of its older epochs.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paramserver.consistency import Consistency
from paramserver.protocol.log import (
    Accept,
    Entry,
    Join,
    Leave,
    Log,
    Norm,
    Push,
    Read,
    Start,
    Write,
    compute_digest,
    parse_push,
)


@dataclass
class Member:
    """State of a worker in the ledger."""

    active: bool = True
    #: True if the job was restarted and waits for this worker to join.
    expected: bool = False
    epoch: int = 0
    #: First epoch of this membership. A restarted worker continues it in a new epoch.
    first_epoch: int = 0
    #: Logical time of the worker: the clock at which it joined plus its accepted pushes since then.
    #: The policy compares the clocks of workers.
    clock: int = 0
    #: Clock at the start of this epoch.
    first_clock: int = 0
    #: Number of accepted pushes in all epochs.
    pushes: int = 0
    #: Sequence number of this member's last read.
    reads: int = 0
    #: Version that the last read returned.
    read_version: int = 0
    #: Hashes of the last eight session numbers, which identify a repeated join. The numbers are
    #: hashed because they are secret and every worker can read the log.
    sessions: list[int] = field(default_factory=list)


class Ledger:
    """The members, their clocks, and the log.

    Args:
        workers: number of workers from the start: 0 to `workers` - 1 are members.
        consistency: the policy.
        uses_norms: True if each update is applied only when the log contains its norm.
    """

    def __init__(self, workers: int, consistency: Consistency, *, uses_norms: bool = False) -> None:
        #: Number of updates so far.
        self.version = 0
        self.uses_norms = uses_norms
        #: True if the last update waits for its norm. Until then, workers may only join or leave.
        self.awaits_norm = False
        self.members = {w: Member() for w in range(workers)}
        self._consistency = consistency
        self._workers = workers
        #: Accepted pushes of the current clock, which wait for the other workers' pushes. Only
        #: policies that average use it.
        self._accepted: list[Push] = []
        #: Number of the first entry that is stored.
        self._first = 0
        self._entries: list[Entry] = []
        #: Digest of the history before each stored entry, and of the whole history.
        self._digests = [""]

    @property
    def stop(self) -> int:
        """Number of the next entry."""
        return self._first + len(self._entries)

    @property
    def active(self) -> dict[int, Member]:
        """Workers that take part: they have not finished, left or been lost."""
        return {w: member for w, member in self.members.items() if member.active}

    @property
    def awaited(self) -> dict[int, Member]:
        """Active workers, and workers that are expected to join."""
        return {w: member for w, member in self.members.items() if member.active or member.expected}

    def list_workers_behind(self, clock: int) -> list[int]:
        """Return the workers for which a reader at `clock` has to wait."""
        bound = self._consistency.bound
        return [w for w, member in self.awaited.items() if clock - member.clock > bound]

    def has_pending_push(self, worker: int) -> bool:
        """Return True if a push of `worker` is accepted but not applied yet."""
        return worker in self._find_pushed_workers()

    # The following methods handle requests. A worker repeats a request if the answer was lost.

    def join(self, worker: int, session: int) -> Member:
        """Start a new epoch of `worker`, unless this session has joined, and return its state."""
        member = self.members.get(worker, Member(active=False))
        if session in member.sessions:
            return member
        if not self.awaited and self._workers > 1:
            self._append(Start(self._workers))
        self._append(Join(worker, member.epoch + 1, self._choose_join_clock(worker), session))
        return self.members[worker]

    def commit(self, push: Push) -> None:
        """Append a push that all servers have staged, and its update if the update is complete.

        A repeated push has no effect. Raises `ValueError` if the push is of another clock.
        """
        worker, epoch, clock = push
        member = self.members[worker]
        if clock == member.clock - 1 and clock >= member.first_clock:
            return  # repeated: the push is in the log
        if clock != member.clock:
            raise build_wrong_clock_error(worker, clock, member.clock)
        if self._consistency.averages:
            self._append(Accept((worker, epoch, clock)))
            self._write_if_complete()
        else:
            self._append(Write((push,), (self.version - member.read_version,)))

    def add_norm(self, value: float) -> None:
        """Append the norm of the last update, which is then applied."""
        self._append(Norm(value))

    def read(self, worker: int, number: int) -> None:
        """Fix the current version for read `number` of `worker`; a repeated read has no effect."""
        member = self.members[worker]
        if number > member.reads:
            self._append(Read(worker, member.epoch, number))

    def leave(self, worker: int) -> None:
        """End the membership of `worker`; its committed pushes remain valid."""
        if worker in self.awaited:
            self._append(Leave(worker))
            self._write_if_complete()

    def get_log_from(self, position: int) -> Log:
        """Return the log from `position`, or from the first stored entry if that is later."""
        skipped = min(max(0, position - self._first), len(self._entries))
        entries = tuple(self._entries[skipped:])
        return Log(max(position, self._first), entries, self._digests[skipped])

    def can_replay_from(self, position: int) -> bool:
        """Return True unless a server at `position` must have lost a part of its journal.

        Before a worker pushes, all servers have replayed its join and its last push. A server has
        therefore lost a part of its journal if it still has to replay two pushes of one worker, or
        a push and the join of its epoch, or entries that were discarded.
        """
        pushes: set[Push] = set()
        joined: set[tuple[int, int]] = set()
        for entry in self._entries[max(0, position - self._first) :]:
            if isinstance(entry, Join):
                joined.add((entry.worker, entry.epoch))
            elif isinstance(entry, Accept):
                pushes.add(entry.push)
            elif isinstance(entry, Write):
                pushes.update(entry.pushes)
        workers = {worker for worker, _, _ in pushes}
        has_lost_join = any((worker, epoch) in joined for worker, epoch, _ in pushes)
        return position >= self._first and len(workers) == len(pushes) and not has_lost_join

    def discard_before(self, position: int) -> None:
        """Discard the entries before `position`, which all servers have replayed."""
        count = min(max(0, position - self._first), len(self._entries))
        del self._entries[:count], self._digests[:count]
        self._first += count

    # The following methods replay a log that was received or read from a journal.

    def replay(self, log: Log) -> None:
        """Append the entries of `log` that this ledger does not have yet.

        Raises:
            ValueError: `log` does not continue the history of this ledger, which must not be used
                any more. Validation therefore replays a received log on a copy first.
        """
        for entry in self._select_continuation(log).entries:
            self._check(entry)
            self._append(entry)

    def copy(self) -> "Ledger":
        """Return a ledger with the same state, except that its log stores no entries."""
        copied = Ledger(0, self._consistency, uses_norms=self.uses_norms)
        copied.version = self.version
        copied.awaits_norm = self.awaits_norm
        copied._workers = self._workers
        copied.members = {w: replace(member) for w, member in self.members.items()}
        copied._accepted = list(self._accepted)
        copied._first = self.stop
        copied._digests = self._digests[-1:]
        return copied

    def to_state(self) -> dict[str, Any]:
        """Return the whole state as a value that JSON can encode."""
        return {
            "version": self.version,
            "awaits_norm": self.awaits_norm,
            "members": {str(w): asdict(member) for w, member in self.members.items()},
            "accepted": list(self._accepted),
            "log": self.get_log_from(self._first).to_text(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `to_state` returned."""
        log = Log.from_text(state["log"])
        self.version = state["version"]
        self.awaits_norm = state.get("awaits_norm", False)  # missing in older journals
        self.members = {int(w): Member(**member) for w, member in state["members"].items()}
        self._accepted = [parse_push(push) for push in state["accepted"]]
        self._first = log.start
        self._entries = list(log.entries)
        self._digests = [log.before]
        for entry in log.entries:
            self._digests.append(compute_digest(self._digests[-1], entry))

    def _select_continuation(self, log: Log) -> Log:
        """Return the new part of `log`; raise `ValueError` if it does not continue this ledger."""
        if log.start > self.stop:
            raise ValueError(
                f"expected a log from entry {self.stop} or earlier, got one from {log.start}"
            )
        new = log.select_from(self.stop)
        if log.stop >= self.stop and new.before != self._digests[-1]:
            raise ValueError(
                f"the log continues another history than this server's first {self.stop} entries: "
                "a journal was restored from an older copy, or a server of another job answered"
            )
        return new

    def _check(self, entry: Entry) -> None:
        """Raise `ValueError` unless this ledger may append `entry` next."""
        match entry:
            case Start():
                valid = not self.awaited
            case Join():
                valid = self._may_join(entry)
            case Accept(push):
                valid = self._consistency.averages and self._may_push(push)
            case Write(pushes, staleness):
                valid = self._may_write(pushes, staleness)
            case Norm():
                valid = self.awaits_norm
            case Read(worker, epoch, number):
                member = self.active.get(worker)
                valid = bool(
                    member
                    and epoch == member.epoch
                    and number > member.reads
                    and not self.list_workers_behind(member.clock)
                )
            case Leave(worker):
                valid = worker in self.awaited
        if self.awaits_norm and isinstance(entry, Accept | Write | Read):
            valid = False
        if not valid:
            raise ValueError(
                f"expected a valid entry {self.stop} of this server's log, got {entry}: a journal "
                "was restored from an older copy, or a server of another job answered"
            )

    def _may_join(self, entry: Join) -> bool:
        member = self.members.get(entry.worker, Member(active=False))
        if entry.session in member.sessions or entry.epoch != member.epoch + 1:
            return False
        return entry.clock == self._choose_join_clock(entry.worker)

    def _choose_join_clock(self, worker: int) -> int:
        """Return the clock at which `worker` joins.

        An awaited worker continues at its previous clock. Any other worker joins at the clock of
        the slowest worker. It then delays the other workers no longer than the slowest one does,
        and the policy's bound holds for its first read.
        """
        member = self.awaited.get(worker)
        return member.clock if member else self._find_slowest_clock()

    def _may_push(self, push: Push) -> bool:
        worker, epoch, clock = push
        member = self.active.get(worker)
        current = member is not None and (epoch, clock) == (member.epoch, member.clock)
        return current and not self.has_pending_push(worker)

    def _may_write(self, pushes: tuple[Push, ...], staleness: tuple[int, ...]) -> bool:
        if self._consistency.averages:
            step = tuple(sorted(self._accepted))
            return self._is_complete() and (pushes, staleness) == (step, (0,) * len(step))
        if len(pushes) != 1 or not self._may_push(pushes[0]):
            return False
        return staleness == (self.version - self.members[pushes[0][0]].read_version,)

    def _find_slowest_clock(self) -> int:
        clocks = [member.clock for member in self.awaited.values()]
        return min(clocks or [member.clock for member in self.members.values()], default=0)

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._digests.append(compute_digest(self._digests[-1], entry))
        match entry:
            case Start(workers):
                self._expect(workers)
            case Join(worker, epoch, clock, session):
                member = self.members.setdefault(worker, Member(active=False))
                if not member.active:
                    member.first_epoch = epoch
                member.active = True
                member.expected = False
                member.epoch = epoch
                member.reads = 0
                member.clock = member.first_clock = clock
                member.read_version = self.version
                member.sessions = [*member.sessions[-7:], session]
            case Accept(push):
                self._accepted.append(push)
                self._count_push(push)
            case Write(pushes):
                self.version += 1
                self.awaits_norm = self.uses_norms
                if self._accepted:
                    self._accepted = []
                else:
                    self._count_push(pushes[0])
            case Norm():
                self.awaits_norm = False
            case Read(worker, _, number):
                self.members[worker].reads = number
                self.members[worker].read_version = self.version
            case Leave(worker):
                self.members[worker].active = self.members[worker].expected = False

    def _expect(self, workers: int) -> None:
        clock = self._find_slowest_clock()
        for worker in range(workers):
            member = self.members.setdefault(worker, Member(active=False))
            member.expected = True
            member.clock = clock

    def _count_push(self, push: Push) -> None:
        member = self.members[push[0]]
        member.clock += 1
        member.pushes += 1

    def _write_if_complete(self) -> None:
        if self._is_complete():
            # A floating-point sum depends on its order. Sum in the order of the worker numbers,
            # which is the same in every run.
            step = tuple(sorted(self._accepted))
            self._append(Write(step, (0,) * len(step)))

    def _is_complete(self) -> bool:
        """Return True if all awaited workers have pushed at this clock."""
        pushed = self._find_pushed_workers()
        return bool(self._accepted) and pushed.issuperset(self.awaited)

    def _find_pushed_workers(self) -> set[int]:
        """Return the workers that have pushed in their present membership at this clock."""
        members = self.members
        return {w for w, epoch, _ in self._accepted if epoch >= members[w].first_epoch}


def build_wrong_clock_error(worker: int, clock: int, expected: int) -> ValueError:
    """Return the error for a push or pull whose clock is not the worker's current clock."""
    return ValueError(
        f"worker {worker} is at clock {clock}, but the server has {expected} of its gradients; "
        "create one Worker per worker number"
    )

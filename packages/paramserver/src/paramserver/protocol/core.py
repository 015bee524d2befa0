"""One server as a pure function of what it is told: messages in, answers out.

Notable:
- no lock, no thread, no socket, no clock: `now` is an argument. `Server` drives it from threads,
  `transport.zeromq` from one loop, and a test from a simulated network and clock;
- an answer of None means: not yet. Whoever drives it asks again when something has changed, calls
  `check` when `next_deadline` has passed, and copies the bytes that an answer comes with;
- with a journal, what an answer tells is written down before it is given;
- `validate` checks a request, its sender and its log before anything changes or is written down.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paramserver.consistency import Consistency
from paramserver.protocol.ledger import Ledger, Log, Member, Push, at_another_clock
from paramserver.protocol.messages import (
    OBSERVER,
    Kind,
    Message,
    PeerLost,
    check_request,
    loss_and_bytes,
    pushed_twice,
)
from paramserver.protocol.replica import Replica


@dataclass(frozen=True)
class Staged:
    """A server holds the gradients of a push, in the bytes in which they came."""

    push: Push
    gradients: Tensor


@dataclass(frozen=True)
class Followed:
    """A server has followed these entries."""

    log: Log


Record = Staged | Followed
_WITH_LOG = (Kind.FETCH, Kind.FOLLOW, Kind.END)
_OF_FIRST = (
    Kind.PULL, Kind.PUSH, Kind.COMMIT, Kind.READ, Kind.SYNC, Kind.LEAVE, Kind.FINISH
)  # fmt: skip
Data = Tensor | None


class Journal(Protocol):
    """Where a server writes down what it will have to know after its death."""

    def record(self, record: Record) -> None:
        """Return when it is written."""


class Core:
    """The protocol of one server.

    `elastic` lets workers join that were not there at the start, and come back. One that is lost or
    silent fails the run, unless it may go on without (`survives`); then one that others have waited
    for `drop_after` seconds is lost too, even if it is well.
    """

    def __init__(
        self, replica: Replica, consistency: Consistency, *, workers: int, timeout: float,
        survives: bool, elastic: bool, drop_after: float | None = None,
        journal: Journal | None = None) -> None:  # fmt: skip
        self.replica = replica
        self.is_first = replica.shard.number == 0
        """Whether this server orders the updates; the other servers replay its log."""
        self.ledger = Ledger(workers, consistency)
        self.timeout, self._drop_after = timeout, drop_after
        self.failure = ""
        self.journal = journal
        self.given = replica.newest
        """The data of the last answer if it has a size, until the next request may change it."""
        self._consistency, self._workers = consistency, workers
        self._survives, self._elastic = survives, elastic
        self.lost: dict[int, str] = {}
        """Why each worker was lost that the others go on without."""
        self._heard = dict.fromkeys(range(workers), 0.0)
        self._waiting: dict[int, tuple[float, Message]] = {}
        self.told: dict[int, tuple[float, int]] = {}
        """By worker, its last loss and the bytes that it has pushed, as it says."""

    def handle(
        self, worker: int, message: Message, data: Data, now: float, *, finite: bool = False,
        session: int | None = None) -> Message | None:  # fmt: skip
        """Answer a request, with its data in `data` and those of the answer in `given`.

        `finite`: it is known that the data are. None if it has to wait. Raises what is wrong with
        it; then nothing has changed. For `session` see `validate`.
        """
        log = self.validate(worker, message, session)
        beat = message.kind is Kind.BEAT  # of a thread: its worker may wait on, as long as it has
        waited = None if beat else self._waiting.pop(worker, None)
        self._admit(worker, message)
        if worker in self.ledger.members:
            self._heard[worker] = now
        reply = self._answer(worker, message, log, data, finite)
        if message.kind is Kind.JOIN:
            self._heard[worker] = now
        if message.text and message.kind in (Kind.PUSH, Kind.COMMIT):
            self.told[worker] = loss_and_bytes(message.text)
        if reply is None:
            since = waited[0] if waited and waited[1] == message else now
            self._waiting[worker] = since, message
        return reply

    def validate(self, worker: int, message: Message, session: int | None = None) -> Log | None:
        """Return the log that a request contains, if it does. Raise what is wrong with a request.

        Nothing changes. `session` is the number with which its sender joined; None if the transport
        knows by itself that the sender is `worker`.
        """
        check_request(worker, message)
        kind, shard = message.kind, self.replica.shard
        if kind in (Kind.PUSH, Kind.PULL) and shard.servers > 1:
            raise ValueError(f"{kind!r} is for an only server, this is one of {shard.servers}")
        if kind in _OF_FIRST and not self.is_first:
            raise ValueError(f"{kind!r} is for server 0, this is server {shard.number}")
        if message.position > self.replica.position:
            text = f"worker {worker} has seen {message.position} entries of the log, this server "
            text += f"has {self.replica.position}: its journal was taken back"
            raise RuntimeError(f"{text}; start the worker again")
        log, ledger = None, self.ledger
        if kind in _WITH_LOG:
            log = Log.from_text(message.text)
            ledger = self._preview(log)
        if kind is Kind.JOIN:
            self._check_join(worker, message)
        elif worker != OBSERVER:
            self._check_sender(ledger, worker, message, session)
        return log

    def _preview(self, log: Log) -> Ledger:
        """The ledger as it will be when this server has followed `log`."""
        if self.is_first:
            if log.stop > self.replica.position:
                text = f"a log of {log.stop} entries was sent to the server that makes it"
                raise ValueError(f"{text}: it has made {self.replica.position}")
            return self.ledger
        preview = self.ledger.copy()
        preview.replay(log)
        self.replica.check(log)
        return preview

    def _check_sender(
        self, ledger: Ledger, worker: int, message: Message, session: int | None
    ) -> None:
        member = ledger.members.get(worker)
        if member is None or (session is not None and not member.sessions):
            if message.kind is Kind.BEAT:
                return  # its thread begins before it joins
            text = "" if self._elastic else f"; there are {self._workers} workers"
            raise ValueError(f"worker {worker} is unknown{text}: join first")
        again = f"the others go on without this worker: {worker} has joined again since"
        if session is not None and _public(session) != member.sessions[-1]:
            raise PeerLost(f"{again}, or this is another worker's sender")
        if message.kind in (Kind.BEAT, Kind.ABORT):
            return  # these belong to a session, whatever its epoch
        if message.epoch < member.epoch:
            raise PeerLost(again)
        if message.epoch > member.epoch:
            text = f"worker {worker} is in epoch {member.epoch}, its request in {message.epoch}"
            raise ValueError(f"{text}; join first")

    def check(self, now: float) -> list[tuple[int, Exception]]:
        """Who waits for a worker that has been silent for too long, and what to tell them.

        If the run goes on without such a worker nobody is told: it is lost, and waits may end.
        """
        told: list[tuple[int, Exception]] = []
        for worker, (since, message) in list(self._waiting.items()):
            silent = [w for w in self._waits_for(message) if self._deadline(w, since) <= now]
            if not silent:
                continue
            state = ", ".join(f"worker {w} at clock {self.ledger.members[w].clock}" for w in silent)
            if self._survives:
                for w in silent:
                    self.lose(w, self._reason(w, now))
                continue
            where = "at the end" if message.kind is Kind.FINISH else f"at clock {message.clock}"
            del self._waiting[worker]
            text = f"worker {worker} waited {self.timeout:g} s {where} for {state}"
            error = TimeoutError(f"{text}; a step may take that long: raise `timeout` if one does")
            told.append((worker, error))
        return told

    def next_deadline(self) -> float:
        """When `check` will have something to do if nothing else happens."""
        waiting = self._waiting.values()
        ends = (self._deadline(w, since) for since, m in waiting for w in self._waits_for(m))
        return min(ends, default=float("inf"))

    def lose(self, worker: int, reason: str) -> None:
        """`worker` is gone without finishing."""
        member = self.ledger.members.get(worker)
        if member is None or not member.active:
            return
        message = f"worker {worker} is gone at clock {member.clock}: {reason}"
        self._waiting.pop(worker, None)
        if self._survives:
            self.lost[worker] = message
            if self.is_first:
                self.ledger.leave(worker)  # followed with the next answer
        else:
            self.failure = self.failure or message

    def restart(self, state: Mapping[str, Any]) -> None:
        """Begin a new log with the parameters of `state`, at its version."""
        self.replica.load_state_dict(state)
        self.ledger = Ledger(self._workers, self._consistency, self.replica.version)

    def snapshot(self) -> dict[str, Any]:
        """All that a server needs to go on in the log where this one is."""
        return {"replica": self.replica.snapshot(), "ledger": self.ledger.state()}

    def restore(self, snapshot: Mapping[str, Any] | None, records: Iterable[Record]) -> None:
        """Go on from a snapshot and what the journal has recorded since."""
        if snapshot is not None:
            self.replica.load_snapshot(snapshot["replica"])
            self.ledger.load_state(snapshot["ledger"])
        for record in records:
            match record:
                case Staged(push, data) if self.replica.wants(push):
                    self.replica.stage(push, self.replica.unpack(push, data), len(data))
                case Followed(log):
                    self.ledger.replay(log)
                    self.replica.follow(log)
        if not self.is_first:
            self.ledger.forget(self.replica.position)

    def _answer(
        self, worker: int, m: Message, log: Log | None, data: Tensor | None, finite: bool
    ) -> Message | None:
        push = (worker, m.epoch, m.clock)
        match m.kind:
            case Kind.JOIN:
                return self._join(worker, m)
            case Kind.BEAT:
                return Message(Kind.OK)
            case Kind.STAGE | Kind.PUSH | Kind.COMMIT:
                if m.kind is not Kind.STAGE:
                    self._check_clock(worker, m)
                if m.kind is not Kind.COMMIT and self.replica.wants(push):
                    if data is None:
                        raise ValueError(f"worker {worker} pushed no gradients")
                    if self.ledger.awaits(worker):
                        raise pushed_twice(worker)
                    data = data[: m.size or None]
                    gradients = self.replica.unpack(push, data, finite=finite)
                    if self.journal:
                        self.journal.record(Staged(push, data))
                    self.replica.stage(push, gradients, len(data))
                if m.kind is Kind.STAGE:
                    return Message(Kind.OK)
                if m.clock == self._member(worker).clock and not self.replica.has(push):
                    raise ValueError(f"worker {worker} commits {push}, which it did not stage")
                self.ledger.commit(push)
                self._follow_own()
                return Message(Kind.OK, number=self.replica.version)
            case Kind.READ | Kind.PULL:
                return self._read(worker, m)
            case Kind.FETCH:
                self._follow(log)
                return self._fetch(worker, m)
            case Kind.FOLLOW:
                self._follow(log)
                return Message(Kind.OK, position=self.replica.position)
            case Kind.SYNC:
                text = self._log(worker, m).to_text()
                return Message(Kind.OK, number=int(self.ledger.awaits(worker)), text=text)
            case Kind.LEAVE:
                self.ledger.leave(worker)
                return Message(Kind.OK, text=self._log(worker, m).to_text())
            case Kind.FINISH:
                self.ledger.leave(worker)
                text = self._log(worker, m).to_text()
                return None if self.ledger.active else self._newest(text)
            case Kind.END:
                self._follow(log)
                return self._newest(json.dumps([self.replica.staleness, self.replica.push_bytes]))
        raise ValueError(f"{m.kind!r} is no request")

    def _check_join(self, worker: int, m: Message) -> None:
        replica = self.replica
        if m.text != replica.layout:
            text = f"worker {worker} has parameters of layout {m.text}, the server of layout "
            text += f"{replica.layout}; build the same module (names, shapes, types, requires_grad)"
            raise ValueError(f"{text} on every rank, and give the same policy")
        if m.number != replica.shard.number:
            text = f"worker {worker} addresses server {m.number}, this is {replica.shard.number}"
            raise ValueError(f"{text}; give the servers in the order of their shards")

    def _join(self, worker: int, m: Message) -> Message:
        replica = self.replica
        if self._elastic:
            self.lost.pop(worker, None)
        if m.number:  # a server that is not the first has no say in who takes part
            return Message(Kind.OK, number=replica.base_version, position=replica.position)
        if self._elastic:
            # `clock` is the session here: a number that no other life of the worker has.
            self.ledger.join(worker, _public(m.clock))
            self._follow_own()
        member = self._member(worker)
        numbers = member.epoch, member.clock, replica.base_version, replica.position
        return Message(Kind.OK, *numbers, text=str(member.pushes))

    def _read(self, worker: int, m: Message) -> Message | None:
        self._check_clock(worker, m)
        if self.ledger.behind(m.clock):
            return None
        self.ledger.read(worker, m.number)
        if m.kind is Kind.READ:
            return Message(Kind.OK, text=self._log(worker, m).to_text())
        self._follow_own()
        self.ledger.forget(self.replica.position)
        return self._fetch(worker, m)

    def _fetch(self, worker: int, m: Message) -> Message:
        fetched = self.replica.fetch(worker, (m.epoch, m.number), m.have)
        position = self.replica.position
        if fetched is None:
            return Message(Kind.AGAIN, position=position)
        version, self.given, have = fetched
        return Message(Kind.OK, 0, 0, version, position, size=len(self.given), have=have)

    def _newest(self, text: str) -> Message:
        self.given = self.replica.newest
        return Message(Kind.OK, number=self.replica.version, size=len(self.given), text=text)

    def _admit(self, worker: int, m: Message) -> None:
        if self.failure and m.kind is not Kind.BEAT:  # which nobody waits for an answer to
            raise PeerLost(self.failure)
        if m.kind in (Kind.JOIN, Kind.BEAT):
            return
        if worker in self.lost:
            raise PeerLost(f"the others go on without this worker: {self.lost[worker]}")

    def _check_clock(self, worker: int, m: Message) -> None:
        member = self._member(worker)
        if not member.active and self._elastic:
            raise PeerLost(f"the others go on without this worker: worker {worker} has left")
        if not member.active:
            raise RuntimeError(f"worker {worker} has finished; it can neither pull nor push")
        # Only where requests may be lost may one come twice; elsewhere it is a twin's.
        again = self._elastic and m.kind in (Kind.PUSH, Kind.COMMIT)
        if m.clock != member.clock and not (again and m.clock == member.clock - 1):
            raise at_another_clock(worker, m.clock, member.clock)

    def _member(self, worker: int) -> Member:
        if worker not in self.ledger.members:
            raise ValueError(f"worker {worker} is unknown; there are {self._workers} workers")
        return self.ledger.members[worker]

    def _waits_for(self, message: Message) -> list[int]:
        """Whom a request waits for, without those who are kept waiting themselves."""
        ends = message.kind is Kind.FINISH
        blockers = self.ledger.active if ends else self.ledger.behind(message.clock)
        return [worker for worker in blockers if worker not in self._waiting]

    def _deadline(self, worker: int, since: float) -> float:
        silent = self._silent_at(worker, since)
        return silent if self._drop_after is None else min(silent, since + self._drop_after)

    def _silent_at(self, worker: int, since: float) -> float:
        return max(since, self._heard.get(worker, 0.0)) + self.timeout

    def _reason(self, worker: int, now: float) -> str:
        if self._drop_after is not None and self._silent_at(worker, 0.0) > now:
            return f"the others have waited {self._drop_after:g} s for it"
        return f"it neither pulled nor pushed for {self.timeout:g} s"

    def _log(self, worker: int, m: Message) -> Log:
        """The log from the position of `m` on. All servers have followed what lies before: members
        report their least position, so that this part may be forgotten."""
        self._follow_own()
        if worker in self.ledger.members:
            self.ledger.forget(m.position)
        return self.ledger.since(m.position)

    def _follow_own(self) -> None:
        self._follow(self.ledger.since(self.replica.position))

    def _follow(self, log: Log | None) -> None:
        assert log is not None  # `validate` returns it for each kind that has one
        self.ledger.replay(log)  # of the first server's own log nothing is new
        new = log.after(self.replica.position)
        if new.entries and self.journal:
            self.journal.record(Followed(new))
        try:
            self.replica.follow(log)
        except Exception as error:  # of the optimizer: this shard is not what the others' are
            self.failure = f"the server is lost: {type(error).__name__}: {error}"
            raise
        if not self.is_first:
            self.ledger.forget(self.replica.position)


def _public(session: int) -> int:
    """What the log says of a session: anybody may read it, only one who joined knows the number."""
    return int.from_bytes(hashlib.blake2b(str(session).encode(), digest_size=6).digest(), "big")

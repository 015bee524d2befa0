"""The protocol of one server as a state machine: requests in, answers out.

The state machine uses no locks, threads, sockets or wall-clock time; the time is the argument
`now`. `Server` calls it from threads, `transport.zeromq` from one loop, and the tests from a
simulated network.

`Core.handle` validates a request before it changes or records anything. With a journal, it records
every change before it returns the answer. If it returns None, the request has to wait: the caller
retries it after each later request, and calls `check` at `waits.find_next_deadline`.

| request            | server   | appended to the log       | staged    | may wait for          |
|--------------------|----------|---------------------------|-----------|-----------------------|
| JOIN               | all      | Start, Join (server 0)    |           |                       |
| READ               | 0        | Read                      |           | slower workers        |
| STAGE              | all      |                           | gradients |                       |
| COMMIT             | 0        | Accept, Write             |           |                       |
| LEAVE, FINISH      | 0        | Leave, Write              |           | all workers (FINISH)  |
| SYNC               | 0        |                           |           |                       |
| NORMS              | 0        | Norm                      |           |                       |
| FETCH, REPLAY, END | all      | the entries in the text   |           |                       |
| HEARTBEAT, ABORT   | all      | Leave (ABORT, server 0)   |           |                       |

Server 0 replays each entry that it appends before it answers with parameters or with the log.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from paramserver.consistency import Consistency
from paramserver.protocol.ledger import Ledger, build_wrong_clock_error
from paramserver.protocol.log import Journal, Log, Record, Replayed, Staged, parse_norm
from paramserver.protocol.messages import (
    OBSERVER,
    Kind,
    Message,
    PeerLost,
    build_pushed_twice_error,
)
from paramserver.protocol.replica import Replica
from paramserver.protocol.validation import hash_session, validate
from paramserver.protocol.waits import Waits

Data = Tensor | None

# Note [Norms of several servers]
# `max_norm` limits the norm of the gradients on all servers. Each server knows the norm of its
# gradients once it has replayed a Write entry. It applies the update when it replays the Norm entry
# that follows, so journals and replays need no other rule. Until the log contains this entry,
# server 0 answers a worker's COMMIT, READ, SYNC, LEAVE or FINISH with NORMS_REQUIRED and the log.
# The worker then forwards the log to the other servers by REPLAY, whose answers contain their
# norms. It sends them to server 0 by NORMS, and repeats its request. If the worker dies, the next
# worker that sends such a request does the same. The Write entry fixes the gradients, so both
# workers receive the same norms. The second NORMS has no effect.


class Core:
    """The protocol of one server.

    Args:
        replica: the parameters of the server's shard.
        consistency: the policy.
        workers: number of workers that take part from the start.
        timeout: seconds without a request after which other workers stop waiting for a worker.
        allow_missing: see `Server`.
        elastic: see `Server`.
    """

    def __init__(
        self,
        replica: Replica,
        consistency: Consistency,
        *,
        workers: int,
        timeout: float,
        allow_missing: bool,
        elastic: bool,
    ) -> None:
        self.replica = replica
        #: True if this server orders the updates; the other servers replay its log.
        self.is_first = replica.shard.number == 0
        self.ledger = Ledger(workers, consistency, uses_norms=replica.uses_norms)
        self.waits = Waits(workers, timeout)
        #: Error that ended the training, which all later requests receive; empty if there is none.
        self.failure = ""
        #: Storage of records, which `DiskJournal.load` sets; None stores no records.
        self.journal: Journal | None = None
        #: Data of the last answer if its `size` is not 0; valid until the next request.
        self.answer_data = replica.newest
        #: Reason for each loss after which training continued, keyed by worker.
        self.lost: dict[int, str] = {}
        self._elastic = elastic
        #: True if training continues after the loss of a worker. Otherwise, if `elastic`, the other
        #: workers wait up to `timeout` seconds for it to rejoin. If not, its loss ends training.
        self._continues_after_loss = allow_missing or (elastic and not consistency.averages)

    def handle(
        self,
        worker: int,
        message: Message,
        data: Data,
        now: float,
        *,
        is_known_finite: bool = False,
        session: int | None = None,
    ) -> Message | None:
        """Return the answer to a request, or None if the request has to wait.

        Args:
            worker: number of the worker that sent the request.
            message: the request.
            data: gradients of a STAGE, as bytes.
            now: current time in seconds.
            is_known_finite: True if all gradients are known to be finite.
            session: see `validate`.

        Raises:
            Exception: the request is invalid or cannot be answered; the worker receives the error.
        """
        log = self.validate(worker, message, session)
        # A HEARTBEAT comes from a thread of the worker and does not end a wait of the worker.
        waited = None if message.kind is Kind.HEARTBEAT else self.waits.end(worker)
        self._check_losses(worker, message)
        if worker in self.ledger.members:
            self.waits.last_seen[worker] = now
        reply = self._answer(worker, message, log, data, is_known_finite)
        if message.kind is Kind.JOIN:
            self.waits.last_seen[worker] = now
        if reply is None:
            self.waits.start(worker, message, now, waited)
        return reply

    def validate(self, worker: int, message: Message, session: int | None = None) -> Log | None:
        """Return the log that a request contains, or None; see `validation.validate`."""
        replica = self.replica
        return validate(
            worker, message, session, replica=replica, ledger=self.ledger, elastic=self._elastic
        )

    def check(self, now: float) -> list[tuple[int, Exception]]:
        """Return the workers whose wait has timed out, each with its error.

        If training continues after a loss, mark the silent workers as lost instead.

        A worker that rejoins a finished job, because it died before it received the last answer,
        expects all workers again. If every worker that has joined again has finished, the job is
        complete, and the silent workers that never joined are not awaited any more.
        """
        timed_out: list[tuple[int, Exception]] = []
        for worker, (_, message) in list(self.waits.waiting.items()):
            silent = self.waits.find_silent_blockers(worker, self.ledger, now)
            if not silent:
                continue
            if message.kind is Kind.FINISH and not self.ledger.active:
                for w in silent:
                    self.ledger.leave(w)
                continue
            state = ", ".join(f"worker {w} at clock {self.ledger.members[w].clock}" for w in silent)
            if self._continues_after_loss:
                for w in silent:
                    self.mark_lost(w, f"it sent no request for {self.waits.timeout:g} s")
                continue
            where = "at the end" if message.kind is Kind.FINISH else f"at clock {message.clock}"
            self.waits.end(worker)
            error = TimeoutError(
                f"worker {worker} waited {where} for {state}, silent for {self.waits.timeout:g} s; "
                "pass a longer `timeout` if a step may take that long, or allow_missing=True to "
                "continue without lost workers"
            )
            timed_out.append((worker, error))
        return timed_out

    def mark_lost(self, worker: int, reason: str) -> None:
        """Handle the loss of an awaited worker as `_continues_after_loss` describes."""
        member = self.ledger.awaited.get(worker)
        if member is None:
            return
        message = f"worker {worker} is gone at clock {member.clock}: {reason}"
        self.waits.end(worker)
        if self._continues_after_loss:
            self.lost[worker] = message
            if self.is_first:
                self.ledger.leave(worker)  # the replica replays this entry with the next answer
        elif not self._elastic:
            self.failure = self.failure or message

    def snapshot(self) -> dict[str, Any]:
        """Return the state from which a server can continue at this position of the log."""
        return {"replica": self.replica.snapshot(), "ledger": self.ledger.to_state()}

    def restore(self, snapshot: Mapping[str, Any] | None, records: Iterable[Record]) -> None:
        """Restore a snapshot, if any, and replay the records that the journal has stored since."""
        if snapshot is not None:
            self.replica.load_snapshot(snapshot["replica"])
            self.ledger.load_state(snapshot["ledger"])
        for record in records:
            match record:
                case Staged(push, data) if self.replica.is_next(push):
                    self.replica.stage(push, self.replica.unpack(push, data))
                case Replayed(log):
                    self.ledger.replay(log)
                    self.replica.replay(log)
        if not self.is_first:
            self.ledger.discard_before(self.replica.position)

    def _answer(
        self, worker: int, message: Message, log: Log | None, data: Data, is_known_finite: bool
    ) -> Message | None:
        """Return the answer to a valid request, or None if it has to wait."""
        match message.kind:
            case Kind.JOIN:
                return self._join(worker, message)
            case Kind.HEARTBEAT:
                return Message(Kind.OK)
            case Kind.STAGE:
                return self._stage(worker, message, data, is_known_finite)
            case Kind.COMMIT:
                return self._commit(worker, message)
            case Kind.READ:
                return self._read(worker, message)
            case Kind.NORMS:
                return self._add_norms(message)
            case Kind.SYNC | Kind.LEAVE | Kind.FINISH:
                return self._answer_with_log(worker, message)
            case Kind.FETCH | Kind.REPLAY | Kind.END:
                self._replay(log)
                return self._answer_after_replay(worker, message)
        raise ValueError(f"expected a request, got {message.kind!r}")

    def _answer_with_log(self, worker: int, message: Message) -> Message | None:
        """Answer a SYNC, LEAVE or FINISH with the log; return None while a FINISH has to wait."""
        if message.kind is not Kind.SYNC:
            self.ledger.leave(worker)
        if self.ledger.awaits_norm and worker != OBSERVER:
            return self._request_norms(worker, message)
        text = self._take_log(worker, message).to_text()
        if message.kind is Kind.SYNC:
            return Message(Kind.OK, number=int(self.ledger.has_pending_push(worker)), text=text)
        if message.kind is Kind.LEAVE:
            return Message(Kind.OK, text=text)
        return None if self.ledger.awaited else self._answer_with_newest(text)

    def _answer_after_replay(self, worker: int, message: Message) -> Message:
        """Return the answer to a FETCH, REPLAY or END after its log has been replayed."""
        if message.kind is Kind.FETCH:
            return self._fetch(worker, message)
        if message.kind is Kind.REPLAY:
            norm = "" if self.replica.norm is None else json.dumps(self.replica.norm)
            return Message(
                Kind.OK, number=self.replica.version, position=self.replica.position, text=norm
            )
        return self._answer_with_newest(json.dumps(self.replica.staleness))

    def _stage(self, worker: int, message: Message, data: Data, is_known_finite: bool) -> Message:
        push = (worker, message.epoch, message.clock)
        if not self.replica.is_next(push):
            return Message(Kind.OK)
        if data is None:
            raise ValueError(f"expected gradients of worker {worker}, got a push without data")
        if self.ledger.has_pending_push(worker):
            raise build_pushed_twice_error(worker)
        data = data[: message.size]
        gradients = self.replica.unpack(push, data, is_known_finite=is_known_finite)
        if self.journal:
            self.journal.record(Staged(push, data))
        self.replica.stage(push, gradients)
        return Message(Kind.OK)

    def _commit(self, worker: int, message: Message) -> Message:
        push = (worker, message.epoch, message.clock)
        self._check_clock(worker, message)
        if self.ledger.awaits_norm:
            return self._request_norms(worker, message)
        if message.clock == self.ledger.members[worker].clock and not self.replica.is_staged(push):
            raise ValueError(f"expected a staged push, got a COMMIT of {push} without a STAGE")
        self.ledger.commit(push)
        self._replay_new_entries()
        return Message(Kind.OK, number=self.replica.version)

    def _join(self, worker: int, message: Message) -> Message:
        replica = self.replica
        if self._elastic:
            self.lost.pop(worker, None)
        if message.number:  # the index of the server; only server 0 decides which workers take part
            return Message(Kind.OK, position=replica.position, text=replica.common_settings)
        if replica.shard.servers > 1 and not self.ledger.can_replay_from(message.position):
            return Message(Kind.REREAD, position=replica.position)
        if self._elastic:
            # The field `clock` of a JOIN contains the number of the session.
            self.ledger.join(worker, hash_session(message.clock))
            self._replay_new_entries()
        member = self.ledger.members[worker]
        return Message(
            Kind.OK, member.epoch, member.clock, position=replica.position, text=str(member.pushes)
        )

    def _read(self, worker: int, message: Message) -> Message | None:
        self._check_clock(worker, message)
        if self.ledger.awaits_norm:
            return self._request_norms(worker, message)
        if self.ledger.list_workers_behind(message.clock):
            return None
        self.ledger.read(worker, message.number)
        return Message(Kind.OK, text=self._take_log(worker, message).to_text())

    def _request_norms(self, worker: int, message: Message) -> Message:
        text = self._take_log(worker, message).to_text()
        return Message(Kind.NORMS_REQUIRED, number=self.replica.version, text=text)

    def _add_norms(self, message: Message) -> Message:
        """Append the norm of the update that waits for it; see Note [Norms of several servers]."""
        parsed = json.loads(message.text)
        others = self.replica.shard.servers - 1
        if not isinstance(parsed, list) or len(parsed) != others:
            raise ValueError(f"expected the norms of {others} servers, got {message.text[:80]!r}")
        norms = [parse_norm(field) for field in parsed]
        self._replay_new_entries()
        norm = self.replica.norm
        if norm is not None and message.number == self.replica.version:
            self.ledger.add_norm(math.hypot(norm, *norms))
            self._replay_new_entries()
        return Message(Kind.OK)

    def _fetch(self, worker: int, message: Message) -> Message:
        fetched = self.replica.fetch(
            worker, (message.epoch, message.number), message.pulled_version
        )
        position = self.replica.position
        if fetched is None:
            return Message(Kind.REREAD, position=position)
        version, self.answer_data, fragment = fetched
        size = len(self.answer_data)
        return Message(Kind.OK, 0, 0, version, position, size, fragment=fragment)

    def _answer_with_newest(self, text: str) -> Message:
        self.answer_data = self.replica.newest
        return Message(Kind.OK, number=self.replica.version, size=len(self.answer_data), text=text)

    def _check_losses(self, worker: int, message: Message) -> None:
        """Raise `PeerLost` if a loss has ended training, or training continues without `worker`."""
        # No worker waits for the answer to a HEARTBEAT.
        if self.failure and message.kind is not Kind.HEARTBEAT:
            raise PeerLost(self.failure)
        if message.kind in (Kind.JOIN, Kind.HEARTBEAT):
            return
        if worker in self.lost:
            raise PeerLost(f"training continues without this worker: {self.lost[worker]}")

    def _check_clock(self, worker: int, message: Message) -> None:
        member = self.ledger.members[worker]
        if not member.active:
            raise PeerLost(
                f"training continues without this worker: worker {worker} has finished or left"
            )
        # Elastic workers may resend a push whose answer was lost. Otherwise a second push of one
        # clock means that two workers use the same number.
        may_repeat = self._elastic and message.kind is Kind.COMMIT
        is_repeated = may_repeat and message.clock == member.clock - 1
        if message.clock != member.clock and not is_repeated:
            raise build_wrong_clock_error(worker, message.clock, member.clock)

    def _take_log(self, worker: int, message: Message) -> Log:
        """Return the log from the position of the message, and discard the entries before it.

        The position of a worker's message is the smallest position of all servers, so all servers
        have replayed the discarded entries.
        """
        self._replay_new_entries()
        if worker in self.ledger.members:
            self.ledger.discard_before(message.position)
        return self.ledger.get_log_from(message.position)

    def _replay_new_entries(self) -> None:
        self._replay(self.ledger.get_log_from(self.replica.position))

    def _replay(self, log: Log | None) -> None:
        assert log is not None  # `validate` returns the log of each request that contains one
        self.ledger.replay(log)  # does nothing on the first server, which created the log
        new = log.select_from(self.replica.position)
        if new.entries and self.journal:
            self.journal.record(Replayed(new))
        try:
            self.replica.replay(log)
        except Exception as error:
            # The optimizer failed, so this shard no longer has the version of the other shards.
            self.failure = f"the server is lost: {type(error).__name__}: {error}"
            raise
        if not self.is_first:
            self.ledger.discard_before(self.replica.position)

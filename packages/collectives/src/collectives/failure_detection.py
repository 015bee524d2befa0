"""Detection of lost ranks: the reports that ranks exchange when a call fails.

When messages fail, every rank that still runs publishes a report in the group's store and closes
its connections, so that the messages of the other ranks fail too. It then collects the reports of
the other ranks, and `attribution` decides which ranks are blamed. Ranks that share memory inform
each other through their clocks (see `shared_memory/arena.py`).

All of this ends within the group's timeout plus two seconds: ranks wait for each other up to the
timeout, and the remaining time is for the reports.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from collectives.attribution import (
    Attribution,
    Cause,
    Report,
    Status,
    attribute,
    disconnected_ranks,
    ranks_that_left,
)
from collectives.errors import LEFT_GROUP, UNUSABLE, Mismatch, PeerError, RankLost
from collectives.shared_memory.fingerprint import Lengths, format_ranks
from collectives.store import STORE_SECONDS, clone_store, query_store, run_within

# Minimum time that a rank waits for reports: surviving ranks need it to notice closed connections.
REPORT_SECONDS = 1.0
# Time in which gloo notices that all connections to a dead rank have ended.
DISCONNECT_SECONDS = 0.25
# Interval at which a rank checks whether it is waiting, in seconds and as a fraction of the
# timeout.
MIN_POLL_SECONDS = 0.1
POLL_FRACTION = 0.1
# Pause between two reads of the reports, because all ranks read the same store.
READ_INTERVAL_SECONDS = 0.05

CAUSE_KEY = "report/cause"


@dataclass
class Operation:
    """The call that a group is running, as far as failure detection needs it."""

    #: Number of calls so far, including this one.
    number: int = 0
    #: The last calls, packed; this one is the last.
    calls: Sequence[bytes] = ()
    #: Ranks that send and receive messages in this call.
    participants: Sequence[int] = ()
    #: True if ranks compare their calls before data moves.
    compares_calls: bool = False
    #: This rank's lengths in an all-to-all.
    lengths: Lengths | None = None
    #: A value of time.monotonic.
    start_time: float = field(default_factory=time.monotonic)


class FailureDetector:
    """One rank's side of failure detection: it explains a failed call and leaves the group.

    Args:
        store: the group's store.
        arena: the memory that this rank shares with other ranks, or None.
        one_host: True if the arena contains all ranks of the group.
        point_to_point: the `PointToPoint` messages of the group.
        gloo: the `GlooGroups` of the group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        arena: Any,
        one_host: bool,
        point_to_point: Any,
        gloo: Any,
    ) -> None:
        #: The error after which the group can no longer be used, or None.
        self.group_error: RankLost | None = None
        # A long wait of the caller in the group's store must not delay the reports.
        self._store = clone_store(store)
        self._rank = rank
        self._world = world
        # Time of the store's last answer, a value of time.monotonic.
        self._last_answer = 0.0
        self._arena = arena
        self._one_host = one_host
        self._point_to_point = point_to_point
        self._gloo = gloo

    def explain(self, error: BaseException, operation: Operation, timeout: float) -> BaseException:
        """Return the error to raise for a failed call; leave the group unless it remains usable."""
        if isinstance(error, Mismatch):
            # All ranks of this host have found the mismatch, but other hosts wait for messages.
            if not (self._one_host or operation.compares_calls):
                self.leave_group_with_reason(error, operation, is_known_on_host=True)
            return error
        if isinstance(error, PeerError):
            cause = self._find_cause(error, operation, timeout)
            self.leave_group_with_reason(cause, operation)
            return cause
        if isinstance(error, RankLost):
            cause = self._reported_mismatch() or error
            self.leave_group_with_reason(cause, operation)
            return cause
        failed = RankLost([self._rank], f"rank {self._rank} failed: {error!r}")
        self.leave_group_with_reason(failed, operation)
        return error

    def leave_group_with_reason(
        self, reason: RankLost | Mismatch, operation: Operation, *, is_known_on_host: bool = False
    ) -> None:
        """Leave the group and publish the reason to every rank.

        With `is_known_on_host`, the clock is not changed: all ranks of this host find the mismatch
        by themselves, and a late rank still has to reach that tick.
        """
        self.group_error = RankLost(reason.ranks, str(reason))
        if not self._one_host:
            if isinstance(reason, Mismatch):
                self._publish_report(
                    operation, Status.MISMATCH, blamed=reason.ranks, difference=str(reason)
                )
            else:
                status = Status.RANK_LOST if reason.ranks else Status.FAILED
                self._publish_report(operation, status, blamed=reason.ranks)
        # Change the clock last: a rank that sees the change reads the reason from the report.
        if self._arena is not None and not is_known_on_host:
            self._arena.leave(reason.ranks[0] if reason.ranks else None)

    def announce_end(self, operation: Operation) -> None:
        """Publish that this rank makes no further calls after this operation."""
        if self._arena is not None:
            self._arena.announce_end()
        if not self._one_host:
            self._publish_report(operation, Status.LEFT)

    def publish_waiting(self, operation: Operation | None) -> None:
        """Publish the operation in which this rank waits and the rank that it waits for.

        Clear the entry if `operation` is None.
        """
        text = ""
        if operation is not None:
            peer = self._point_to_point.waits_for
            if peer is None and self._arena is not None:
                peer = next(iter(self._arena.late()), None)
            text = self._report(operation, Status.WAITING, waits_for=peer).to_json()
        with suppress(TimeoutError, RuntimeError):
            run_within(STORE_SECONDS, lambda: self._store.set(f"waiting/{self._rank}", text))

    def _report(self, operation: Operation, status: Status, **fields: Any) -> Report:
        lengths = operation.lengths
        return Report(
            rank=self._rank,
            status=status,
            call_number=operation.number,
            # A copy, because the caller's thread may append to the calls meanwhile.
            calls=[call.hex() for call in tuple(operation.calls)],
            lengths=(lengths.sends, lengths.receives) if lengths else None,
            **fields,
        )

    def _publish_report(self, operation: Operation, status: Status, **fields: Any) -> None:
        """Publish this rank's report, then close its connections."""
        report = self._report(
            operation, status, disconnected=self._point_to_point.disconnected_peers(), **fields
        )
        text = report.to_json()

        def publish() -> None:
            self._store.set(f"report/{self._rank}", text)
            if report.blamed:
                self._store.set(CAUSE_KEY, text)

        with suppress(TimeoutError, RuntimeError):
            run_within(STORE_SECONDS, publish)
        self._point_to_point.close_connections()
        self._gloo.close_connections()

    def _read_report(self, key: str) -> Report | None:
        text = self._store.get(key) if self._store.check([key]) else b""
        self._last_answer = time.monotonic()
        return Report.from_json(text) if text else None

    def _read_missing(self, key: str, reports: dict[int, Report]) -> dict[int, Report]:
        """Return the reports under `key` of all ranks that are not in `reports`."""
        missing = {}
        for rank in set(range(self._world)) - reports.keys():
            report = self._read_report(f"{key}/{rank}")
            if report is not None:
                missing[rank] = report
        return missing

    def _collect_reports(
        self, awaited: Collection[int], deadline: float, call_number: int
    ) -> tuple[dict[int, Report], dict[int, Report]]:
        """Return the reports of failed ranks and the reports of ranks that still wait, by rank.

        Collection ends at the first of these events:
        - a rank reports the cause: this report is returned alone;
        - a rank has left before call `call_number`;
        - all `awaited` ranks have reported;
        - a rank without a report is disconnected, and `REPORT_SECONDS` have passed;
        - `deadline` (a value of time.monotonic) and `REPORT_SECONDS` have passed.
        """
        min_deadline = time.monotonic() + REPORT_SECONDS
        deadline = max(deadline, min_deadline)

        def collect() -> tuple[dict[int, Report], dict[int, Report]]:
            reports: dict[int, Report] = {}
            while True:
                cause = self._read_report(CAUSE_KEY)
                if cause is not None:
                    return {cause.rank: cause}, {}
                reports.update(self._read_missing("report", reports))
                now = time.monotonic()
                if (
                    ranks_that_left(reports, call_number)
                    or reports.keys() >= set(awaited)
                    or (now > min_deadline and disconnected_ranks(reports))
                    or now > deadline
                ):
                    return reports, self._read_missing("waiting", reports)
                time.sleep(READ_INTERVAL_SECONDS)

        return query_store(STORE_SECONDS, collect, lambda: self._last_answer)

    def _reported_mismatch(self) -> Mismatch | None:
        """Return the mismatch that a rank of another host has reported, or None."""
        if self._one_host:
            return None
        with suppress(RankLost):
            report = query_store(STORE_SECONDS, lambda: self._read_report(CAUSE_KEY))
            if report is not None and report.status is Status.MISMATCH:
                return Mismatch(report.difference, report.blamed)
        return None

    def _find_cause(
        self, error: PeerError, operation: Operation, timeout: float
    ) -> RankLost | Mismatch:
        """Return the cause of failed messages, from all ranks' reports."""
        number = operation.number
        if self._arena is not None and (dead := self._arena.dead()):
            ranks = [self._arena.names[i] for i in dead]
            return RankLost(ranks, f"{format_ranks(ranks)} died (call {number}); {UNUSABLE}")
        # A rank may wait for a peer that sends no messages to other hosts itself.
        awaited = set(operation.participants)
        if error.peer is not None:
            awaited.add(error.peer)
        waited = time.monotonic() - operation.start_time
        status = Status.TIMED_OUT if waited > (1 - POLL_FRACTION) * timeout else Status.FAILED
        if status is Status.FAILED:
            # gloo notices the closed connections of a dead rank one after another. Wait for all of
            # them before publishing the report, because publishing closes all other connections.
            time.sleep(DISCONNECT_SECONDS)
        self._publish_report(operation, status, waits_for=error.peer)
        context = f"messages failed in call {number}: {error}; {UNUSABLE}"
        try:
            reports, waiting = self._collect_reports(
                awaited, operation.start_time + timeout, number
            )
        except RankLost as silent_store:
            return RankLost(silent_store.ranks, f"{silent_store}; {context}")
        attribution = attribute(
            reports,
            waiting,
            call_number=number,
            awaited=awaited,
            world=self._world,
            peer=error.peer,
        )
        return _error_for(attribution, context, timeout)


def _error_for(attribution: Attribution, context: str, timeout: float) -> RankLost | Mismatch:
    """Return the error that reports an attribution to the caller."""
    ranks = attribution.ranks
    if attribution.cause is Cause.REPORTED_MISMATCH:
        return Mismatch(attribution.difference, ranks)
    if attribution.cause is Cause.MISMATCH:
        return Mismatch(f"{attribution.difference}; {UNUSABLE}", ranks)
    named = format_ranks(ranks)
    messages = {
        Cause.REPORTED_LOSS: f"{named} lost, as rank {attribution.reporter} reported",
        Cause.LEFT: f"{named} {LEFT_GROUP}",
        Cause.DISCONNECTED: f"the connections of {named} have ended",
        Cause.SILENT: f"{named} did not respond within the timeout of {timeout:g} s",
        Cause.PEER_DISCONNECTED: f"the connection to {named} failed",
        Cause.UNKNOWN: "a connection failed although every rank still responds",
    }
    return RankLost(ranks, f"{messages[attribution.cause]}: {context}")

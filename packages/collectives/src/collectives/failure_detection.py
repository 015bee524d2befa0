"""Detection of lost ranks: the reports that ranks exchange when a call fails.

A failed message shows that some rank is lost, but not which one. Every rank that still runs
therefore takes these steps (`FailureDetector._find_cause`):

    1. It publishes a report in the group's store.
    2. It closes its connections, so that the messages of the other ranks fail too.
    3. It collects the other ranks' reports.
    4. It applies the rules of `attribution.py`, which blame the same ranks everywhere.

If all ranks share memory, they need no reports: they check each other's clocks and processes (see
`shared_memory/arena.py`).

The error is raised within the timeout plus two seconds. Ranks wait for each other up to the
timeout, and the remaining time is for the reports.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from collectives.algorithms.gloo import GlooGroups
from collectives.algorithms.point_to_point import PointToPoint
from collectives.attribution import (
    Attribution,
    Cause,
    Report,
    Status,
    attribute_failure,
    list_disconnected_ranks,
    list_ranks_that_left,
)
from collectives.choice.topology import Topology
from collectives.errors import LEFT_GROUP, UNUSABLE, Mismatch, PeerError, RankLost
from collectives.shared_memory.fingerprint import Lengths, format_ranks
from collectives.store import STORE_SECONDS, clone_store, query_store, run_within

# Minimum time that a rank waits for reports: other ranks need it to notice closed connections.
REPORT_SECONDS = 1.0
# Time in which gloo notices that all connections to a dead rank have ended.
DISCONNECT_SECONDS = 0.25
# Interval at which a rank checks whether it waits in a call: MIN_POLL_SECONDS, or POLL_FRACTION of
# the timeout if that is longer.
MIN_POLL_SECONDS = 0.1
POLL_FRACTION = 0.1
# A rank whose message fails after this fraction of the timeout counts as timed out: the timeouts of
# the ranks start at different times, and the first rank that times out closes its connections.
TIMED_OUT_FRACTION = 0.9
# Pause between two reads of the reports, because all ranks read the same store.
READ_INTERVAL_SECONDS = 0.05
# The key of the report of a rank that knows the cause.
CAUSE_KEY = "report/cause"


@dataclass
class Operation:
    """The call that a group runs, with the details that reports contain."""

    #: The number of calls so far, including this one.
    number: int = 0
    #: The most recent calls, packed; the last one is this call.
    calls: Sequence[bytes] = ()
    #: The ranks that send and receive messages in this call.
    participants: Sequence[int] = ()
    #: True if the ranks compare their calls before data moves.
    compares_calls: bool = False
    #: This rank's lengths in an all-to-all, otherwise None.
    lengths: Lengths | None = None
    #: The time at which this rank made the call, a value of time.monotonic.
    start_time: float = field(default_factory=time.monotonic)


class FailureDetector:
    """The part of failure detection that runs on one rank of a group.

    It finds the cause of a failed call, and leaves the group so that the other ranks notice.

    Args:
        topology: the hosts of the group, and the memory that this rank shares with other ranks.
        point_to_point: the connections for messages between ranks.
        gloo: the connections of gloo's own collectives.
        deadline: the time by which the group must be set up, a value of time.monotonic.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        topology: Topology,
        point_to_point: PointToPoint,
        gloo: GlooGroups,
        *,
        deadline: float,
    ) -> None:
        #: The error after which the group can no longer be used, or None.
        self.group_error: RankLost | None = None
        # A separate connection is used: a thread that waits in the store would delay the reports.
        seconds = max(0.0, deadline - time.monotonic()) + STORE_SECONDS
        self._store = query_store(seconds, lambda: clone_store(store))
        self._rank = rank
        self._world_size = world_size
        # The time of the store's last answer, a value of time.monotonic.
        self._last_answer = 0.0
        self._arena = topology.arena
        self._is_single_host = topology.is_single_host
        self._point_to_point = point_to_point
        self._gloo = gloo

    def explain(self, error: BaseException, operation: Operation, timeout: float) -> BaseException:
        """Return the error to raise for a call that failed with `error` on this rank.

        Leave the group unless it can still be used, which is the case after some mismatches.
        `timeout` is the timeout of the call in seconds.
        """
        if isinstance(error, Mismatch):
            # If only the ranks of this host have compared the call, the other hosts still wait.
            if not (self._is_single_host or operation.compares_calls):
                self.leave_group_with_reason(error, operation)
            return error
        if isinstance(error, PeerError):
            cause = self._find_cause(error, operation, timeout)
            self.leave_group_with_reason(cause, operation)
            return cause
        if isinstance(error, RankLost):
            cause = self._find_reported_mismatch() or error
            self.leave_group_with_reason(cause, operation)
            return cause
        failed = RankLost([self._rank], f"rank {self._rank} failed: {error!r}")
        self.leave_group_with_reason(failed, operation)
        return error

    def leave_group_with_reason(self, reason: RankLost | Mismatch, operation: Operation) -> None:
        """Leave the group and publish the reason to the other ranks."""
        self.group_error = RankLost(reason.ranks, str(reason))
        if not self._is_single_host:
            if isinstance(reason, Mismatch):
                self._publish_report(
                    operation, Status.MISMATCH, blamed=reason.ranks, difference=str(reason)
                )
            else:
                status = Status.RANK_LOST if reason.ranks else Status.FAILED
                self._publish_report(operation, status, blamed=reason.ranks)
        self._close_connections()
        # Leave the arena last: a rank that notices this reads the reason from the report.
        if self._arena is not None:
            self._arena.leave(reason.ranks)

    def announce_end(self, operation: Operation) -> None:
        """Publish that `operation` was this rank's last call, and close its connections."""
        if self._arena is not None:
            self._arena.announce_end()
        if not self._is_single_host:
            self._publish_report(operation, Status.LEFT)
        self._close_connections()

    def publish_waiting(self, operation: Operation | None) -> None:
        """Publish that this rank waits in `operation`, and the rank that it waits for.

        If `operation` is None, clear this rank's entry.
        """
        text = ""
        if operation is not None:
            peer = self._point_to_point.waits_for
            if peer is None and self._arena is not None:
                peer = next(iter(self._arena.list_late_ranks()), None)
            text = self._make_report(operation, Status.WAITING, waits_for=peer).to_json()
        with suppress(TimeoutError, RuntimeError):
            run_within(STORE_SECONDS, lambda: self._store.set(f"waiting/{self._rank}", text))

    def _make_report(self, operation: Operation, status: Status, **fields: Any) -> Report:
        lengths = operation.lengths
        return Report(
            rank=self._rank,
            status=status,
            call_number=operation.number,
            # Copy the calls, because another thread may append to them meanwhile.
            calls=[call.hex() for call in tuple(operation.calls)],
            lengths=(lengths.sends, lengths.receives) if lengths else None,
            **fields,
        )

    def _publish_report(self, operation: Operation, status: Status, **fields: Any) -> None:
        """Publish this rank's report."""
        report = self._make_report(
            operation, status, disconnected=self._point_to_point.find_disconnected_peers(), **fields
        )
        text = report.to_json()

        def publish() -> None:
            self._store.set(f"report/{self._rank}", text)
            if report.blamed:
                self._store.set(CAUSE_KEY, text)

        with suppress(TimeoutError, RuntimeError):
            run_within(STORE_SECONDS, publish)

    def _close_connections(self) -> None:
        """Close this rank's connections, so that ranks that wait for its messages fail at once."""
        self._point_to_point.close_connections()
        self._gloo.close_connections()

    def _read_report(self, key: str) -> Report | None:
        """Return the report under a key of the store, or None."""
        text = self._store.get(key) if self._store.check([key]) else b""
        self._last_answer = time.monotonic()
        return Report.from_json(text) if text else None

    def _read_missing(self, key: str, reports: dict[int, Report]) -> dict[int, Report]:
        """Return the reports under `key/rank` of the ranks that are not in `reports`."""
        missing = {}
        for rank in set(range(self._world_size)) - reports.keys():
            report = self._read_report(f"{key}/{rank}")
            if report is not None:
                missing[rank] = report
        return missing

    def _collect_reports(
        self, participants: Collection[int], deadline: float, call_number: int
    ) -> tuple[dict[int, Report], dict[int, Report]]:
        """Return the reports of ranks that left or failed, and of ranks that still wait, by rank.

        Collection ends at the first of these events:
        - a rank has reported the cause, and its report is returned alone;
        - a rank has left before call `call_number`;
        - all `participants` have reported;
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
                    list_ranks_that_left(reports, call_number)
                    or reports.keys() >= set(participants)
                    or (now > min_deadline and list_disconnected_ranks(reports))
                    or now > deadline
                ):
                    return reports, self._read_missing("waiting", reports)
                time.sleep(READ_INTERVAL_SECONDS)

        return query_store(STORE_SECONDS, collect, lambda: self._last_answer)

    def _find_reported_mismatch(self) -> Mismatch | None:
        """Return the mismatch that a rank of another host has reported, or None."""
        if self._is_single_host:
            return None
        with suppress(RankLost):
            report = query_store(STORE_SECONDS, lambda: self._read_report(CAUSE_KEY))
            if report is not None and report.status is Status.MISMATCH:
                return Mismatch(report.difference, report.blamed)
        return None

    def _find_cause(
        self, error: PeerError, operation: Operation, timeout: float
    ) -> RankLost | Mismatch:
        """Return the error for dead ranks of this host, or for the ranks that the reports blame."""
        number = operation.number
        dead = [] if self._arena is None else self._arena.list_dead_ranks()
        if dead:
            return RankLost(dead, f"{format_ranks(dead)} died (call {number}); {UNUSABLE}")
        # A rank may also wait for a peer of its host that takes no part in the messages.
        participants = set(operation.participants)
        if error.peer is not None:
            participants.add(error.peer)
        waited = time.monotonic() - operation.start_time
        status = Status.TIMED_OUT if waited > TIMED_OUT_FRACTION * timeout else Status.FAILED
        if status is Status.FAILED:
            # gloo notices the closed connections of a dead rank one after another. The report must
            # contain all of them, because this rank closes its other connections afterwards.
            time.sleep(DISCONNECT_SECONDS)
        self._publish_report(operation, status, waits_for=error.peer)
        self._close_connections()
        context = f"messages failed in call {number}: {error}; {UNUSABLE}"
        try:
            reports, waiting = self._collect_reports(
                participants, operation.start_time + timeout, number
            )
        except RankLost as store_error:
            return RankLost(store_error.ranks, f"{store_error}; {context}")
        attribution = attribute_failure(
            reports,
            waiting,
            call_number=number,
            # The peer differs between ranks, but all ranks must blame the same ranks.
            participants=operation.participants,
            world_size=self._world_size,
        )
        return _make_error(attribution, context, timeout)


def _make_error(attribution: Attribution, context: str, timeout: float) -> RankLost | Mismatch:
    """Return the error that reports an attribution to the caller."""
    ranks = attribution.ranks
    if attribution.cause is Cause.REPORTED_MISMATCH:
        return Mismatch(attribution.difference, ranks)
    if attribution.cause is Cause.MISMATCH:
        return Mismatch(f"{attribution.difference}; {UNUSABLE}", ranks)
    named = format_ranks(ranks)
    messages = {
        Cause.REPORTED_LOSS: f"rank {attribution.reporter} reported the loss of {named}",
        Cause.LEFT: f"{named} {LEFT_GROUP}",
        Cause.DISCONNECTED: f"the connections of {named} have ended",
        Cause.SILENT: f"{named} did not respond within the timeout of {timeout:g} s",
        Cause.UNKNOWN: "a connection failed although every rank still responds",
    }
    return RankLost(ranks, f"{messages[attribution.cause]}: {context}")

"""The rules that decide from the ranks' reports which ranks caused a failed call."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from collectives.errors import Mismatch
from collectives.shared_memory.fingerprint import Lengths, compare, compare_lengths

# Note [Attribution of a failure]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Each rank that still runs publishes a report when its call fails (see `failure_detection.py`). A
# rank that waits for a long time publishes a WAITING report before that. Every rank applies the
# rules below to the same reports, and the first rule that matches decides. "Reported" means a
# report of a failed call; "silent" means no report at all.
#
#   what the reports show                                          cause                ranks
#   1. a rank knows that calls differ (MISMATCH)                   REPORTED_MISMATCH    as reported
#   2. a rank knows which ranks are lost (RANK_LOST)               REPORTED_LOSS        as reported
#   3. ranks left before this call (LEFT)                          LEFT                 these ranks
#   4. the last call that all ranks have made, or its lengths,     MISMATCH             deviating
#      differ
#   5. connections to ranks that have not reported are closed      DISCONNECTED         these ranks
#   6. needed ranks are silent                                     SILENT               these ranks
#   7. an earlier call that all ranks remember differs             MISMATCH             deviating
#   8. participants have not reported                              SILENT               these ranks
#   9. otherwise                                                   UNKNOWN              none
#
# - A participant takes part in the failed call. A needed rank is a participant, or a rank that any
#   report waits for.
# - Rule 4 comes before rule 5, because a rank that has not reported may have completed this call.
#   It also compares the calls of ranks that wait, unless rule 5 matches.
# - A wait that times out closes connections too. If a rank has timed out and a needed rank is
#   silent, rule 5 excludes the ranks that wait, because they are about to report.
# - Rule 6 does not blame a rank that waits, because that rank itself waits for the lost rank. If no
#   needed rank is silent, rule 8 blames the participants that had the whole timeout to report.
# - Calls with empty tensors send no messages, so ranks can complete different calls. From then on
#   equal calls have different numbers, and only rule 7 finds the rank that deviated. It comes after
#   the rules for lost ranks, because such a difference may be harmless.
# - If every participant has reported, both ends of a failed connection run, and each of them knows
#   only that the other end failed. Rule 9 therefore blames none of them.


class Status(Enum):
    """The state of a rank when it wrote its report."""

    #: The rank waits in a call.
    WAITING = "waiting"
    #: A message of the rank failed, for a reason that the rank does not know.
    FAILED = "failed"
    #: The rank waited until the timeout.
    TIMED_OUT = "timed out"
    #: The rank knows which ranks are lost.
    RANK_LOST = "rank lost"
    #: The rank knows that ranks made different calls.
    MISMATCH = "mismatch"
    #: The rank left the group without an error after its last call.
    LEFT = "left"


@dataclass(frozen=True)
class Report:
    """One rank's view of a call that waits or failed, or of its last call before it left."""

    rank: int
    status: Status
    #: The number of calls that the rank has made, including the failed one.
    call_number: int = 0
    #: The most recent calls, packed and in hexadecimal, in the order in which they were made.
    calls: Sequence[str] = ()
    #: Elements that the rank sends to, and expects from, each rank of an all-to-all.
    lengths: tuple[list[int], list[int]] | None = None
    #: The rank whose message this rank waits for, if known.
    waits_for: int | None = None
    #: Ranks whose connections to this rank are closed.
    disconnected: Sequence[int] = ()
    #: Ranks that this rank knows to be the cause.
    blamed: Sequence[int] = ()
    #: The difference between the calls, for `Status.MISMATCH`.
    difference: str = ""

    def get_call(self, number: int) -> bytes:
        """Return the packed call with this number, or b"" if it is too old or not made yet."""
        age = self.call_number - number
        return bytes.fromhex(self.calls[-1 - age]) if 0 <= age < len(self.calls) else b""

    def to_json(self) -> str:
        """Return the report as text for the store."""
        return json.dumps(asdict(self) | {"status": self.status.value})

    @staticmethod
    def from_json(text: str | bytes) -> "Report":
        """Return the report that `to_json` wrote."""
        fields = json.loads(text)
        return Report(**(fields | {"status": Status(fields["status"])}))


class Cause(Enum):
    """The reason for a failed call: see Note [Attribution of a failure]."""

    REPORTED_MISMATCH = "reported mismatch"
    REPORTED_LOSS = "reported loss"
    LEFT = "left"
    MISMATCH = "mismatch"
    DISCONNECTED = "disconnected"
    SILENT = "silent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Attribution:
    """The cause of a failed call and the ranks that are blamed for it."""

    cause: Cause
    ranks: Sequence[int] = ()
    #: The rank whose report states the cause, or None.
    reporter: int | None = None
    #: The difference between the calls, if they differ.
    difference: str = ""


def attribute_failure(
    reports: Mapping[int, Report],
    waiting: Mapping[int, Report],
    *,
    call_number: int,
    participants: Collection[int],
    world_size: int,
) -> Attribution:
    """Return the cause of a failed call and the blamed ranks: see Note [Attribution of a failure].

    Args:
        reports: the reports of ranks whose call has failed, by rank.
        waiting: the reports of ranks that wait and have not failed yet, by rank.
        call_number: the number of the failed call.
    """
    # Ties are decided by the order of reports, but ranks read the reports in different orders.
    reports = dict(sorted(reports.items()))
    reported = _find_reported_cause(reports, call_number)
    if reported is not None:
        return reported
    alive = dict(sorted({**reports, **waiting}.items()))
    waited_for = {report.waits_for for report in alive.values() if report.waits_for is not None}
    silent = waited_for.union(participants) - alive.keys()
    disconnected = list_disconnected_ranks(reports)
    if silent and any(report.status is Status.TIMED_OUT for report in reports.values()):
        disconnected = [rank for rank in disconnected if rank not in waiting]
    difference = _find_difference(reports if disconnected else alive, world_size)
    if difference is not None:
        return Attribution(Cause.MISMATCH, difference.ranks, difference=str(difference))
    if disconnected:
        return Attribution(Cause.DISCONNECTED, disconnected)
    if silent:
        return Attribution(Cause.SILENT, sorted(silent))
    difference = _find_earlier_difference(alive)
    if difference is not None:
        return Attribution(Cause.MISMATCH, difference.ranks, difference=str(difference))
    unreported = sorted(set(participants) - reports.keys())
    if unreported:
        return Attribution(Cause.SILENT, unreported)
    return Attribution(Cause.UNKNOWN)


def list_disconnected_ranks(reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks whose connections are closed and that have no report.

    Ranks with a report are excluded, because a rank closes its connections after reporting.
    """
    ranks = {rank for report in reports.values() for rank in report.disconnected}
    return sorted(ranks - reports.keys())


def list_ranks_that_left(reports: Mapping[int, Report], call_number: int) -> list[int]:
    """Return the ranks that left the group without an error before the call with this number."""
    return sorted(
        rank
        for rank, report in reports.items()
        if report.status is Status.LEFT and report.call_number < call_number
    )


def _find_reported_cause(reports: Mapping[int, Report], call_number: int) -> Attribution | None:
    """Return the cause that a rank already knows (rules 1 to 3), or None."""
    causes = {Status.MISMATCH: Cause.REPORTED_MISMATCH, Status.RANK_LOST: Cause.REPORTED_LOSS}
    for status, cause in causes.items():
        for rank, report in reports.items():
            if report.status is status:
                return Attribution(cause, report.blamed, rank, report.difference)
    left = list_ranks_that_left(reports, call_number)
    return Attribution(Cause.LEFT, left) if left else None


def _find_difference(reports: Mapping[int, Report], world_size: int) -> Mismatch | None:
    """Return the difference between the ranks' calls, or None if they made the same call.

    A rank that completed a call may already be in a later one. The ranks are therefore compared at
    the last call that all of them have made.
    """
    number = min((report.call_number for report in reports.values()), default=0)
    lengths = {
        rank: Lengths(*report.lengths)
        for rank, report in reports.items()
        if report.lengths and report.call_number == number
    }
    try:
        _compare_calls(reports, number)
        compare_lengths(lengths, range(world_size))
    except Mismatch as difference:
        return difference
    return None


def _find_earlier_difference(reports: Mapping[int, Report]) -> Mismatch | None:
    """Return the first difference before the last call that all ranks have made, or None."""
    newest = min((report.call_number for report in reports.values()), default=0)
    oldest = max((r.call_number - len(r.calls) + 1 for r in reports.values()), default=newest)
    for number in range(oldest, newest):
        try:
            _compare_calls(reports, number)
        except Mismatch as difference:
            return difference
    return None


def _compare_calls(reports: Mapping[int, Report], number: int) -> None:
    """Raise Mismatch if the ranks that remember the call with this number made different calls."""
    calls = {rank: report.get_call(number) for rank, report in reports.items()}
    remembered = {rank: call for rank, call in calls.items() if call}
    if remembered:
        compare(list(remembered.values()), list(remembered))

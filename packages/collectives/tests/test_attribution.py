"""The ranks that are blamed for a failed call, as a function of the ranks' reports."""

from types import SimpleNamespace

import pytest
import torch
from collectives.attribution import Attribution, Cause, Report, Status, attribute_failure
from collectives.errors import PeerError
from collectives.failure_detection import FailureDetector, Operation, _make_error
from collectives.shared_memory.fingerprint import Call

CALL_NUMBER = 7
WORLD = 4
SUM = Call("all_reduce", (1000,), torch.float32, "SUM").packed.hex()
MAX = Call("all_reduce", (1000,), torch.float32, "MAX").packed.hex()
BROADCAST = Call("broadcast", (1000,), torch.float32).packed.hex()


def report(rank, status=Status.FAILED, **fields):
    """Return the report of a rank whose last call is an all-reduce with SUM."""
    return Report(rank, status, **({"call_number": CALL_NUMBER, "calls": [SUM]} | fields))


def report_waiting(rank, **fields):
    return report(rank, Status.WAITING, **fields)


# The reports of failed ranks, those of waiting ranks, the cause and the ranks.
CASES = {
    "a rank knows that calls differ": (
        [report(0), report(1, Status.MISMATCH, blamed=[2], difference="shapes")],
        [],
        (Cause.REPORTED_MISMATCH, [2]),
    ),
    "a rank knows that calls differ and another one which rank is lost": (
        [
            report(0, Status.RANK_LOST, blamed=[3]),
            report(1, Status.MISMATCH, blamed=[2], difference="x"),
        ],
        [],
        (Cause.REPORTED_MISMATCH, [2]),
    ),
    "two ranks differ from two ranks": (
        [report(0), report(1, calls=[MAX]), report(2), report(3, calls=[MAX])],
        [],
        (Cause.MISMATCH, [1, 3]),
    ),
    "a rank knows which rank is lost": (
        [report(0), report(1, Status.RANK_LOST, blamed=[3])],
        [],
        (Cause.REPORTED_LOSS, [3]),
    ),
    "a rank left before this call": (
        [report(0), report(1, Status.LEFT, call_number=CALL_NUMBER - 1)],
        [],
        (Cause.LEFT, [1]),
    ),
    "a rank that left after this call is not blamed": (
        [report(0, disconnected=[3]), report(1, Status.LEFT), report(2)],
        [],
        (Cause.DISCONNECTED, [3]),
    ),
    "the op of one rank differs": (
        [report(0), report(1, calls=[MAX]), report(2), report(3)],
        [],
        (Cause.MISMATCH, [1]),
    ),
    "a rank that completed the call is compared at the earlier call": (
        [
            report(0),
            report(1, calls=[BROADCAST]),
            report(2),
            report(3, call_number=CALL_NUMBER + 1, calls=[SUM, BROADCAST]),
        ],
        [],
        (Cause.MISMATCH, [1]),
    ),
    "a rank that made another call and waits in it is compared too": (
        [report(0), report(2), report(3)],
        [report_waiting(1, calls=[MAX])],
        (Cause.MISMATCH, [1]),
    ),
    "lengths of an all-to-all differ": (
        [
            report(0, lengths=([0, 3, 0, 0], [0, 0, 0, 0])),
            report(1, lengths=([0, 0, 0, 0], [2, 0, 0, 0])),
            report(2),
            report(3),
        ],
        [],
        (Cause.MISMATCH, [0, 1]),
    ),
    "connections to one rank are closed": (
        [report(0, disconnected=[2]), report(1, disconnected=[2]), report(3)],
        [],
        (Cause.DISCONNECTED, [2]),
    ),
    "connections to a rank that reported are not evidence": (
        [report(0, disconnected=[1, 2]), report(1, disconnected=[2]), report(3)],
        [],
        (Cause.DISCONNECTED, [2]),
    ),
    "a wait that timed out closed the connections of a rank that waits": (
        [report(0, Status.TIMED_OUT, disconnected=[1], waits_for=1)],
        [report_waiting(1, waits_for=2), report_waiting(3, waits_for=2)],
        (Cause.SILENT, [2]),
    ),
    "a silent rank is blamed, not the rank that waits for it": (
        [report(0, Status.TIMED_OUT, waits_for=1), report(3, Status.TIMED_OUT)],
        [report_waiting(1, waits_for=2)],
        (Cause.SILENT, [2]),
    ),
    "a rank that takes no part in the call, but is waited for, is blamed": (
        [report(rank, Status.TIMED_OUT) for rank in range(3)] + [report(3, waits_for=4)],
        [],
        (Cause.SILENT, [4]),
    ),
    "a rank that takes no part in the call, is waited for and waits is not blamed": (
        [report(rank, Status.TIMED_OUT) for rank in range(3)] + [report(3, waits_for=4)],
        [report_waiting(4)],
        (Cause.UNKNOWN, []),
    ),
    "ranks that still wait at the end are blamed if nobody is silent": (
        [report(0), report(1), report(2)],
        [report_waiting(3)],
        (Cause.SILENT, [3]),
    ),
    "a rank completed another call, whose tensors were empty": (
        [report(rank, calls=[BROADCAST, SUM]) for rank in range(3)],
        [report_waiting(3, calls=[MAX, SUM])],
        (Cause.MISMATCH, [3]),
    ),
    "an earlier difference is not blamed for a silent rank": (
        [report(0, calls=[BROADCAST, SUM]), report(2, calls=[MAX, SUM])],
        [report_waiting(3, calls=[MAX, SUM])],
        (Cause.SILENT, [1]),
    ),
    "an earlier difference is not blamed for a lost rank": (
        [report(0, disconnected=[1], calls=[BROADCAST, SUM]), report(2, calls=[MAX, SUM])],
        [],
        (Cause.DISCONNECTED, [1]),
    ),
    "every rank reports, and the ranks wait for different peers": (
        [report(rank, waits_for=(rank + 1) % WORLD) for rank in range(WORLD)],
        [],
        (Cause.UNKNOWN, []),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "_") for name in CASES])
def test_cause_and_blamed_ranks_follow_from_reports(case):
    failed, waits, (cause, ranks) = CASES[case]
    # Ranks read the same reports in different orders.
    for order in (1, -1):
        attribution = attribute_failure(
            {r.rank: r for r in failed[::order]},
            {r.rank: r for r in waits[::order]},
            call_number=CALL_NUMBER,
            participants=range(WORLD),
            world_size=WORLD,
        )
        assert (attribution.cause, list(attribution.ranks)) == (cause, ranks)
        assert bool(attribution.difference) == (cause in (Cause.MISMATCH, Cause.REPORTED_MISMATCH))


def test_every_cause_has_a_case():
    assert {cause for *_, (cause, _) in CASES.values()} == set(Cause)


@pytest.mark.parametrize("status", Status)
def test_report_survives_the_store(status):
    sent = report(
        2,
        status,
        lengths=([1, 2], [3, 4]),
        waits_for=1,
        disconnected=[0],
        blamed=[3],
        difference="shapes",
    )
    received = Report.from_json(sent.to_json())
    assert received.to_json() == sent.to_json()
    assert received.status is status
    assert received.get_call(CALL_NUMBER) == bytes.fromhex(SUM)
    assert received.get_call(CALL_NUMBER - 1) == b""


def test_errors_name_every_rank_that_left_or_died():
    left = _make_error(Attribution(Cause.LEFT, [1, 2]), "context", 1.0)
    assert "ranks 1, 2 called destroy_process_group and left the group: context" in str(left)
    detector = FailureDetector.__new__(FailureDetector)
    detector._arena = SimpleNamespace(list_dead_ranks=lambda: [4, 5])
    lost = detector._find_cause(PeerError(4, "closed"), Operation(), 1.0)
    assert lost.ranks == (4, 5)
    assert "ranks 4, 5 died" in str(lost)


def test_report_has_no_call_that_is_too_old_or_not_made_yet():
    calls = [SUM, b"second".hex(), b"third".hex()]
    latest = report(0, Status.WAITING, call_number=9, calls=calls)
    expected = [b"", bytes.fromhex(SUM), b"second", b"third", b"", b""]
    assert [latest.get_call(number) for number in range(6, 12)] == expected

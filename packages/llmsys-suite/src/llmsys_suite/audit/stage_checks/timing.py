"""Checks of interleaved timings against a second clock, numpy's medians and the audit's rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.peers import read_synchronized_time
from llmsys_suite.audit.tolerances import BAND, MAX_RETIMING_S, SHORTEST_BAND
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.ranks.rank import Run

#: Seconds by call and round.
Rounds = dict[str, list[float]]
#: Number of rounds in which the audit times the contenders of a stage.
ROUNDS = 15
#: Number of rounds in which the stages `attention` and `compress` time their contenders.
STAGE_ROUNDS = 7


def check_totals(interleaved: Interleaved, medians_ms: dict[str, float]) -> Iterator[Check]:
    """Check the number of rounds, the sum of their times by a second clock, and the medians."""
    rounds = interleaved.seconds
    counts = [(STAGE_ROUNDS, len(seconds), name) for name, seconds in rounds.items()]
    yield Sources("timings", "the definition of the stage").check_all_equal("rounds", counts)
    clocked = interleaved.clocked_s
    total = sum(map(sum, rounds.values()))
    yield Sources("their sum", "another clock").check_between(
        "time of all rounds", clocked, total, 0.8 * clocked, 1.001 * clocked
    )
    reported = [(1e3 * float(np.median(rounds[n])), ms, n) for n, ms in medians_ms.items()]
    if reported:
        medians = Sources("medians in ms", "numpy's, of the rounds")
        yield medians.check_all_equal("reported times", reported, 1e-9)


def check_speedups(interleaved: Interleaved, peer: str, reported: dict[str, float]) -> Check:
    """Check each reported speedup over the peer.

    A speedup is the reciprocal of a median over rounds: that of the contender's time divided by the
    peer's time.
    """
    peers = np.array(interleaved.seconds[peer])
    triples = [
        (1 / float(np.median(np.array(interleaved.seconds[name]) / peers)), value, name)
        for name, value in reported.items()
    ]
    rounds = Sources("pairs of one round", "numpy's medians")
    return rounds.check_all_equal("reported ratios", triples, 1e-9)


def check_against_rounds(
    run: Run,
    calls: Mapping[str, Callable[[], object]],
    compare: Callable[[Rounds], Iterable[Check]],
    rounds: int = ROUNDS,
) -> list[Check]:
    """Time the calls in interleaved rounds, and return the checks of these times by `compare`.

    If a check fails, another program may have disturbed the rounds. Further rounds then follow
    until all checks pass or `MAX_RETIMING_S` seconds have passed.
    """
    stop_time = time.monotonic() + MAX_RETIMING_S
    timed = time_rounds(run, calls, rounds)
    checks = list(compare(timed))
    while not all(check.passed for check in checks) and time.monotonic() < stop_time:
        for name, seconds in time_rounds(run, calls, rounds).items():
            timed[name] += seconds
        checks = list(compare(timed))
    return checks


def time_rounds(
    run: Run, calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> Rounds:
    """Return the seconds of each call in each round. Every round runs each call once."""
    seconds: Rounds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start_time = read_synchronized_time(run)
            call()
            seconds[name].append(read_synchronized_time(run) - start_time)
    return seconds


def check_shortest(interleaved: Interleaved, timed: Rounds) -> Iterator[Check]:
    """Check that no contender's shortest time is much shorter than in the audit's own rounds.

    `SHORTEST_BAND` is the allowed factor. A longer time is allowed, because other programs may have
    disturbed the stage's rounds.
    """
    both = Sources("rounds of the stage", "the audit's own timing")
    for name, rounds in interleaved.seconds.items():
        expected = min(timed[name])
        low = expected / SHORTEST_BAND
        yield both.check_between(f"{name}: shortest time", expected, min(rounds), low, math.inf)


def check_ratios(interleaved: Interleaved, peer: str, timed: Rounds) -> Iterator[Check]:
    """Compare the stage's time ratios to `peer` with the ratios of the audit's own rounds.

    On a busy machine the ratio varies between rounds. The audit's median must therefore lie
    between the smallest ratio of the stage divided by `BAND` and its largest ratio times `BAND`.
    """
    peers = np.array(interleaved.seconds[peer])
    audits = Sources("the audit's own timing", "rounds of the stage")
    for name, rounds in interleaved.seconds.items():
        if name != peer:
            by_round = np.array(rounds) / peers
            yield audits.check_between(
                f"{name}: time over that of {peer}",
                float(np.median(by_round)),
                float(np.median(np.array(timed[name]) / timed[peer])),
                float(by_round.min()) / BAND,
                float(by_round.max()) * BAND,
            )

"""Checks of interleaved timings: sums by another clock, medians and ratios recomputed by numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.peers import median_ratio
from llmsys_suite.audit.tolerances import BAND, SHORTEST_BAND
from llmsys_suite.measure.interleaved import Interleaved


def totals(interleaved: Interleaved, medians_ms: dict[str, float]) -> Iterator[Check]:
    """Compare the sum of all timings with another clock, and reported medians with the timings."""
    rounds = interleaved.seconds
    clocked = interleaved.clocked_s
    total = sum(map(sum, rounds.values()))
    yield Sources("their sum", "another clock").between(
        "time of all rounds", clocked, total, 0.8 * clocked, 1.001 * clocked
    )
    pairs = [(1e3 * float(np.median(rounds[n])), ms, n) for n, ms in medians_ms.items()]
    if pairs:
        medians = Sources("medians in ms", "numpy's, of the rounds")
        yield medians.all_equal("reported times", pairs, 1e-9)


def speedups(interleaved: Interleaved, peer: str, reported: dict[str, float]) -> Check:
    """Recompute the median over rounds of the peer's time divided by each contender's time."""
    peers = np.array(interleaved.seconds[peer])
    triples = [
        (1 / float(np.median(np.array(interleaved.seconds[name]) / peers)), value, name)
        for name, value in reported.items()
    ]
    rounds = Sources("pairs of one round", "numpy's medians")
    return rounds.all_equal("reported ratios", triples, 1e-9)


def shortest(interleaved: Interleaved, name: str, seconds: dict[str, list[float]]) -> Check:
    """Compare the shortest round of one contender with the shortest of the audit's own rounds."""
    timed = Sources("rounds of the stage", "the audit's own timing")
    return timed.within(
        f"{name}: shortest time", min(seconds[name]), min(interleaved.seconds[name]), SHORTEST_BAND
    )


def timed_again(
    interleaved: Interleaved, peer: str, seconds: dict[str, list[float]]
) -> Iterator[Check]:
    """Compare the ratios to `peer` with those of the audit's own rounds.

    On a busy machine the ratio of one round differs from that of the next. The audit's median must
    lie between the smallest and the largest ratio of the stage, or within a factor of `BAND` of
    them.
    """
    peers = np.array(interleaved.seconds[peer])
    timed = Sources("the audit's own timing", "rounds of the stage")
    for name, rounds in interleaved.seconds.items():
        if name != peer:
            ratios = np.array(rounds) / peers
            yield timed.between(
                f"{name}: time over that of {peer}",
                float(np.median(ratios)),
                median_ratio(seconds[name], seconds[peer]),
                float(ratios.min()) / BAND,
                float(ratios.max()) * BAND,
            )

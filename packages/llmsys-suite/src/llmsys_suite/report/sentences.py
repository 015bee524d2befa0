"""Sentences that compare the time of one contender with its peer's, if the rounds suffice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr

from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.measure.samples import PEER, SINGLE
from llmsys_suite.report.compare import LEAST_ROUNDS, compute_round_ratios, has_enough_rounds
from llmsys_suite.results import Plan


def compute_median_interval(
    ratios: Sequence[float], num_variants: int = 1
) -> tuple[float, float, float]:
    """Return the median of positive ratios and its 95 % interval from order statistics.

    The interval is (0, inf) if there are too few ratios. It is corrected for the choice of the best
    of `num_variants` variants.
    """
    ordered = sorted(ratios)
    n = len(ordered)
    # The number of ratios below the true median has a binomial distribution.
    left_out = int((bdtr(np.arange(n), n, 0.5) <= 0.025 / num_variants).sum())
    low, high = (ordered[left_out - 1], ordered[-left_out]) if left_out else (0.0, math.inf)
    return statistics.median(ratios), float(low), float(high)


def compare_times(name: str, peer: str, ratios: Sequence[float], num_variants: int = 1) -> str:
    """Return a sentence on the ratios of the times of `name` to those of `peer`, by round."""
    middle, low, high = compute_median_interval(ratios, num_variants)
    if not math.isfinite(high):
        return f"Cannot tell {name} from {peer} in {len(ratios)} rounds: {middle:.2f} of its time."
    sentence = f"{name} takes {middle:.2f} of {peer}'s time (95 % interval {low:.2f} to {high:.2f})"
    if low <= 1 <= high:
        return f"Cannot tell {name} from {peer}: {sentence}."
    return f"{sentence}: {'faster' if high < 1 else 'slower'}."


def compare_interleaved(interleaved: Interleaved, name: str, peer: str) -> str:
    """Return the sentence of `compare_times` for two contenders of interleaved timings."""
    pairs = zip(interleaved.seconds[name], interleaved.seconds[peer], strict=True)
    return compare_times(name, peer, [a / b for a, b in pairs])


def describe_fastest(folder: RunFolder) -> str:
    """Return a sentence on the fastest variant in the rounds that other programs did not disturb.

    The single process is not compared. The result is an empty string if no other variant was
    trained besides the peer. If the variants ran one after another, or too few rounds were
    undisturbed, the sentence states that the fastest variant is unknown.
    """
    plan = folder.results.get("plan")
    if isinstance(plan, Plan) and not plan.variants_fit_together:
        return (
            "Cannot tell which variant is the fastest: the variants do not fit in memory together "
            "and ran one after another, so a ratio divides times of different moments."
        )
    rounds = compute_round_ratios(folder.samples())
    rounds.pop(SINGLE, None)
    if not rounds:
        return ""
    decided = {
        name: pair for name, pair in rounds.items() if has_enough_rounds(len(pair[0]), pair[1])
    }
    if not decided:
        used, disturbed = max((len(logs), disturbed) for logs, disturbed in rounds.values())
        return (
            f"Cannot tell which variant is the fastest: {used} of {used + disturbed} rounds were "
            f"undisturbed by other programs; at least {LEAST_ROUNDS} and half of all are needed."
        )
    ratios = {name: [math.exp(log) for log in logs] for name, (logs, _) in decided.items()}
    best = min(ratios, key=lambda name: statistics.median(ratios[name]))
    return compare_times(best, PEER, ratios[best], len(ratios))

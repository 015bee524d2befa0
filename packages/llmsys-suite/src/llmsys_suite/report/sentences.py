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
from llmsys_suite.report.compare import has_enough_rounds, round_ratios
from llmsys_suite.results import Plan


def interval(values: Sequence[float], among: int = 1) -> tuple[float, float, float]:
    """Return the median and a 95 % interval from order statistics.

    The interval is unbounded if there are too few values. It is corrected for the choice of the
    best of `among` variants.
    """
    ordered, n = sorted(values), len(values)
    # The number of values below the true median has a binomial distribution.
    left_out = int((bdtr(np.arange(n), n, 0.5) <= 0.025 / among).sum())
    low, high = (ordered[left_out - 1], ordered[-left_out]) if left_out else (0.0, math.inf)
    return statistics.median(values), float(low), float(high)


def against(name: str, peer: str, ratios: Sequence[float], among: int = 1) -> str:
    """Return a sentence on the time of `name` over the time of `peer` in the same rounds."""
    middle, low, high = interval(ratios, among)
    if not math.isfinite(high):
        return f"Cannot tell {name} from {peer} in {len(ratios)} rounds: {middle:.2f} of its time."
    sentence = f"{name} takes {middle:.2f} of {peer}'s time (95 % interval {low:.2f} to {high:.2f})"
    if low <= 1 <= high:
        return f"Cannot tell {name} from {peer}: {sentence}."
    return f"{sentence}: {'faster' if high < 1 else 'slower'}."


def interleaved_against(interleaved: Interleaved, name: str, peer: str) -> str:
    """Return the sentence of `against` for two contenders of interleaved timings."""
    pairs = zip(interleaved.seconds[name], interleaved.seconds[peer], strict=True)
    return against(name, peer, [a / b for a, b in pairs])


def fastest(folder: RunFolder) -> str:
    """Return a sentence on the fastest variant, or an empty string if only one was trained.

    Like `llmsys compare`, it uses only rounds that other programs did not disturb. If the variants
    ran one after another, they have no rounds in common, and the sentence says so.
    """
    plan = folder.results.get("plan")
    if isinstance(plan, Plan) and not plan.variants_fit_together:
        return (
            "Cannot tell which variant is the fastest: they do not fit in memory together and ran "
            "one after another, so a ratio divides times of different moments."
        )
    rounds = {name: pair for name, pair in round_ratios(folder.samples()).items() if name != SINGLE}
    if not rounds:
        return ""
    decided = {
        name: pair for name, pair in rounds.items() if has_enough_rounds(len(pair[0]), pair[1])
    }
    if not decided:
        used, disturbed = max(((len(logs), lost) for logs, lost in rounds.values()))
        return (
            f"Cannot tell which variant is the fastest: {used} of {used + disturbed} rounds were "
            "not disturbed by other programs, which is too few."
        )
    ratios = {name: [math.exp(log) for log in logs] for name, (logs, _) in decided.items()}
    best = min(ratios, key=lambda name: statistics.median(ratios[name]))
    return against(best, PEER, ratios[best], len(ratios))

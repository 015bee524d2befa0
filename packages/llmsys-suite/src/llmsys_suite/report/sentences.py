"""Sentences that compare the time of one contender with its peer's, if the rounds suffice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.samples import PEER, SINGLE, percentiles
from llmsys_suite.report.compare import has_enough_rounds, round_ratios
from llmsys_suite.results import Plan


def against(name: str, peer: str, ratios: Sequence[float]) -> str:
    """Return a sentence on the time of `name` over the time of `peer` in the same rounds.

    It decides only if the 10th and the 90th percentile are on the same side of 1.
    """
    low, middle, high = percentiles(ratios)
    spread = f"80 % of rounds: {low:.2f} to {high:.2f}"
    sentence = f"{name} takes {middle:.2f} of {peer}'s time ({spread})"
    if low <= 1 <= high:
        return f"Cannot tell {name} from {peer}: {sentence}."
    return f"{sentence}: {'faster' if high < 1 else 'slower'}."


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
    return against(best, PEER, ratios[best])

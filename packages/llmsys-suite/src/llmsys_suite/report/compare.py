"""Comparison of two runs: which variants became faster or slower, if the samples suffice.

The README and docs/benchmarking.md describe the verdicts. Two runs of the same code differ in
memory layout, which changes the ratios of all rounds of a run alike (`STD_BETWEEN_RUNS`). This
difference is part of every interval, because more rounds do not average it out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import numpy as np
from scipy.special import stdtrit

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder, Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.samples import PEER, WHOLE_STEP
from llmsys_suite.report.comparability import require_comparable

Array = np.ndarray
#: For each variant, the log of its time over the peer's in each undisturbed round, and the number
#: of disturbed rounds.
Ratios = dict[str, tuple[Array, int]]
#: Number of resamples of the bootstrap.
RESAMPLES = 400
#: Fraction of the log ratios that is trimmed at each end before their mean. The mean of the middle
#: half is as robust as the median and more efficient.
TRIMMED = 0.25
#: A verdict needs at least this number and this fraction of undisturbed rounds.
LEAST_ROUNDS = 15
LEAST_FRACTION = 0.5
#: Observed standard deviation of the log ratios between runs of the same code. A cause is memory
#: layout. It changes all rounds of a run alike, so more rounds do not average the difference out.
STD_BETWEEN_RUNS = 0.007
#: Probability of a wrong verdict on any variant if the code is the same.
CHANCE = 0.03


@dataclass(frozen=True)
class Comparison:
    """One variant: its later time divided by its earlier time, both relative to the peer's.

    `low` and `high` bound the 95 % interval of `ratio`.
    """

    variant: str
    ratio: float
    low: float
    high: float
    #: Numbers of undisturbed and disturbed rounds of one run: the run with too few undisturbed
    #: rounds for a verdict, otherwise the run with fewer of them.
    rounds: int
    disturbed: int
    margin: float
    #: True if the interval that is corrected for the number of variants excludes 1.
    differs: bool = False

    @property
    def verdict(self) -> str:
        """The verdict: "slower", "faster", "same" or "cannot tell"."""
        if not has_enough_rounds(self.rounds, self.disturbed):
            return "cannot tell"
        if self.differs and self.ratio > 1 + self.margin / 2:
            return "slower"
        if self.differs and self.ratio < 1 / (1 + self.margin / 2):
            return "faster"
        is_inside = 1 / (1 + self.margin) < self.low and self.high < 1 + self.margin
        return "same" if is_inside else "cannot tell"

    def is_slower_by(self, percent: float) -> bool | None:
        """Return True if the time grew by more than `percent`, and False if it did not.

        The result is None unless the whole interval lies on one side of the limit, because a
        missing proof of a difference is not evidence that there is none. True also needs the
        verdict "slower", and False needs enough undisturbed rounds.
        """
        limit = 1 + percent / 100
        if self.low > limit and self.verdict == "slower":
            return True
        is_fast_enough = self.high <= limit and has_enough_rounds(self.rounds, self.disturbed)
        return False if is_fast_enough else None

    def __str__(self) -> str:
        total = self.rounds + self.disturbed
        if not total:
            line = f"{self.variant:>20}  not trained by both runs  {self.verdict}"
        elif math.isnan(self.ratio):
            line = f"{self.variant:>20}  {self.rounds} of {total} rounds usable  {self.verdict}"
        else:
            interval = f"{self.ratio:6.3f}x  [{self.low:.3f}, {self.high:.3f}]"
            line = f"{self.variant:>20}  {interval}  {self.verdict}"
        if self.verdict == "same":
            return f"{line} within {self.margin:.3g}"
        if self.disturbed > total * (1 - LEAST_FRACTION):
            return f"{line}: other programs used the cores in {self.disturbed} of {total} rounds"
        return line


def compare_runs(before: RunFolder, after: RunFolder, *, margin: float = 0.05) -> list[Comparison]:
    """Return one row per variant, except for the peer.

    Raises:
        UsageError: the runs cannot be compared (see `require_comparable`), or have no variant in
            common besides the peer.
    """
    require_comparable(before, after)
    old, new = (compute_round_ratios(folder.samples()) for folder in (before, after))
    return compare_ratios(old, new, margin=margin)


def compare_ratios(old: Ratios, new: Ratios, *, margin: float = 0.05) -> list[Comparison]:
    """Return one row per variant.

    A variant that is missing from a run has no rounds, so that its verdict is "cannot tell".
    Raises UsageError if no variant is in both runs.
    """
    if not old.keys() & new.keys():
        raise UsageError("no variant besides the peer was trained by both runs")
    random = np.random.default_rng(0)
    missing = np.array([]), 0
    names = list(old | new)
    return [
        _compare(name, old.get(name, missing), new.get(name, missing), margin, len(names), random)
        for name in names
    ]


def has_enough_rounds(rounds: int, disturbed: int) -> bool:
    """Return True if enough rounds were undisturbed to allow a verdict."""
    return rounds >= max(LEAST_ROUNDS, LEAST_FRACTION * (rounds + disturbed))


def compute_round_ratios(samples: list[Sample]) -> Ratios:
    """Return the log ratios and the number of disturbed rounds of each variant.

    Each undisturbed round has one log ratio, the mean over ranks.
    """
    steps: dict[str, dict[int, dict[int, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for s in samples:
        if s["stage"] == "train" and s["phase"] == WHOLE_STEP and not s["warmup"]:
            steps[s["variant"]][s["step"]][s["rank"]] = s
    # Consecutive steps of the peer are one round apart, so they delimit the CPU time of one round.
    fractions = others.compute_foreign_cpu_fractions(
        [s for ranks in steps[PEER].values() for s in ranks.values()]
    )
    ratios_by_variant = {}
    for name, rounds in steps.items():
        if name == PEER:
            continue
        ratios = []
        disturbed = 0
        for step, ours in rounds.items():
            peer = steps[PEER][step]
            pairs = [(s, peer[rank]) for rank, s in ours.items() if rank in peer]
            if others.find_disturbed_rounds(chain(*pairs), fractions):
                disturbed += 1
            elif pairs:
                logs = [math.log(s["seconds"] / p["seconds"]) for s, p in pairs]
                ratios.append(sum(logs) / len(logs))
        ratios_by_variant[name] = np.array(ratios), disturbed
    return ratios_by_variant


def _compare(
    name: str,
    before: tuple[Array, int],
    after: tuple[Array, int],
    margin: float,
    num_variants: int,
    random: np.random.Generator,
) -> Comparison:
    counts = [(len(logs), num_disturbed) for logs, num_disturbed in (before, after)]
    # A run without enough rounds decides, otherwise the run with fewer rounds.
    rounds, disturbed = min(counts, key=lambda pair: (has_enough_rounds(*pair), pair))
    if min(counts)[0] < 2:
        return Comparison(name, math.nan, 0.0, math.inf, rounds, disturbed, margin)
    log_ratio = float(_compute_trimmed_mean(after[0]) - _compute_trimmed_mean(before[0]))
    old_error, old_degrees = _estimate_error(before[0], random)
    new_error, new_degrees = _estimate_error(after[0], random)
    error = math.sqrt(old_error**2 + new_error**2 + 2 * STD_BETWEEN_RUNS**2)
    degrees = min(old_degrees, new_degrees)
    half = float(stdtrit(degrees, 0.975)) * error
    corrected = float(stdtrit(degrees, 1 - CHANCE / (2 * num_variants))) * error
    return Comparison(
        name,
        math.exp(log_ratio),
        math.exp(log_ratio - half),
        math.exp(log_ratio + half),
        rounds,
        disturbed,
        margin,
        abs(log_ratio) > corrected,
    )


def _estimate_error(logs: Array, random: np.random.Generator) -> tuple[float, float]:
    """Return the bootstrap standard error of the trimmed mean and its degrees of freedom.

    The autocorrelation r of the rounds, clipped to the quartiles, reduces the effective number of
    rounds to n (1 - r) / (1 + r).
    """
    n = len(logs)
    drawn = logs[random.integers(0, n, (RESAMPLES, n))]
    error = float(_compute_trimmed_mean(drawn).std())
    clipped = logs.clip(*np.quantile(logs, [0.25, 0.75]))
    clipped = clipped - clipped.mean()
    correlation = float(clipped[1:] @ clipped[:-1] / max(clipped @ clipped, 1e-300))
    # The estimate from n rounds is too low by about (1 + 4 r) / n and has a standard error of about
    # 1 / sqrt(n). Half of the standard error is added, so the interval is too wide if anything.
    correlation += (1 + 4 * max(correlation, 0.0)) / n + 0.5 / math.sqrt(n)
    correlation = min(max(correlation, 0.0), 0.9)
    effective = n * (1 - correlation) / (1 + correlation)
    return error * math.sqrt(n / effective), max(effective - 1, 1.0)


def _compute_trimmed_mean(logs: Array) -> Array:
    """Return the mean over the last axis without the fraction `TRIMMED` at each end."""
    n = logs.shape[-1]
    cut = int(TRIMMED * n)
    middle: Array = np.sort(logs, axis=-1)[..., cut : n - cut].mean(axis=-1)
    return middle

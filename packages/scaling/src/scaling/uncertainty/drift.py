"""What the law of the smaller runs gets wrong about the larger ones, and so this law about others.

Notable: resampled runs show the noise of runs, not that the law is not quite true. That shows where
the past is foretold: fit the runs below a cut, compare with all runs at the top. Errors that noise
explains add nothing; else their drift in each decade goes into every interval beyond the runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from scaling.law import Interval, Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs
from scaling.uncertainty.bootstrap import Bootstrap, Prediction

# Of the runs, by compute, what the cuts keep; and how many runs a cut has at the least: five
# constants and as many to be wrong about them.
SHARES, FEWEST_RUNS = (0.25, 0.35, 0.5, 0.65, 0.8), 12
# Mean square of errors over their deviations. Where the law holds, cuts of one set exceed it in one
# set of twenty.
SIGNIFICANT = 2.2


@dataclass(frozen=True)
class Cut:
    """The runs below a cut held against all runs, at their highest compute; errors are in logs."""

    compute: float
    runs: int
    decades: float
    size_error: float
    size_deviation: float
    """What the resamples of both fits explain of it."""
    loss_error: float
    """The median over the runs beyond the cut."""
    loss_deviation: float
    run_error: float
    """The 95 % quantile of |error| of a run beyond the cut, in units of what was to be expected
    with its noise: 1.96 where the law holds."""


@dataclass(frozen=True)
class Drift:
    """Standard deviations in logs, per decade beyond the runs; zero where noise explains all."""

    highest: float
    """FLOPs of the largest run: at or below it nothing is extrapolated."""
    cuts: tuple[Cut, ...]
    size: float
    loss: float
    run: float
    """How many times further than expected runs beyond the cuts fell; at least 1."""

    def widened(self, best: Optimum) -> Optimum:
        """An optimum whose intervals allow for the drift up to its compute."""
        each = {"parameters": self.size, "tokens": self.size, "loss": self.loss}
        spread = {k: each[k] * self.decades(best.compute) for k in best.intervals or {}}
        intervals = (best.intervals or {}).items()
        return replace(
            best, intervals={k: _widen(i, getattr(best, k), spread[k]) for k, i in intervals}
        )

    def of_a_run(self, mean: Prediction, compute: float, residuals: Array) -> Interval:
        """The interval of one more run: of the mean, the noise of a run, and the drift."""
        level = mean.interval.level
        widened = _widen(mean.interval, mean.loss, run_noise(residuals, level))
        if not self.decades(compute):
            return widened
        return _widen(widened, mean.loss, self.loss * self.decades(compute), self.run)

    def decades(self, compute: float) -> float:
        """How far a compute lies beyond the runs."""
        return max(math.log10(compute / self.highest), 0.0)


def run_noise(residuals: Array, level: float = 0.95) -> float:
    """The deviation of a run from the law, of the normal distribution that reaches as far."""
    n = len(residuals)
    far = float(np.quantile(np.abs(residuals), level))
    return far * math.sqrt(n / max(n - 5, 1)) / _reach(level)


def drift(runs: Runs, refit: Callable[[Runs], Bootstrap]) -> Drift:
    """Refit the runs below each of five cuts in compute; `refit` may raise ValueError."""
    compute = FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens
    highest, cuts = float(compute.max()), []
    try:
        whole = refit(runs)
    except ValueError:
        return Drift(highest, (), 0.0, 0.0, 1.0)
    for limit in np.unique(np.quantile(compute, SHARES, method="lower")):
        below = compute <= limit
        if below.sum() < FEWEST_RUNS or below.all():
            continue
        try:
            cuts.append(_cut(refit(runs[below]), whole, runs[~below], float(limit), highest))
        except ValueError:
            continue
    size = per_decade([(c.decades, c.size_error, c.size_deviation) for c in cuts])
    loss = per_decade([(c.decades, c.loss_error, c.loss_deviation) for c in cuts])
    worst = max((c.run_error for c in cuts), default=0.0)
    return Drift(highest, tuple(cuts), size, loss, max(1.0, worst / _reach(0.95)))


def _cut(part: Bootstrap, whole: Bootstrap, beyond: Runs, limit: float, highest: float) -> Cut:
    sizes = [math.log(fit.fit.law.optimal(highest).parameters) for fit in (part, whole)]
    deviations = [_deviation(np.log(fit.sizes(highest))) for fit in (part, whole)]
    error = np.log(part.fit.law.predict(beyond.parameters, beyond.tokens)) - np.log(beyond.loss)
    models = zip(beyond.parameters, beyond.tokens, strict=True)
    explained = np.array([_deviation(np.log(part.losses(n, d))) for n, d in models])
    at = int(np.argsort(error)[len(beyond) // 2])
    expected = np.hypot(explained, run_noise(part.fit.residuals))
    return Cut(
        limit,
        len(part.fit.runs),
        math.log10(highest / limit),
        sizes[0] - sizes[1],
        math.hypot(*deviations),
        float(np.median(error)),
        math.hypot(explained[at], _deviation(error) / math.sqrt(len(beyond))),
        float(np.quantile(np.abs(error) / expected, 0.95)),
    )


def per_decade(cuts: list[tuple[float, float, float]]) -> float:
    """The deviation per decade, of (decades, error, deviation), that noise does not explain."""
    if not cuts:
        return 0.0
    decades, error, deviation = np.array(cuts).T
    if ((error / deviation) ** 2).mean() < SIGNIFICANT:
        return 0.0
    return math.sqrt(max(float(((error**2 - deviation**2) / decades**2).mean()), 0.0))


def _deviation(values: Array) -> float:
    """Half the width of the middle two thirds: resamples have long tails."""
    low, high = np.quantile(values, [0.16, 0.84])
    return max(float(high - low) / 2, 1e-12)


def _reach(level: float) -> float:
    return float(ndtri(0.5 + level / 2))


def _widen(interval: Interval, value: float, spread: float, times: float = 1.0) -> Interval:
    """Both ends `times` as far, then out by a normal deviation of `spread`, in logs.

    One without ends stays.
    """
    if not (spread or times > 1) or not 0 < interval.low <= value <= interval.high < math.inf:
        return interval
    more = _reach(interval.level) * spread
    low = math.hypot(times * math.log(value / interval.low), more)
    high = math.hypot(times * math.log(interval.high / value), more)
    return Interval(value * math.exp(-low), value * math.exp(min(high, 600.0)), interval.level)

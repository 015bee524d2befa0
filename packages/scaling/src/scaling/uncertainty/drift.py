"""What the law of the smaller runs gets wrong about the larger ones, and so this law about others.

Notable: resampled runs show the noise of runs, not that the law is not quite true. That shows where
the past is foretold: fit the runs below a cut, ask for the best size at the top, compare with what
all runs say there. Errors that noise explains add nothing; else their drift in each decade of
compute goes into every interval beyond the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from scaling.law import Interval, Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs
from scaling.uncertainty.bootstrap import Bootstrap, Prediction

SHARES = (0.25, 0.35, 0.5, 0.65, 0.8)
"""Of the runs, by compute, that a cut keeps."""

FEWEST_RUNS = 12
"""Below a cut: five constants and as many to be wrong about them."""

SIGNIFICANT = 2.2
"""Mean square of errors over their deviations. Where the law holds, cuts of one set exceed it in
one set of twenty."""


@dataclass(frozen=True)
class Cut:
    """A law of the runs below a cut, held against all runs at their highest compute."""

    compute: float
    """The highest of the runs that were fitted."""
    runs: int
    decades: float
    """From there to the highest of all runs."""
    size_error: float
    """log of the best size that it foretells there over the best size by all runs."""
    size_deviation: float
    """The standard deviation that the resamples of both explain."""
    loss_error: float
    """log of foretold over observed loss, median over the runs beyond the cut."""
    loss_deviation: float
    run_error: float
    """The 95 % quantile of |log of foretold over observed| in units of what was to be expected of
    a run beyond the cut, noise included: 1.96 where the law holds."""


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
        intervals = dict(best.intervals or {})
        for name, per_decade in (
            ("parameters", self.size),
            ("tokens", self.size),
            ("loss", self.loss),
        ):
            if name in intervals:
                spread = per_decade * self._decades(best.compute)
                intervals[name] = _widen(intervals[name], getattr(best, name), spread)
        return replace(best, intervals=intervals)

    def of_a_run(self, mean: Prediction, compute: float, residuals: Array) -> Interval:
        """The interval of one more run: of the mean, the noise of a run, and the drift."""
        level = mean.interval.level
        widened = _widen(mean.interval, mean.loss, run_noise(residuals, level))
        if not self._decades(compute):
            return widened
        low = self.run * math.log(mean.loss / widened.low)
        high = self.run * math.log(widened.high / mean.loss)
        further = Interval(mean.loss * math.exp(-low), mean.loss * math.exp(high), level)
        return _widen(further, mean.loss, self.loss * self._decades(compute))

    def _decades(self, compute: float) -> float:
        return max(math.log10(compute / self.highest), 0.0)


def run_noise(residuals: Array, level: float = 0.95) -> float:
    """The deviation of a run from the law, of the normal distribution that reaches as far."""
    n = len(residuals)
    far = float(np.quantile(np.abs(residuals), level))
    return far * math.sqrt(n / max(n - 5, 1)) / _reach(level)


def drift(runs: Runs, refit: Callable[[Runs], Bootstrap]) -> Drift:
    """Refit the runs below each of five cuts in compute; `refit` may raise ValueError."""
    compute = FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens
    highest = float(compute.max())
    try:
        whole = refit(runs)
    except ValueError:
        return Drift(highest, (), 0.0, 0.0, 1.0)
    cuts = []
    for limit in np.unique(np.quantile(compute, SHARES, method="lower")):
        below = compute <= limit
        if below.sum() < FEWEST_RUNS or below.all():
            continue
        try:
            part = refit(runs[below])
        except ValueError:
            continue
        cuts.append(_cut(part, whole, runs[~below], float(limit), highest))
    return Drift(
        highest,
        tuple(cuts),
        per_decade([(c.decades, c.size_error, c.size_deviation) for c in cuts]),
        per_decade([(c.decades, c.loss_error, c.loss_deviation) for c in cuts]),
        max(1.0, max(c.run_error for c in cuts) / _reach(0.95)) if cuts else 1.0,
    )


def _cut(part: Bootstrap, whole: Bootstrap, beyond: Runs, limit: float, highest: float) -> Cut:
    size, deviation = [], []
    for fit in (part, whole):
        size.append(math.log(fit.fit.law.optimal(highest).parameters))
        deviation.append(_deviation(np.log(fit.sizes(highest))))
    predicted = np.log(part.fit.law.predict(beyond.parameters, beyond.tokens))
    error = predicted - np.log(beyond.loss)
    models = zip(beyond.parameters, beyond.tokens, strict=True)
    explained = np.array([_deviation(np.log(part.losses(n, d))) for n, d in models])
    noise = run_noise(part.fit.residuals)
    at = int(np.argsort(error)[len(beyond) // 2])
    return Cut(
        limit,
        len(part.fit.runs),
        math.log10(highest / limit),
        size[0] - size[1],
        math.hypot(*deviation),
        float(np.median(error)),
        math.hypot(explained[at], _deviation(error) / math.sqrt(len(beyond))),
        float(np.quantile(np.abs(error) / np.hypot(explained, noise), 0.95)),
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


def _widen(interval: Interval, value: float, spread: float) -> Interval:
    """Both ends moved out, in logs and in quadrature, by a normal deviation of `spread`."""
    if not spread or not 0 < interval.low <= value <= interval.high < math.inf:
        return interval
    more = _reach(interval.level) * spread
    low = math.hypot(math.log(value / interval.low), more)
    high = math.hypot(math.log(interval.high / value), more)
    return Interval(value * math.exp(-low), value * math.exp(min(high, 600.0)), interval.level)

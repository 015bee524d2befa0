"""Drift: how far the law of the smaller runs misses the larger ones.

Resampled runs show the noise of the runs, not the error of a law that is only nearly true. That
error shows in a backtest: fit the runs below a cut and compare with all runs at the top.

Note [Shrunken drift]
The cuts of one table share their runs, so together they are worth about one observation of the
drift per decade. A rule that switches the drift on where one observation is significant makes an
interval jump between x2 and x100 when a single run is dropped. So there is no test: the drift is a
weighted mean of the usual drift of published tables, which counts as `PRIOR_WEIGHT` observations,
and of this table's drift, which counts as at most one. A cut counts less the more of its error its
noise explains, and a cut of few runs counts less, so that no cut enters or leaves abruptly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from scaling.law import Interval, Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs
from scaling.uncertainty.bootstrap import Bootstrap, Prediction

SHARES = (0.25, 0.35, 0.5, 0.65, 0.8)
"""Shares of the runs, by compute, below the cuts."""

USUAL_SIZE, USUAL_LOSS = 0.2, 0.01
"""Usual drift per decade of log best size and of log loss. With these, the 95 % intervals of seven
published tables hold what came later (see test_backtest.py)."""

PRIOR_WEIGHT = 4.0
"""Number of observations that the usual drift counts as."""

FEWEST_RUNS, ENOUGH_RUNS = 10, 22
"""Runs of a cut at which it starts to count, and at which it counts fully."""

RAMP = 0.5
"""Decades beyond the runs over which the factor for single runs grows to its full value."""


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

    @property
    def weight(self) -> float:
        """Weight of the cut by its number of runs, from 0 to 1."""
        return min(max((self.runs - FEWEST_RUNS) / (ENOUGH_RUNS - FEWEST_RUNS), 0.0), 1.0)


@dataclass(frozen=True)
class Drift:
    """Standard deviations in logs, per decade beyond the runs."""

    highest: float
    """FLOPs of the largest run: at or below it nothing is extrapolated."""
    cuts: tuple[Cut, ...]
    size: float
    loss: float
    run: float
    """Ratio of the errors of runs beyond the cuts to the expected errors; at least 1."""

    def widened(self, best: Optimum) -> Optimum:
        """An optimum whose intervals allow for the drift up to its compute."""
        each = {"parameters": self.size, "tokens": self.size, "loss": self.loss}
        spread = {k: each[k] * self.decades(best.compute) for k in best.intervals or {}}
        intervals = (best.intervals or {}).items()
        return replace(
            best, intervals={k: _widen(i, getattr(best, k), spread[k]) for k, i in intervals}
        )

    def of_a_run(self, mean: Prediction, compute: float, residuals: Array) -> Interval:
        """Return the interval of one more run: of the mean, the noise of a run, and the drift."""
        decades = self.decades(compute)
        noise = run_noise(residuals, mean.interval.level)
        times = self.run ** min(decades / RAMP, 1.0)
        widened = _widen(mean.interval, mean.loss, noise)
        return _widen(widened, mean.loss, self.loss * decades, times)

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
        return Drift(highest, (), USUAL_SIZE, USUAL_LOSS, 1.0)
    for limit in np.unique(np.quantile(compute, SHARES, method="lower")):
        below = compute <= limit
        if below.sum() <= FEWEST_RUNS or below.all():
            continue
        try:
            cuts.append(_cut(refit(runs[below]), whole, runs[~below], float(limit), highest))
        except ValueError:
            continue
    size = per_decade([(c.decades, c.size_error, c.size_deviation, c.weight) for c in cuts])
    loss = per_decade(
        [(c.decades, c.loss_error, c.loss_deviation, c.weight) for c in cuts], usual=USUAL_LOSS
    )
    times = [max(c.run_error / _reach(0.95), 1.0) ** c.weight for c in cuts]
    return Drift(highest, tuple(cuts), size, loss, max(times, default=1.0))


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


def per_decade(
    cuts: Sequence[tuple[float, float, float, float]], *, usual: float = USUAL_SIZE
) -> float:
    """Return the drift per decade of cuts of (decades, error, deviation, weight).

    See Note [Shrunken drift]. Without cuts it is the usual drift.
    """
    seen, weight = 0.0, 0.0
    for decades, error, deviation, share in cuts:
        signal, noise = (usual * decades) ** 2, deviation**2
        if signal == 0:
            continue
        # Informative is the part of the expected error that is drift, not noise.
        informative = share * signal / (signal + noise)
        # sqrt(pi / 2) makes a mean absolute error a standard deviation.
        seen += informative * abs(error) / decades * math.sqrt(math.pi / 2)
        weight += informative
    observations = weight / len(SHARES)
    if not observations:
        return usual
    observations = min(observations, 1.0)
    return (PRIOR_WEIGHT * usual + observations * seen / weight) / (PRIOR_WEIGHT + observations)


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

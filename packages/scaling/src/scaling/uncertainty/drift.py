"""Drift: the errors of laws fitted to small runs at larger runs.

A posterior measures the effect of noise in the runs, but not the error of a law that is only
approximately true. A backtest measures this error: it fits the runs below a cut in compute, and
compares the prediction at the largest compute with a fit of all runs.

Note [Shrunken drift]
The cuts of one table share their runs, so together they are worth about one observation of the
drift per decade. Suppose that drift were added only if it is significant. Dropping a single run
could then widen an interval from a factor of 2 to a factor of 100. There is therefore no
significance test. The drift is a weighted mean of the typical drift of published tables and the
drift of this table. The former counts as `PRIOR_WEIGHT` observations, and the latter as at most
one. The weight of a cut decreases with the part of its error that noise explains. It also decreases
for few runs, so that no cut enters or leaves the mean abruptly.

Note [Calibration]
The experiment is `test_intervals_cover_later_runs_of_tables_not_used_for_calibration`. For each of
19 published tables, the runs up to three cuts predict the best size at the largest compute and the
later losses. `PRIOR_SIZE_DRIFT`, `PRIOR_VALLEY_DRIFT` and `RUN_NOISE_FACTOR` are the smallest
values for which 95 % of these are inside their intervals, averaged over the tables. The coverage is
then measured on each table with constants that are calibrated on the other tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from scaling.equality import ComparesArrays
from scaling.fit.search import Estimate, estimate
from scaling.law import CONFIDENCE_LEVEL, Interval, Optimum
from scaling.runs import Runs
from scaling.tables.grouping import select_below_cuts
from scaling.uncertainty.posterior import Posterior, Prediction, sample_posterior
from scaling.units import FLOPS_PER_PARAMETER_TOKEN, Array

#: A standard normal variable is in ± this number with probability `CONFIDENCE_LEVEL`.
NORMAL_QUANTILE = float(ndtri(0.5 + CONFIDENCE_LEVEL / 2))

#: Drift starts at the mean compute of this fraction of the runs, the largest ones. In the
#: calibration, 0.1 and 0.3 give intervals that are 2 and 5 % wider in the mean, in logarithms.
LARGEST_FRACTION = 0.2

#: Fractions of the runs, ordered by compute, that are below the cuts. In the calibration, three
#: cuts (0.3, 0.5, 0.7) and seven cuts (0.2 to 0.8) give intervals that are 1 and 6 % wider.
CUT_FRACTIONS = (0.25, 0.35, 0.5, 0.65, 0.8)

#: Typical drift of the log best size per decade, for a parametric law and for an IsoFLOP law. The
#: latter does not assume a form of the loss. See Note [Calibration].
PRIOR_SIZE_DRIFT = 0.56
PRIOR_VALLEY_DRIFT = 0.22

#: Typical drift of the log loss per decade. In the calibration, values from 0.003 to 0.03 give
#: intervals of the same mean width.
PRIOR_LOSS_DRIFT = 0.01

#: Factor by which the interval of a single run is widened beyond the runs, and decades over which
#: the widening reaches this factor. See Note [Calibration]. A ramp of 0.5 gives narrower intervals
#: than a factor linear in decades.
RUN_NOISE_FACTOR = 1.8
RUN_NOISE_RAMP = 0.5

#: The coverage that Note [Calibration] measures.
COVERAGE = (
    "of 19 published tables, each left out of the calibration in turn, such intervals contain 95%"
    " of the later optima, and those of `predict` contain 95% of the later losses"
)
VALLEY_COVERAGE = (
    "of 17 published tables, each left out of the calibration in turn, such intervals contain 94%"
    " of the later optima"
)

#: Number of observations that the typical drift counts as. In the calibration, values from 1 to 8
#: give mean widths within 9 %; the larger the value, the less a single run changes the drift.
PRIOR_WEIGHT = 4.0

#: Number of laws that are sampled to estimate how much of the error of a cut is noise.
CUT_DRAWS = 300

#: A cut has weight 0 for at most `FEWEST_RUNS` runs and weight 1 for at least `FULL_WEIGHT_RUNS`
#: runs. Therefore no cut enters the mean abruptly. The calibration gives the same numbers without
#: these weights.
FEWEST_RUNS = 10
FULL_WEIGHT_RUNS = 22


class CutError(NamedTuple):
    """The error of one quantity at one cut, in logarithms."""

    #: Decades from the start of the drift of the fitted runs to the largest run.
    decades: float
    error: float
    #: Standard deviation of the error that noise explains.
    deviation: float
    #: Weight of the cut, from 0 to 1, which depends on its number of runs.
    weight: float


@dataclass(frozen=True, eq=False, repr=False)
class Drift(ComparesArrays):
    """The errors of a law beyond its runs, as standard deviations of logarithms per decade."""

    #: Compute above which drift grows: see `compute_drift_start`.
    start: float
    #: Smallest and largest compute, parameters and tokens of the runs.
    ranges: tuple[tuple[float, float], ...]
    #: The errors of the best size at the cuts, from which `size` is computed.
    cuts: tuple[CutError, ...]
    #: Standard deviation of the log best size per decade of compute.
    size: float
    #: Standard deviation of the log loss per decade of compute.
    loss: float

    def widen(self, best: Optimum) -> Optimum:
        """Return an optimum whose intervals include the drift up to its compute."""
        decades = self.compute_decades(best.compute)
        per_decade = {"parameters": self.size, "tokens": self.size, "loss": self.loss}
        intervals = {}
        for name, interval in (best.intervals or {}).items():
            intervals[name] = _widen(interval, getattr(best, name), per_decade[name] * decades)
        coverage = COVERAGE if decades and not best.reason else ""
        return replace(best, intervals=intervals, coverage=coverage)

    def predict_run(
        self, mean: Prediction, parameters: float, tokens: float, residuals: Array
    ) -> Prediction:
        """Return the prediction of one new run: the interval of the mean with noise and drift."""
        decades = self.compute_decades(FLOPS_PER_PARAMETER_TOKEN * parameters * tokens)
        for value, (low, high) in zip((parameters, tokens), self.ranges[1:], strict=True):
            # Along the optima, a decade of parameters or of tokens is two decades of compute.
            decades = max(decades, 2 * math.log10(value / high), 2 * math.log10(low / value))
        ratio = RUN_NOISE_FACTOR ** min(decades / RUN_NOISE_RAMP, 1.0)
        with_noise = _widen(mean.interval, mean.loss, compute_run_noise(residuals))
        interval = _widen(with_noise, mean.loss, self.loss * decades, ratio)
        coverage = COVERAGE if decades and not mean.reason else ""
        return Prediction(mean.loss, interval, coverage, mean.reason)

    def compute_decades(self, compute: float) -> float:
        """Return the decades of a compute above `start` or below the smallest run; otherwise 0."""
        lowest = self.ranges[0][0]
        return max(math.log10(compute / self.start), math.log10(lowest / compute), 0.0)


def compute_drift_start(compute: Array) -> float:
    """Return the geometric mean compute of the largest fifth of the runs.

    If drift started at the largest run, one run far above the others would change all intervals.
    The run at the boundary of the fifth has a fractional weight.
    """
    logs = np.sort(np.log(compute))[::-1]
    weights = np.clip(LARGEST_FRACTION * len(logs) - np.arange(len(logs)), 0.0, 1.0)
    return float(np.exp(weights @ logs / weights.sum()))


def compute_run_noise(residuals: Array) -> float:
    """Return the standard deviation of log losses about the law, from n residuals.

    The standard deviation is that of the normal distribution that has the 95 % quantile of the
    absolute residuals. A 95 % interval therefore contains 95 % of the runs, even if
    their errors have heavy tails. The factor sqrt(n / (n - 5)) is for the five fitted constants.
    """
    n = len(residuals)
    quantile = float(np.quantile(np.abs(residuals), CONFIDENCE_LEVEL))
    return quantile * math.sqrt(n / max(n - 5, 1)) / NORMAL_QUANTILE


def measure_drift(fit: Estimate) -> Drift:
    """Return the drift of a fit, measured by refits of its runs below each of five cuts in compute.

    A cut is skipped if its runs cannot be fitted, or if it has `FEWEST_RUNS` or fewer runs.
    """
    runs = fit.runs
    compute = FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens
    highest = float(compute.max())
    start = compute_drift_start(compute)
    columns = (compute, runs.parameters, runs.tokens)
    ranges = tuple((float(column.min()), float(column.max())) for column in columns)
    uncut_posterior = sample_posterior(fit, draws=CUT_DRAWS)
    deviation = uncut_posterior.compute_log_deviation(uncut_posterior.sizes(highest))
    sizes = []
    losses = []
    for below in select_below_cuts(compute, CUT_FRACTIONS):
        if below.sum() <= FEWEST_RUNS:
            continue
        try:
            part, _, _ = estimate(runs[below], fit.loss, fit.delta, prove=False)
        except ValueError:
            continue
        if part.unidentified:
            continue
        decades = math.log10(highest / compute_drift_start(compute[below]))
        weight = min((len(part.runs) - FEWEST_RUNS) / (FULL_WEIGHT_RUNS - FEWEST_RUNS), 1.0)
        posterior = sample_posterior(part, draws=CUT_DRAWS)
        predicted = part.law.optimal(highest).parameters
        size_error = math.log(predicted / fit.law.optimal(highest).parameters)
        size_deviation = posterior.compute_log_deviation(posterior.sizes(highest))
        noise = math.hypot(size_deviation, deviation, 1e-12)
        sizes.append(CutError(decades, size_error, noise, weight))
        losses.append(
            CutError(decades, *_compute_loss_error(part, posterior, runs[~below]), weight)
        )
    return Drift(
        start,
        ranges,
        tuple(sizes),
        compute_drift_per_decade(sizes, PRIOR_SIZE_DRIFT),
        compute_drift_per_decade(losses, PRIOR_LOSS_DRIFT),
    )


def _compute_loss_error(fit: Estimate, posterior: Posterior, beyond: Runs) -> tuple[float, float]:
    """Return the median error in log loss that `fit` makes on the runs `beyond` its cut.

    Also return the standard deviation of this median without drift.
    """
    errors = np.log(fit.law.predict(beyond.parameters, beyond.tokens)) - np.log(beyond.loss)
    median = int(np.argsort(errors)[len(beyond) // 2])
    losses = posterior.losses(float(beyond.parameters[median]), float(beyond.tokens[median]))
    low, high = np.quantile(errors, [0.16, 0.84])
    median_noise = float(high - low) / 2 / math.sqrt(len(beyond))
    deviation = math.hypot(posterior.compute_log_deviation(losses), median_noise, 1e-12)
    return float(np.median(errors)), deviation


def compute_drift_per_decade(cuts: Sequence[CutError], prior: float) -> float:
    """Return the drift per decade, shrunken towards the typical drift `prior`.

    See Note [Shrunken drift]. Without cuts the result is `prior`.
    """
    total = 0.0
    total_weight = 0.0
    for decades, error, deviation, weight in cuts:
        signal = (prior * decades) ** 2
        if signal == 0:
            continue
        # Weight by the fraction of the expected squared error that is drift rather than noise.
        informative = weight * signal / (signal + deviation**2)
        # sqrt(pi / 2) converts a mean absolute error to a standard deviation.
        total += informative * abs(error) / decades * math.sqrt(math.pi / 2)
        total_weight += informative
    if not total_weight:
        return prior
    measured = total / total_weight
    observations = min(total_weight / len(CUT_FRACTIONS), 1.0)
    return (PRIOR_WEIGHT * prior + observations * measured) / (PRIOR_WEIGHT + observations)


def _widen(interval: Interval, value: float, deviation: float, ratio: float = 1.0) -> Interval:
    """Return an interval with log half-widths scaled by `ratio` and an added normal deviation.

    An interval that is unbounded, not positive, or does not contain `value` is returned unchanged.
    """
    if not (deviation or ratio > 1):
        return interval
    if not 0 < interval.low <= value <= interval.high < math.inf:
        return interval
    extra = NORMAL_QUANTILE * deviation
    low = math.hypot(ratio * math.log(value / interval.low), extra)
    high = math.hypot(ratio * math.log(interval.high / value), extra)
    return Interval(value * math.exp(-low), value * math.exp(min(high, 600.0)))

"""IsoFLOP fits: a power law through the best model sizes of all budgets.

This is "Approach 2" of Hoffmann et al. 2022, section 3.2. `optima.py` computes the best sizes. D
follows from C, N and the ratio C / (N D) of the runs, so the laws of N and D agree at every budget.
With a common shape, each budget is weighted by the precision with which its runs determine the
bottom. Separate parabolas have equal weights.
"""

import itertools
import math
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from scipy.special import stdtrit

from scaling.equality import ComparesArrays
from scaling.isoflop.optima import fit_valleys
from scaling.isoflop.valley import Valley
from scaling.law import Interval, Optimum, build_unidentified_optimum, require_budget
from scaling.runs import Runs, ScalingWarning, require_runs
from scaling.uncertainty.diagnostics import Diagnostics, warn_of_optimum
from scaling.uncertainty.drift import (
    NORMAL_QUANTILE,
    PRIOR_VALLEY_DRIFT,
    VALLEY_COVERAGE,
    CutError,
    compute_drift_per_decade,
    compute_drift_start,
)
from scaling.units import Array

NO_FREEDOM = "two budgets leave no degrees of freedom for the interval; train at more budgets"


@dataclass(frozen=True, eq=False, repr=False)
class IsoflopFit(ComparesArrays):
    """The laws N_opt = scale * C^exponent and D_opt = C / (k N_opt), with k = C / (N D)."""

    runs: Runs
    valleys: tuple[Valley, ...]
    scale: float
    exponent: float
    #: Covariance of the height and the slope of the line of log N over log C, (2, 2). The height is
    #: log N at the mean log C of the budgets.
    covariance: Array
    #: Standard deviation of log N per decade beyond the budgets: see Note [Shrunken drift].
    drift: float
    warnings: tuple[str, ...]
    #: The reason why the runs do not identify the laws; empty if they do. If they do not, there are
    #: no valleys, and all numbers are nan.
    unidentified: str = ""

    def optimal(self, compute: float) -> Optimum:
        """Return the best N and D for `compute` FLOPs, with 95 % intervals; the loss is nan.

        The interval of N combines the scatter of the valleys about the line, with Student's t, and
        the drift beyond the budgets. The interval of D follows from the interval of N. A line
        through two budgets has no scatter, so the interval is (0, inf). If the runs do not identify
        an optimum, N and D are nan too. A `ScalingWarning` reports this, a wide interval, or an
        optimum far from all runs.
        """
        require_budget(compute)
        if self.unidentified:
            best = build_unidentified_optimum(compute, self.unidentified)
            warn_of_optimum(best, self.runs)
            return best
        n = self.scale * compute**self.exponent
        low, high = self._compute_size_interval(compute, n)
        product = compute / self.flops_per_parameter_token(compute)
        tokens = Interval(product / high, product / low if low else math.inf)
        intervals = {"parameters": Interval(low, high), "tokens": tokens}
        reason = NO_FREEDOM if len(self.valleys) == 2 else ""
        coverage = VALLEY_COVERAGE if self._compute_drift_decades(compute) and not reason else ""
        best = Optimum(compute, n, product / n, math.nan, intervals, coverage, reason)
        warn_of_optimum(best, self.runs)
        return best

    @property
    def exponent_interval(self) -> Interval:
        """The 95 % interval of `exponent` from the scatter of the valleys, without drift.

        It is infinite for two budgets, and for runs that do not identify the law.
        """
        freedom = len(self.valleys) - 2
        if freedom <= 0:
            return Interval(-math.inf, math.inf)
        student = float(stdtrit(freedom, 0.975))
        half = student * math.sqrt(float(self.covariance[1, 1]))
        return Interval(self.exponent - half, self.exponent + half)

    def _compute_size_interval(self, compute: float, n: float) -> tuple[float, float]:
        """Return the bounds of the 95 % interval of the best size `n` at `compute` FLOPs."""
        freedom = len(self.valleys) - 2
        if freedom <= 0:
            return 0.0, math.inf
        middle = float(np.mean(np.log([valley.compute for valley in self.valleys])))
        position = np.array([1.0, math.log(compute) - middle])
        scatter = math.sqrt(float(position @ self.covariance @ position))
        student = float(stdtrit(freedom, 0.975))
        drift = self.drift * self._compute_drift_decades(compute)
        half = math.hypot(student * scatter, NORMAL_QUANTILE * drift)
        return n * math.exp(-half), n * math.exp(min(half, 600.0))

    def _compute_drift_decades(self, compute: float) -> float:
        """Return the decades of a compute above the start of the drift or below the budgets.

        The result is 0 between the two.
        """
        budgets = np.array([valley.compute for valley in self.valleys])
        above = math.log10(compute / compute_drift_start(budgets))
        return max(above, math.log10(budgets[0] / compute), 0.0)

    def flops_per_parameter_token(self, compute: float) -> float:
        """Return C / (N D) of the best model, interpolated between budgets; constant beyond."""
        c = np.array([valley.compute for valley in self.valleys])
        product = np.array([valley.parameters * valley.tokens for valley in self.valleys])
        return math.exp(np.interp(math.log(compute), np.log(c), np.log(c / product)))


def fit_isoflop(runs: Runs, *, nearest: int | None = None, tolerance: float = 0.05) -> IsoflopFit:
    """Return the fit of a power law through the bottoms of the valleys of all budgets.

    A valley is the curve of loss over log N at one budget. By default all budgets share one skewed
    shape: see Note [Common shape] in valley.py. If there are too few runs for a common shape, or no
    common shape fits, plain parabolas are used, with a warning.

    Args:
        runs: The runs, at least five at two budgets.
        nearest: Fit a separate parabola to this many runs of each budget, the nearest in log size
            to the best run. If a budget has fewer runs, all of them are used.
        tolerance: The relative gap in compute that separates two budgets: see `Runs.budgets`.

    Raises:
        TypeError: The runs are not the result of `load_runs`.
        ValueError: An option is invalid, there are fewer than five runs, or the fitted size does
            not grow with compute.

    A `ScalingWarning` reports that fewer than two budgets have a valley. Such runs do not identify
    a law, and the intervals of `optimal` are (0, inf). Otherwise the warning reports coarse grids,
    a minimum at the edge of a budget, and budgets that are left out. It also reports sizes that do
    not grow with compute, and fewer than four valleys.
    """
    require_runs(runs)
    if nearest is not None and not (isinstance(nearest, Integral) and nearest >= 3):
        raise ValueError(f"expected nearest to be an integer >= 3, got nearest = {nearest}")
    if len(runs) < 5:
        raise ValueError(f"{len(runs)} runs are too few; train five or more, at two budgets")
    budgets = runs.budgets(tolerance)
    if len(budgets) < 2:
        budget = budgets[0].compute[0]
        return _build_unidentified_fit(
            runs, f"column 'compute' contains one budget, {budget:.3g}: a law needs two"
        )
    diagnostics = Diagnostics()
    valleys, covariance = fit_valleys(budgets, nearest, diagnostics)
    if len(valleys) < 2:
        causes = "\n".join(diagnostics)
        return _build_unidentified_fit(runs, f"fewer than two budgets have a valley:\n{causes}")
    _report_valleys(valleys, diagnostics)
    c = np.array([valley.compute for valley in valleys])
    n = np.array([valley.parameters for valley in valleys])
    drift = _estimate_drift(c, n, covariance)
    scale, exponent, covariance = _fit_power_law(c, n, covariance)
    messages = tuple(diagnostics)
    for message in messages:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    return IsoflopFit(runs, tuple(valleys), scale, exponent, covariance, drift, messages)


def _build_unidentified_fit(runs: Runs, reason: str) -> IsoflopFit:
    """Return the fit of runs that do not identify a law, and issue the reason as a warning."""
    warnings.warn(reason, ScalingWarning, stacklevel=3)
    nan = math.nan
    return IsoflopFit(runs, (), nan, nan, np.full((2, 2), nan), nan, (reason,), reason)


def _report_valleys(valleys: list[Valley], diagnostics: Diagnostics) -> None:
    """Add messages for best sizes that do not grow with compute, and for fewer than 4 valleys."""
    for before, after in itertools.pairwise(valleys):
        if after.parameters <= before.parameters:
            diagnostics.add(
                "the budgets are too coarse or too noisy",
                f"the best size falls from {before.parameters:.3g} at {before.compute:.3g} FLOPs"
                f" to {after.parameters:.3g} at {after.compute:.3g}",
            )
    if len(valleys) < 4:
        freedom = len(valleys) - 2
        diagnostics.add(
            f"{len(valleys)} budgets leave {freedom} degrees of freedom for the interval"
        )


def _fit_power_law(c: Array, n: Array, covariance: Array) -> tuple[float, float, Array]:
    """Return the scale, the exponent, and the covariance of the line through log C and log N.

    The budgets are weighted by the inverse of `covariance`. The returned covariance is scaled by
    the scatter about the line. Raises `ValueError` unless the exponent is positive.
    """
    x = np.log(c)
    weight = np.linalg.inv(covariance / np.trace(covariance))
    line, inverse, scatter = _fit_weighted_line(x - x.mean(), np.log(n), weight)
    height, exponent = map(float, line)
    scale = math.exp(height - exponent * float(x.mean()))
    if not exponent > 0:
        raise ValueError(
            f"the fitted law N = {scale:.3g} C^{exponent:.3g} does not grow with compute: these"
            " budgets do not fix an optimum"
        )
    return scale, exponent, scatter * inverse


def _fit_weighted_line(x: Array, y: Array, weight: Any) -> tuple[Array, Any, float]:
    """Fit a line; return (height, slope), their covariance at unit scatter, and the scatter.

    The scatter is the weighted sum of squared errors per degree of freedom.
    """
    rows = np.stack([np.ones_like(x), x], axis=1)
    inverse = np.linalg.inv(rows.T @ weight @ rows)
    line = inverse @ rows.T @ weight @ y
    errors = y - rows @ line
    return line, inverse, float(errors @ weight @ errors) / max(len(x) - 2, 1)


def _estimate_drift(c: Array, n: Array, covariance: Array) -> float:
    """Return the drift per decade, from the errors at the largest budget of lines through fewer.

    For nested least-squares fits, the variance of the difference of two predictions is the
    difference of their variances.
    """
    x = np.log(c / c[-1])
    y = np.log(n)
    lines = []
    for count in range(3, len(c) + 1):
        weight = np.linalg.inv(covariance[:count, :count])
        lines.append(_fit_weighted_line(x[:count], y[:count], weight))
    cuts = []
    for i, (line, inverse, _) in enumerate(lines[:-1]):
        full_line, full_inverse, scatter = lines[-1]
        deviation = math.sqrt(scatter * (inverse[0, 0] - full_inverse[0, 0])) + 1e-12
        decades = math.log10(c[-1] / compute_drift_start(c[: i + 3]))
        # Each budget consists of several runs, so every cut has full weight.
        cuts.append(CutError(decades, float(line[0] - full_line[0]), deviation, 1.0))
    return compute_drift_per_decade(cuts, PRIOR_VALLEY_DRIFT)

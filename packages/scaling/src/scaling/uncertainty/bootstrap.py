"""Bootstrap intervals of a fitted law, with refits of all resamples in one batch.

A resample is a vector of counts over the same runs, so thousands of refits are one batched Newton
iteration from the full fit. The intervals are corrected for bias and for the degrees of freedom
that the fit used (Efron 1981; Hesterberg 2015). Uncorrected intervals are too narrow for few runs.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from scaling.fit.newton import flag_vanished_terms
from scaling.fit.search import Estimate, refit
from scaling.law import CONFIDENCE_LEVEL, CONSTANTS, Interval, compute_quantiles
from scaling.runs import BUDGET_TOLERANCE, Runs, ScalingWarning
from scaling.tables.grouping import cluster
from scaling.uncertainty.posterior import NO_FREEDOM, Sample, Target

#: Smallest number of resamples, of which 2.5 are beyond each end of an interval.
FEWEST_RESAMPLES = 100


@dataclass(frozen=True, eq=False, repr=False)
class Bootstrap(Sample):
    """The laws that were fitted to resampled runs."""

    #: Number of fitted runs.
    runs: int
    #: Number of runs, or of groups of runs, per resample.
    sample_size: int

    def interval(self, target: Target) -> Interval:
        """Return the interval of a constant, of "exponent", or of a function of the constants.

        The ends are quantiles of the resampled values. They are shifted by the bias of the
        resamples (Efron 1981). They are also widened by the factor t sqrt(n / (n - 5)) / z, because
        a fit of n runs uses five degrees of freedom (Hesterberg 2015). Here t and z are quantiles
        of Student's t and of the normal distribution. The interval always contains the estimate.
        Without degrees of freedom it is (0, inf).
        """
        values, estimate = self.evaluate(target)
        if self.reason:
            return Interval(0.0, math.inf)
        freedom = self.runs - len(CONSTANTS)
        below = ((values < estimate).mean() + (values <= estimate).mean()) / 2
        bias = ndtri(np.clip(below, 0.01, 0.99))
        student = stdtrit(min(freedom, self.sample_size - 1), 0.5 + CONFIDENCE_LEVEL / 2)
        half = student * math.sqrt(1 + len(CONSTANTS) / freedom)
        low, high = compute_quantiles(values, [ndtr(2 * bias - half), ndtr(2 * bias + half)])
        return Interval(min(low, estimate), max(high, estimate))


def bootstrap(
    fit: Estimate,
    *,
    resamples: int = 4000,
    seed: int = 0,
    by: str | Sequence[object] | None = None,
) -> Bootstrap:
    """Return the laws of refits to runs that are resampled with replacement.

    `by` groups runs that are resampled together, because their errors have a common cause. "budget"
    groups runs of one compute budget; a sequence has one label per run, such as its seed or data
    order.

    Raises:
        TypeError: `fit` is not the result of `fit_parametric`.
        ValueError: `by` does not have one label per run or makes fewer than five groups, there are
            fewer than `FEWEST_RESAMPLES` resamples, or the runs do not identify a law.

    A `ScalingWarning` is issued if more than one percent of the refits did not converge, or lost a
    term of the law.
    """
    if not isinstance(fit, Estimate):
        raise TypeError(f"expected the result of fit_parametric(runs), got {type(fit).__name__}")
    if fit.unidentified:
        raise ValueError(fit.unidentified)
    if resamples < FEWEST_RESAMPLES:
        raise ValueError(f"expected at least {FEWEST_RESAMPLES} resamples, got {resamples}")
    n = len(fit.runs)
    group = np.arange(n) if by is None else _encode_groups(fit.runs, by)
    count = int(group.max()) + 1
    random = np.random.default_rng(seed)
    group_counts = random.multinomial(count, np.full(count, 1 / count), resamples)
    weights = group_counts[:, group].astype(np.float64)
    problem = fit.problem
    starts = np.tile(problem.from_constants(fit.law.constants), (resamples, 1))
    ends = refit(problem, starts, fit.loss, fit.delta, weights=weights, finest=1e-6)
    settled = ends.converged & ~flag_vanished_terms(problem, ends.theta).any(1)
    failed = int((~settled).sum())
    if failed * 100 > resamples:
        warnings.warn(
            f"{failed} of {resamples} refits did not converge to a law: {n} runs do not determine"
            " five constants when some are left out; train more runs, at other sizes and budgets",
            ScalingWarning,
            stacklevel=2,
        )
    reason = NO_FREEDOM if n <= len(CONSTANTS) else ""
    return Bootstrap(fit.law, problem.to_constants(ends.theta), n, count, reason=reason)


def _encode_groups(runs: Runs, by: str | Sequence[object]) -> NDArray[np.intp]:
    """Return the group index of each run; raise `ValueError` for fewer than five groups."""
    if isinstance(by, str):
        if by != "budget":
            raise ValueError(f"expected by='budget' or one label per run, got by={by!r}")
        labels = [str(code) for code in cluster(runs.compute, BUDGET_TOLERANCE)]
    else:
        labels = [str(label) for label in by]
    if len(labels) != len(runs) or len(set(labels)) < 5:
        raise ValueError(
            f"expected by to have one label for each of {len(runs)} runs and at least five"
            f" different labels, got {len(labels)} labels, {len(set(labels))} of them different"
        )
    _, group = np.unique(np.array(labels), return_inverse=True)
    return group

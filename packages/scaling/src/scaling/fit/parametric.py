"""Fit L(N, D) = E + A / N^alpha + B / D^beta to runs (Hoffmann et al. 2022; Besiroglu et al. 2024).

The search starts from a grid over (alpha, beta) alone, so a fit takes milliseconds: see
Note [Variable projection] in varpro.py. `prove=True` starts from every grid point.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scaling.fit import newton
from scaling.fit.search import (
    FEWEST_RUNS,
    Estimate,
    Loss,
    Proof,
    compute_residual_objective,
    describe_optima,
    estimate,
)
from scaling.fit.varpro import Problem
from scaling.law import (
    CONSTANTS,
    Interval,
    Optimum,
    build_unidentified_optimum,
    require_budget,
    require_model,
)
from scaling.runs import Runs, ScalingWarning
from scaling.tables.cells import list_some
from scaling.uncertainty.diagnostics import (
    BEND_P_VALUE,
    compute_bend_p_value,
    warn_of_optimum,
    warn_of_prediction,
)
from scaling.uncertainty.drift import Drift, measure_drift
from scaling.uncertainty.posterior import NO_FREEDOM, Posterior, Prediction, sample_posterior
from scaling.units import Array

#: A run is reported as an outlier if its residual exceeds this many robust standard deviations.
OUTLIER_SPREADS = 10


@dataclass(frozen=True, eq=False, repr=False)
class ParametricFit(Estimate):
    """A fitted law with intervals of its optima and predictions.

    `law` is the point estimate. `optimal` and `predict` add 95 % intervals of the posterior. Beyond
    the runs, these are widened by drift: the errors, at larger runs, of fits to smaller runs.

    If the runs do not identify the law, `unidentified` is the reason, and all fitted numbers are
    nan. The intervals of `optimal` and `predict` are then (0, inf), and `posterior` and `drift`
    raise `ValueError`.
    """

    objective: float
    proof: Proof
    warnings: tuple[str, ...]

    @cached_property
    def posterior(self) -> Posterior:
        """A weighted sample of the laws that are consistent with the runs, without drift."""
        self._require_identified()
        return sample_posterior(self)

    @cached_property
    def drift(self) -> Drift:
        """The drift of the law beyond the runs, measured by fits to smaller runs."""
        self._require_identified()
        return measure_drift(self)

    def __repr__(self) -> str:
        text = super().__repr__()
        return f"{text}\n  {self.unidentified}" if self.unidentified else text

    def _require_identified(self) -> None:
        if self.unidentified:
            raise ValueError(self.unidentified)

    def optimal(self, compute: float) -> Optimum:
        """Return the best model for `compute` FLOPs, with 95 % intervals of N, D and the loss.

        A `ScalingWarning` reports a wide interval, an optimum far from all runs, or runs that do
        not identify the optimum. Raises `TypeError` or `ValueError` unless `compute` is one
        positive and finite number.
        """
        require_budget(compute)
        if self.unidentified:
            best = build_unidentified_optimum(compute, self.unidentified)
        else:
            best = self.drift.widen(self.posterior.optimal(compute))
        warn_of_optimum(best, self.runs)
        return best

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Return the predicted loss of one new run, with a 95 % interval that includes its noise.

        A `ScalingWarning` reports a model far from all runs, or runs that do not identify the law.
        Raises `TypeError` or `ValueError` unless both arguments are positive and finite numbers.
        """
        require_model(parameters, tokens)
        if self.unidentified:
            warnings.warn(self.unidentified, ScalingWarning, stacklevel=2)
            return Prediction(math.nan, Interval(0.0, math.inf), reason=self.unidentified)
        mean = self.posterior.predict(parameters, tokens)
        warn_of_prediction(parameters, tokens, self.runs)
        return self.drift.predict_run(mean, parameters, tokens, self.residuals)


def fit_parametric(
    runs: Runs,
    loss: Loss = "huber",
    *,
    delta: float = 1e-3,
    prove: bool = False,
) -> ParametricFit:
    """Return the fit with the least sum of loss(log predicted - log observed) over all runs.

    Args:
        runs: The runs, at least five.
        loss: "huber" (as in Hoffmann et al.), "lad" (least absolute deviations) or "squares" (half
            the sum of squares).
        delta: The log residual at which the Huber loss becomes linear; other losses ignore it.
        prove: Minimize from all 289 points of a grid of exponents. The default starts from about
            thirty of them, and from all 289 if these reach several optima. For more than 4,000
            runs, it starts from the optimum of a sample of 4,000.

    Raises:
        TypeError: The runs are not the result of `load_runs`.
        ValueError: An option is invalid, there are fewer than five runs, or all losses are equal.

    A `ScalingWarning` reports runs that do not identify the law. For example, all runs may have one
    size, one budget or one ratio of tokens to parameters. The law of such a fit is nan, with
    intervals of (0, inf). Otherwise the warning reports several optima, a failure to converge, a
    fit of exactly five runs, a constant at its bound, curved residuals and outliers.
    """
    part, theta, proof = estimate(runs, loss, delta, prove)
    errors = part.residuals
    messages = [part.unidentified]
    if not part.unidentified:
        messages = _list_messages(runs, part.problem, theta, errors, proof)
    for message in messages:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    value = compute_residual_objective(errors, loss, delta)
    return ParametricFit(runs, part.law, loss, delta, errors, value, proof, tuple(messages))


def _list_messages(
    runs: Runs, problem: Problem, theta: Array, errors: Array, proof: Proof
) -> list[str]:
    messages = []
    if several := describe_optima(proof):
        messages.append(several)
    if len(runs) == FEWEST_RUNS:
        messages.append(NO_FREEDOM)
    p_value = compute_bend_p_value(problem, theta, errors)
    if p_value < BEND_P_VALUE:
        messages.append(
            f"no law of this form fits: the residuals bend with size or tokens (F test, p ="
            f" {p_value:.1g}); the intervals of `optimal` and `predict` include drift, those of"
            " `posterior` and `bootstrap` assume the law"
        )
    for name in newton.list_constants_at_bound(problem, theta):
        value = problem.to_constants(theta)[CONSTANTS.index(name)]
        messages.append(
            f"{name} = {value:.4g} is at its bound or has vanished: the data do not determine it"
        )
    spread = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    outliers = np.flatnonzero(np.abs(errors) > np.maximum(OUTLIER_SPREADS * spread, 1e-6))
    # A robust fit of few runs passes through most of them, so the other runs look like outliers.
    if 0 < len(outliers) <= len(errors) // 4 and len(runs) >= 3 * FEWEST_RUNS:
        rows = list_some(runs.rows[i] for i in outliers)
        messages.append(
            f"column 'loss' in rows {rows} is more than {OUTLIER_SPREADS} standard deviations"
            f" ({spread:.2g} in log loss) from the law: check those runs, or drop them with"
            " without_highest"
        )
    return messages

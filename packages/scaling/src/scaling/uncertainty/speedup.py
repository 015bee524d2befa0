"""The factor of compute that one training recipe saves over another, with an interval.

At the optimum, the reducible loss of a law is one power of compute, K (C / 6)^-gamma, so the
compute that reaches a loss is a closed form. One percent of loss is many percent of compute.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from scaling.fit.parametric import ParametricFit
from scaling.law import CONSTANTS, Interval, optima_of, require_numbers
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array
from scaling.uncertainty.bootstrap import half_width
from scaling.uncertainty.diagnostics import lack_of_fit
from scaling.uncertainty.drift import normal_quantile


@dataclass(frozen=True)
class Speedup:
    """The second recipe needs `factor` times the compute to reach the first recipe's loss."""

    compute: float
    loss: float
    factor: float
    interval: Interval


def effective_speedup(a: ParametricFit, b: ParametricFit, compute: float) -> Speedup:
    """Return how much more compute `b` needs to reach the best loss of `a` with `compute` FLOPs.

    Both losses must be measured on the same text. The 95 % interval combines 1,000 pairs of
    resamples, the drift of both laws beyond their runs, and their lack of fit. The factor is inf if
    `b` never reaches the loss. If either fit has five runs the interval is (0, inf).
    """
    for fit in (a, b):
        if not isinstance(fit, ParametricFit):
            raise TypeError(
                f"expected the result of fit_parametric(runs), got {type(fit).__name__}"
            )
    require_numbers(compute=compute)
    if not compute > 0:
        raise ValueError(f"expected a positive compute, got {compute}")
    loss = a.law.optimal(compute).loss
    factor = float(_compute_to_reach(b.law.constants[None], np.array([loss]))[0]) / compute
    runs = min(len(a.runs), len(b.runs))
    if runs <= len(CONSTANTS):
        return Speedup(compute, loss, factor, Interval(0.0, math.inf))
    low, high = _resampled_interval(a, b, compute, runs - len(CONSTANTS))
    if not math.isfinite(factor):
        return Speedup(compute, loss, factor, Interval(math.exp(min(low, 600)), math.inf))
    missed = math.hypot(_law_error(a, compute), _law_error(b, compute * factor))
    law = b.law
    gamma = law.alpha * law.beta / (law.alpha + law.beta)
    # d log C = -dL / ((L - E) gamma)
    extra = normal_quantile(0.95) * missed * loss / ((loss - law.E) * gamma)
    center = math.log(factor)
    down = math.hypot(min(low - center, 0), extra)
    up = math.hypot(max(high - center, 0), extra)
    interval = Interval(math.exp(center - down), math.exp(min(center + up, 600)))
    return Speedup(compute, loss, factor, interval)


def _resampled_interval(
    a: ParametricFit, b: ParametricFit, compute: float, freedom: int
) -> tuple[float, float]:
    """Return the ends of the interval of the log factor by pairs of resamples."""
    losses = optima_of(a.resampled.constants, compute)[2]
    factors = np.sort(np.log(_compute_to_reach(b.resampled.constants, losses) / compute))
    sample_size = min(a.resampled.sample_size, b.resampled.sample_size)
    half = half_width(freedom, 0.95, sample_size)
    # Some values may be infinite, so quantiles are not interpolated.
    low, high = (float(factors[round(p * (len(factors) - 1))]) for p in ndtr([-half, half]))
    return low, high


def _compute_to_reach(constants: Array, loss: Array) -> Array:
    """Return the least compute (laws,) with which each law reaches each loss; inf below E."""
    e, _, _, alpha, beta = constants.T
    # The reducible loss at 6 FLOPs determines the power law.
    reducible = optima_of(constants, FLOPS_PER_PARAMETER_TOKEN)[2] - e
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        pairs = (reducible / np.maximum(loss - e, 0)) ** ((alpha + beta) / (alpha * beta))
    compute: Array = FLOPS_PER_PARAMETER_TOKEN * pairs
    return compute


def _law_error(fit: ParametricFit, compute: float) -> float:
    """Return the standard deviation of log loss beyond noise: drift and lack of fit."""
    decades = fit.drift.decades(compute) if math.isfinite(compute) else 0.0
    problem = fit.problem
    missed = lack_of_fit(problem, problem.from_law(fit.law), fit.residuals)
    return math.hypot(fit.drift.loss * decades, missed)

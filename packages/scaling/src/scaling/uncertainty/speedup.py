"""What factor of compute one recipe saves over another, with an interval.

Notable: of a law at its optimum the reducible loss is one power of compute, K (C / 6)^-gamma, so
the compute that reaches a loss is a closed form; a percent of loss is many percent of compute.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from scaling.fit.parametric import ParametricFit
from scaling.law import CONSTANTS, Interval, optima_of, require_numbers
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array
from scaling.uncertainty.bootstrap import reach
from scaling.uncertainty.doubts import lack_of_fit


@dataclass(frozen=True)
class Speedup:
    """`factor` times the compute is what the second recipe needs for the first one's loss."""

    compute: float
    loss: float
    factor: float
    interval: Interval


def effective_speedup(a: ParametricFit, b: ParametricFit, compute: float) -> Speedup:
    """How many times more compute `b` needs for the loss that `a` has at its best with `compute`.

    Both losses must be of the same text. The 95 % interval is that of 1,000 pairs of resamples, by
    t for as few runs as the smaller set has, widened by the drift of both laws beyond their runs,
    and by the lack of fit of each. inf where b never gets there; (0, inf) where five runs
    leave no degrees of freedom. ValueError for a compute that is not positive.
    """
    for fit in (a, b):
        if not isinstance(fit, ParametricFit):
            told = type(fit).__name__
            raise TypeError(f"a speedup needs what fit_parametric(runs) returns, not {told}")
    require_numbers(compute=compute)
    if not compute > 0:
        raise ValueError(f"compute = {compute}: must be positive")
    loss = a.law.optimal(compute).loss
    factor = float(_needed(b.law.constants[None], np.array([loss]))[0]) / compute
    reached = optima_of(a.resampled.constants, compute)[2]
    drawn = np.sort(np.log(_needed(b.resampled.constants, reached) / compute))
    runs = min(len(a.runs), len(b.runs))
    if runs <= len(CONSTANTS):
        return Speedup(compute, loss, factor, Interval(0.0, math.inf))
    half = reach(runs - len(CONSTANTS), 0.95, min(a.resampled.drawn, b.resampled.drawn))
    # Of values that may be infinite: no mean of two.
    low, high = (float(drawn[round(p * (len(drawn) - 1))]) for p in ndtr([-half, half]))
    missed = math.hypot(_lack(a, compute), _lack(b, compute * factor))
    law = b.law
    gamma = law.alpha * law.beta / (law.alpha + law.beta)
    if not math.isfinite(factor):
        return Speedup(compute, loss, factor, Interval(math.exp(min(low, 600)), math.inf))
    # d log C = -d L / ((L - E) gamma)
    more = 1.96 * missed * loss / ((loss - law.E) * gamma)
    center = math.log(factor)
    down, up = math.hypot(min(low - center, 0), more), math.hypot(max(high - center, 0), more)
    ends = Interval(math.exp(center - down), math.exp(min(center + up, 600)))
    return Speedup(compute, loss, factor, ends)


def _needed(constants: Array, loss: Array) -> Array:
    """(laws,) the least compute by which each law reaches each loss; inf below its E."""
    e, _, _, alpha, beta = constants.T
    # The reducible loss of the optimum is one power of compute: known at 6 FLOPs, known anywhere.
    reducible = optima_of(constants, FLOPS_PER_PARAMETER_TOKEN)[2] - e
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        pairs = (reducible / np.maximum(loss - e, 0)) ** ((alpha + beta) / (alpha * beta))
    needed: Array = FLOPS_PER_PARAMETER_TOKEN * pairs
    return needed


def _lack(fit: ParametricFit, compute: float) -> float:
    """Return the deviation of log loss beyond noise: drift past the runs, and lack of fit."""
    decades = fit.drift.decades(compute) if math.isfinite(compute) else 0.0
    problem = fit.problem
    missed = lack_of_fit(problem, problem.centered(fit.law), fit.residuals)
    return math.hypot(fit.drift.loss * decades, missed)

"""A second opinion on an interval: how much worse must the fit become before it leaves a value?

Notable: no resampling and no normality of the estimate; any quantity that a law implies is profiled
by holding it with a stiff spring, and every point found so lies on the profile exactly.
(Venzon and Moolgavkar 1988; the scaling of a robust objective: Ronchetti 1982.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.search import Estimate
from scaling.fit.varpro import Problem
from scaling.law import CONSTANTS, Interval, check_level
from scaling.runs import Array
from scaling.uncertainty.quantity import Quantity, quantity

POINTS = 12
"""On each side of the estimate."""


@dataclass(frozen=True, eq=False)
class Profile(ComparesArrays):
    """A curve of `deviance` against `values`; the interval is where it is below `threshold`."""

    name: str
    values: Array
    deviance: Array
    threshold: float
    interval: Interval


def profile(fit: Estimate, asked: str | Quantity, *, level: float = 0.95) -> Profile:
    """The profile of E, A, B, alpha, beta, "exponent" or a `Quantity`, and its interval.

    deviance(v) = 2 (Q(v) - Q_min) / kappa, where Q(v) is the least objective of all laws that imply
    v and kappa = mean(psi^2) / mean(psi') brings a robust loss to the scale of a likelihood; the
    threshold is the square of Student's t. An end that the data do not set is 0 or inf.
    """
    check_level(level)
    asked = quantity(asked) if isinstance(asked, str) else asked
    freedom = len(fit.runs) - len(CONSTANTS)
    if freedom <= 0:
        raise ValueError(f"{len(fit.runs)} runs leave no degrees of freedom; train more than five")
    problem = fit.problem
    # A LAD profile has a corner at every run; this delta rounds them off by less than they matter.
    delta = {"huber": fit.delta, "lad": 1e-4, "squares": math.inf}[fit.loss]
    best = newton.polish(problem, problem.centered(fit.law)[None], delta=delta).theta
    least = newton.objective(problem, best, delta)[0]
    kappa, variance = robust_scale(fit.residuals, delta, freedom)
    threshold = float(stdtrit(freedom, 0.5 + level / 2)) ** 2

    def implied(theta: Array) -> Array:
        return asked.of(problem.natural(theta))

    center = float(implied(best)[0])
    if float(np.abs(fit.residuals).max()) < 1e-9:
        # Runs without noise: the law is known to rounding, and the curve would be made of it.
        point = np.array([center])
        return Profile(asked.name, point, 0 * point, threshold, Interval(center, center, level))
    # The half-width that the curvature alone would give, as the unit of the search.
    unit = math.sqrt(variance * threshold) * curvature(problem, best, implied)
    values, deviance, ends = [np.array([center])], [np.zeros(1)], []
    for side in (-1, 1):
        reach, end = 2.0, math.nan
        while math.isnan(end):
            targets = center + side * unit * reach * np.arange(1, POINTS + 1) / POINTS
            if center > 0:
                targets = center * np.exp((targets - center) / center)
            spring = newton.Spring(implied, targets, 1e3 * kappa * threshold / unit**2)
            held = newton.polish(problem, np.tile(best, (POINTS, 1)), delta=delta, springs=[spring])
            v = implied(held.theta)
            d = 2 * (newton.objective(problem, held.theta, delta) - least) / kappa
            order = np.argsort(side * v)
            v, d = v[order], np.maximum.accumulate(np.maximum(d[order], 0))
            if d[-1] >= threshold:
                # The square root of the deviance is nearly a line.
                end = float(np.interp(math.sqrt(threshold), [0, *np.sqrt(d)], [center, *v]))
            elif reach > 100:
                end = math.inf if side > 0 else 0.0
            reach *= 3
        values.append(v)
        deviance.append(d)
        ends.append(end)
    v, d = np.concatenate(values), np.concatenate(deviance)
    order = np.argsort(v)
    return Profile(asked.name, v[order], d[order], threshold, Interval(ends[0], ends[1], level))


def curvature(problem: Problem, theta: Array, implied: Callable[[Array], Array]) -> float:
    """The deviation of what (1, P) constants imply, by their curvature, for a unit of noise."""
    slope, jacobian = newton.slopes(implied, theta)[0], newton.sensitivity(problem, theta[0])
    spread = slope @ np.linalg.pinv(jacobian @ jacobian.T, rcond=1e-15) @ slope
    return math.sqrt(abs(float(spread)))


def robust_scale(errors: Array, delta: float, freedom: int) -> tuple[float, float]:
    """kappa = mean(psi^2) / mean(psi'), and the variance of log loss that is worth as much.

    The latter is mean(psi^2) / mean(psi')^2: with delta = inf both are the variance itself. A
    robust fit meets about five runs exactly, which say nothing of the noise and are left out; few
    errors lie within a narrow delta, so psi' is counted over a wider band.
    """
    size = np.sort(np.abs(errors))[-freedom:]
    spread = 1.4826 * float(np.median(size))
    band = max(delta, spread * len(size) ** -0.2)
    inside = float((size <= band).mean()) * (delta / band if math.isfinite(delta) else 1)
    kappa = float((np.minimum(np.abs(errors), delta) ** 2).sum()) / freedom / inside
    return kappa, kappa / inside

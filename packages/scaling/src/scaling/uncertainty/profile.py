"""Profile intervals: the values of a quantity for which the law still fits the runs.

Note [Profile by penalties]
The deviance of a value v is 2 (Q(v) - Q_min) / kappa, where Q(v) is the least objective of all laws
that imply v. The interval contains the values whose deviance is below the square of Student's t
(Venzon and Moolgavkar 1988). kappa = mean(psi^2) / mean(psi') brings the objective of a robust fit
to the scale of a likelihood (Ronchetti 1982). A stiff penalty holds the quantity near a target, so
any quantity that a law implies can be profiled. The minimum need not match the target exactly: with
the value that it does imply, it is a point of the profile. Unlike the bootstrap this needs no
resamples, and unlike a Wald interval it does not assume that the estimate is normal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.search import Estimate, Loss
from scaling.fit.varpro import Problem
from scaling.law import CONSTANTS, Interval, check_level
from scaling.runs import Array
from scaling.uncertainty.quantity import Quantity, named_quantity

#: Number of points of a profile on each side of the estimate.
POINTS = 12

#: An end is unbounded if the deviance stays low up to this many half-widths from the estimate.
FARTHEST = 100


@dataclass(frozen=True, eq=False)
class Profile(ComparesArrays):
    """The `deviance` of `values` of a quantity; the interval is where it is below `threshold`."""

    name: str
    values: Array
    deviance: Array
    threshold: float
    interval: Interval


def profile(fit: Estimate, target: str | Quantity, *, level: float = 0.95) -> Profile:
    """Return the profile of a constant, of "exponent", or of any `Quantity`, and its interval.

    See Note [Profile by penalties]. An end that the runs do not determine is 0 or inf.
    """
    check_level(level)
    target = named_quantity(target) if isinstance(target, str) else target
    freedom = len(fit.runs) - len(CONSTANTS)
    if freedom <= 0:
        raise ValueError(f"{len(fit.runs)} runs leave no degrees of freedom; train more than five")
    curve = _Curve.of(fit, target, freedom, level)
    center = np.array([curve.center])
    if float(np.abs(fit.residuals).max()) < 1e-9:
        # Without noise the profile would consist of rounding errors.
        interval = Interval(curve.center, curve.center, level)
        return Profile(target.name, center, np.zeros(1), curve.threshold, interval)
    low, values_below, deviance_below = curve.trace(-1)
    high, values_above, deviance_above = curve.trace(1)
    values = np.concatenate([center, values_below, values_above])
    deviance = np.concatenate([np.zeros(1), deviance_below, deviance_above])
    order = np.argsort(values)
    interval = Interval(low, high, level)
    return Profile(target.name, values[order], deviance[order], curve.threshold, interval)


@dataclass(frozen=True)
class _Curve:
    """The deviance of a quantity about its estimate."""

    problem: Problem
    implied: Callable[[Array], Array]
    delta: float
    #: The parameters of the best law, (1, P), its objective, and the quantity it implies.
    best: Array
    least: float
    center: float
    kappa: float
    threshold: float
    #: The half-width of the interval by the curvature alone: the unit of the search.
    half_width: float

    @staticmethod
    def of(fit: Estimate, target: Quantity, freedom: int, level: float) -> "_Curve":
        problem = fit.problem
        delta = smooth_delta(fit.loss, fit.delta)
        best = newton.polish(problem, problem.from_law(fit.law)[None], delta=delta).theta
        kappa, variance = robust_scale(fit.residuals, delta, freedom)
        threshold = float(stdtrit(freedom, 0.5 + level / 2)) ** 2

        def implied(theta: Array) -> Array:
            return target.evaluate(problem.to_constants(theta))

        deviation = curvature_deviation(problem, best, implied)
        return _Curve(
            problem,
            implied,
            delta,
            best,
            float(newton.objective(problem, best, delta)[0]),
            float(implied(best)[0]),
            kappa,
            threshold,
            math.sqrt(variance * threshold) * deviation,
        )

    def trace(self, side: int) -> tuple[float, Array, Array]:
        """Return the end of the interval on one side (-1 or 1), and the points of the profile."""
        distance = 2.0
        while True:
            values, deviance = self._points(side, distance)
            if deviance[-1] >= self.threshold:
                # The square root of the deviance is nearly linear in the value.
                roots = [0, *np.sqrt(deviance)]
                end = np.interp(math.sqrt(self.threshold), roots, [self.center, *values])
                return float(end), values, deviance
            if distance > FARTHEST:
                return (math.inf if side > 0 else 0.0), values, deviance
            distance *= 3

    def _points(self, side: int, distance: float) -> tuple[Array, Array]:
        """Return values up to `distance` half-widths on one side, and their deviance."""
        steps = side * self.half_width * distance * np.arange(1, POINTS + 1) / POINTS
        if self.center > 0:
            targets = self.center * np.exp(steps / self.center)
        else:
            targets = self.center + steps
        stiffness = 1e3 * self.kappa * self.threshold / self.half_width**2
        penalty = newton.Penalty(self.implied, targets, stiffness)
        starts = np.tile(self.best, (POINTS, 1))
        ends = newton.polish(self.problem, starts, delta=self.delta, penalties=[penalty])
        values = self.implied(ends.theta)
        objective = newton.objective(self.problem, ends.theta, self.delta)
        deviance = 2 * (objective - self.least) / self.kappa
        order = np.argsort(side * values)
        return values[order], np.maximum.accumulate(np.maximum(deviance[order], 0))


def smooth_delta(loss: Loss, delta: float) -> float:
    """Return the Huber delta with which a fit's objective is smooth enough for a profile.

    The profile of least absolute deviations has a corner at every run; a small delta rounds it.
    """
    return {"huber": delta, "lad": 1e-4, "squares": math.inf}[loss]


def curvature_deviation(problem: Problem, theta: Array, implied: Callable[[Array], Array]) -> float:
    """Return the standard deviation of an implied quantity at unit noise, by linearization.

    `theta` is one parameter vector, (1, P).
    """
    gradient = newton.numerical_gradient(implied, theta)[0]
    jacobian = newton.log_jacobian(problem, theta[0])
    variance = gradient @ np.linalg.pinv(jacobian @ jacobian.T, rcond=1e-15) @ gradient
    return math.sqrt(abs(float(variance)))


def robust_scale(errors: Array, delta: float, freedom: int) -> tuple[float, float]:
    """Return kappa = mean(psi^2) / mean(psi'), and the equivalent variance of log loss.

    The variance is mean(psi^2) / mean(psi')^2. With delta = inf both are the variance itself. A
    robust fit passes through about five runs exactly. These say nothing about the noise and are
    left out. Few errors lie within a narrow delta, so psi' is counted over a wider band.
    """
    size = np.sort(np.abs(errors))[-freedom:]
    spread = 1.4826 * float(np.median(size))
    band = max(delta, spread * len(size) ** -0.2)
    inside = float((size <= band).mean()) * (delta / band if math.isfinite(delta) else 1)
    kappa = float((np.minimum(np.abs(errors), delta) ** 2).sum()) / freedom / inside
    return kappa, kappa / inside

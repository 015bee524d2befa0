"""A batched Newton method for robust fits of the law: a whole bootstrap is one call.

Notable: with the exact Hessian a refit takes about ten steps, and the fallback is a step of
iteratively reweighted least squares, which always descends. (Huber 1964; Levenberg 1944.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.equality import ComparesArrays
from scaling.fit.varpro import Problem
from scaling.runs import Array

VANISHED = 18.0
"""A term within e^18 of its least amplitude has left the family: its exponent is free."""


def vanished(problem: Problem, theta: Array) -> NDArray[np.bool_]:
    """(S, K) whether each term of each law is as good as absent; none that is plain or fixed."""
    gone: NDArray[np.bool_] = (
        theta[:, : problem.count] <= problem.bounds[0][: problem.count] + VANISHED
    )
    asked = sorted({*problem.logarithmic} & {*problem.free})
    gone[:, [k for k in range(problem.count) if k not in asked]] = False
    return gone


@dataclass(frozen=True, eq=False)
class Spring(ComparesArrays):
    """stiffness / 2 (implied(theta) - target)^2, added to each objective to hold a quantity."""

    implied: Callable[[Array], Array]
    targets: Array
    """One for each problem, or a single one for all."""
    stiffness: float

    def energy(self, theta: Array, rows: NDArray[np.intp]) -> Array:
        """(S,) what it adds to the problems at `rows`."""
        return 0.5 * self.stiffness * (self.implied(theta) - self._target(rows)) ** 2

    def derivatives(self, theta: Array, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """(S, P) gradient and (S, P, P) Gauss-Newton Hessian of the energy."""
        slope = slopes(self.implied, theta)
        pull = self.stiffness * (self.implied(theta) - self._target(rows))
        return pull[:, None] * slope, self.stiffness * slope[:, :, None] * slope[:, None, :]

    def _target(self, rows: NDArray[np.intp]) -> Array:
        return self.targets[rows] if len(self.targets) > 1 else self.targets


@dataclass(frozen=True)
class Polished:
    """Where each problem of a batch ended, and whether it came to rest there."""

    theta: Array
    objective: Array
    converged: NDArray[np.bool_]
    steps: int


def polish(
    problem: Problem,
    starts: Array,
    *,
    delta: float,
    weights: Array | None = None,
    springs: Sequence[Spring] = (),
    max_steps: int = 200,
) -> Polished:
    """Minimize the sum of Huber losses from each of (S, P) starts, S problems at a time.

    `weights` (S, n) counts each run, as a bootstrap does; `springs` hold each problem near their
    targets. A step p solves (H + lambda W) p = -g with the exact Hessian H and the reweighted
    least-squares matrix W: lambda -> 0 is Newton's method, a large lambda a short step that is sure
    to descend. A step that does not descend is not taken, and lambda grows.
    """
    count, n = len(starts), len(problem.z)
    rows = np.ones((count, 1)) if weights is None else weights
    theta = np.clip(starts, *problem.bounds)
    value = np.empty(count)
    done = np.zeros(count, dtype=bool)
    steps = 0
    chunk = max(8, 24_000 // n)  # a chunk's dozen (chunk, n) arrays stay in the cache
    for low in range(0, count, chunk):
        index = np.arange(low, min(low + chunk, count))
        taken = _newton(problem, theta, value, done, index, rows, delta, springs, max_steps)
        steps = max(steps, taken)
    return Polished(theta, value, done, steps)


def objective(problem: Problem, theta: Array, delta: float) -> Array:
    """(S,) sums of Huber losses of the log residuals; delta = inf gives half the squares."""
    return _Point.at(problem, theta, np.ones((1, 1)), delta).objective


def residuals(problem: Problem, theta: Array) -> Array:
    """(S, n) log of predicted over observed loss."""
    return _Point.at(problem, theta, np.ones((1, 1)), np.inf).r


def sensitivity(problem: Problem, theta: Array) -> Array:
    """(P, n) slopes of each run's log predicted loss in the parameters of one law."""
    point = _Point.at(problem, theta[None], np.ones((1, 1)), np.inf)
    slope: Array = _jacobian(problem, theta[None], point)[0][0]
    return slope


def slopes(function: Callable[[Array], Array], theta: Array) -> Array:
    """(S, P) gradient of a function of the parameters, by central differences."""
    steps = 1e-6 * np.eye(theta.shape[1])
    return np.stack([(function(theta + h) - function(theta - h)) / 2e-6 for h in steps], axis=-1)


@dataclass
class _Point:
    """A batch at one place: (S, K, n) shares of the terms in the sum, or where an amplitude is
    plain its slope; residuals; logs of the sum; objective."""

    share: Array
    r: Array
    log_sum: Array
    objective: Array

    @staticmethod
    def at(problem: Problem, theta: Array, weights: Array, delta: float) -> "_Point":
        share = np.empty((len(theta), problem.count, len(problem.z)))
        total = np.zeros((len(theta), len(problem.z)))
        for k, log in enumerate(problem.terms(theta).logs):
            if k in problem.logarithmic:
                np.exp(theta[:, k, None] + log, out=share[:, k])
                if problem.signs[k] < 0:
                    share[:, k] *= -1
                total += share[:, k]
            else:
                share[:, k] = problem.signs[k] * np.exp(log)
                total += theta[:, k, None] * share[:, k]
        # A law that is negative somewhere is worse than any: no step goes there.
        negative = total <= 0
        total[negative] = 1.0
        share /= total[:, None]
        log_sum = np.log(total)
        power = theta[:, [problem.power]] if problem.power else 1.0
        r = power * log_sum - (problem.z - problem.level)
        r[negative] = 1e3
        size = np.abs(r)
        inside = np.minimum(size, delta)
        weights = problem.weigh(weights, r)
        return _Point(share, r, log_sum, (weights * inside * (size - 0.5 * inside)).sum(1))

    def take(self, new: "_Point", where: NDArray[np.bool_]) -> None:
        for name in ("share", "r", "log_sum", "objective"):
            getattr(self, name)[where] = getattr(new, name)[where]

    def only(self, where: NDArray[np.bool_]) -> "_Point":
        return _Point(*(a[where] for a in (self.share, self.r, self.log_sum, self.objective)))


def _newton(
    problem: Problem,
    result: Array,
    value: Array,
    done: NDArray[np.bool_],
    index: NDArray[np.intp],
    weights: Array,
    delta: float,
    springs: Sequence[Spring],
    max_steps: int,
) -> int:
    """Polish the problems at `index` of `result` in place; those that end leave the batch."""
    theta = result[index]
    lowest, highest = problem.bounds
    weights = weights[index] if len(weights) > 1 else weights
    point = _Point.at(problem, theta, weights, delta)
    for spring in springs:
        point.objective += spring.energy(theta, index)
    damping = np.full(len(index), 0.1)
    for step in range(1, max_steps + 1):
        gradient, hessian = _derivatives(problem, theta, point, weights, delta, damping)
        for spring in springs:
            force, stiffness = spring.derivatives(theta, index)
            gradient += force
            hessian += stiffness
        pinned = ((theta <= lowest) & (gradient > 0)) | ((theta >= highest) & (gradient < 0))
        move = _solve(gradient, hessian, pinned)
        trial = np.clip(theta + move, lowest, highest)
        new = _Point.at(problem, trial, weights, delta)
        for spring in springs:
            new.objective += spring.energy(trial, index)
        expected = -((trial - theta) * gradient).sum(1)
        better = (expected > 0) & (new.objective <= point.objective)
        theta[better] = trial[better]
        point.take(new, better)
        small = np.abs(expected) <= 1e-13 * point.objective + 1e-30
        ended = (small & (damping <= 1)) | (damping > 1e12)
        damping = np.where(better, damping * 0.2, damping * 8.0)
        if ended.any():
            out, left = index[ended], ~ended
            result[out], value[out], done[out] = theta[ended], point.objective[ended], True
            index, theta, damping, point = index[left], theta[left], damping[left], point.only(left)
            weights = weights[left] if len(weights) > 1 else weights
            if not len(index):
                return step
    result[index], value[index] = theta, point.objective
    return max_steps


def _solve(gradient: Array, hessian: Array, pinned: NDArray[np.bool_]) -> Array:
    """The Newton step; a parameter that pushes against its bound, pinned, stays."""
    gradient[pinned] = 0
    hessian[pinned[:, :, None] | pinned[:, None, :]] = 0
    diagonal = np.einsum("sii->si", hessian)
    diagonal[pinned] = 1
    scale = np.sqrt(np.maximum(np.abs(diagonal), 1e-300))
    scaled = hessian / (scale[:, :, None] * scale[:, None, :]) + 1e-14 * np.eye(hessian.shape[1])
    try:
        move = -np.linalg.solve(scaled, (gradient / scale)[..., None])[..., 0] / scale
    except np.linalg.LinAlgError:  # fewer rows than parameters
        scaled += 1e-10 * np.eye(hessian.shape[1])
        move = -np.linalg.solve(scaled, (gradient / scale)[..., None])[..., 0] / scale
    step: Array = np.clip(move, -2.0, 2.0)
    return step


Slope = tuple[int, int, Array]
"""A term, where theta has one of its exponents, and the slope of the term's log in it."""


def _jacobian(problem: Problem, theta: Array, point: _Point) -> tuple[Array, list[Slope]]:
    """(S, P, n) slopes of log predicted y, and those of the terms that they are made of."""
    jacobian = np.zeros((len(theta), theta.shape[1], len(problem.z)))
    jacobian[:, : problem.count] = point.share
    slopes = []
    for k, by_exponent in enumerate(problem.terms(theta, slopes=True).slopes):
        for j, slope in by_exponent.items():
            jacobian[:, problem.count + j] += point.share[:, k] * slope
            slopes.append((k, problem.count + j, slope))
    if problem.power:
        jacobian *= theta[:, [problem.power], None]
        jacobian[:, problem.power] += point.log_sum
    return jacobian, slopes


def _derivatives(
    problem: Problem, theta: Array, point: _Point, weights: Array, delta: float, damping: Array
) -> tuple[Array, Array]:
    """Gradient (S, P) and damped Hessian (S, P, P) of the objective, exact where the logs of the
    terms are linear in the exponents and the sum has no power."""
    r, size = point.r, np.abs(point.r)
    jacobian, slopes = _jacobian(problem, theta, point)
    weights = problem.weigh(weights, r)
    pull = weights * np.clip(r, -delta, delta)
    reweighted = weights * (delta / np.maximum(size, delta) if np.isfinite(delta) else 1.0)
    # r is the logarithm of the law m, so its second derivatives are m'' / m less J J'.
    curvature = np.where(size <= delta, weights, 0.0) + damping[:, None] * reweighted
    if problem.power:
        curvature = curvature - pull / theta[:, [problem.power]]
        pull_on_terms = pull * theta[:, [problem.power]]
    else:
        curvature, pull_on_terms = curvature - pull, pull
    gradient = (jacobian @ pull[..., None])[..., 0]
    hessian = (jacobian * curvature[:, None]) @ jacobian.transpose(0, 2, 1)
    for k in problem.logarithmic:
        second = pull_on_terms * point.share[:, k]
        hessian[:, k, k] += second.sum(1)
        of_term = [(i, slope) for term, i, slope in slopes if term == k]
        for at, (i, slope) in enumerate(of_term):
            moment = _sum(second, slope)
            hessian[:, k, i] += moment
            hessian[:, i, k] += moment
            for j, other in of_term[at:]:
                both = _sum(second, slope * other)
                hessian[:, i, j] += both
                if j != i:
                    hessian[:, j, i] += both
    return gradient, hessian


def _sum(weights: Array, values: Array) -> Array:
    """(S,) of (S, n), the values perhaps the same for all."""
    total: Array = weights @ values[0] if len(values) == 1 else (weights * values).sum(1)
    return total

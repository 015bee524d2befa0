"""A batched Newton method for robust fits of the law: a whole bootstrap is one call.

Notable: with the exact Hessian a refit takes about ten steps, and the fallback is a step of
iteratively reweighted least squares, which always descends. (Huber 1964; Levenberg 1944.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.fit.varpro import Problem
from scaling.runs import Array

# Bounds of (E, a, b, alpha, beta), see `Problem`; a and b are relative to the losses' spread.
LOWEST = np.array([0.0, -30.0, -30.0, 0.02, 0.02])
HIGHEST = np.array([np.inf, 30.0, 30.0, 3.0, 3.0])

VANISHED = -12.0
"""A term below e^-12 of the losses' spread has left the family: its exponent is free."""


def bounds(problem: Problem) -> tuple[Array, Array]:
    """The least and the largest (E, a, b, alpha, beta)."""
    shift = np.log(max(problem.spread, 1e-16)) * np.array([0.0, 1.0, 1.0, 0.0, 0.0])
    return LOWEST + shift, HIGHEST + np.maximum(shift, 0)


def vanished(problem: Problem, theta: Array) -> NDArray[np.bool_]:
    """(S, 2) whether the A and the B term of each law is as good as absent."""
    gone: NDArray[np.bool_] = theta[:, 1:3] <= bounds(problem)[0][1:3] + VANISHED - LOWEST[1]
    return gone


@dataclass(frozen=True)
class Spring:
    """stiffness / 2 (implied(theta) - target)^2, added to each objective to hold a quantity."""

    implied: Callable[[Array], Array]
    targets: Array
    stiffness: float

    def energy(self, theta: Array, rows: NDArray[np.intp]) -> Array:
        """(S,) what it adds to the problems at `rows`."""
        return 0.5 * self.stiffness * (self.implied(theta) - self.targets[rows]) ** 2

    def derivatives(self, theta: Array, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """(S, 5) gradient and (S, 5, 5) Gauss-Newton Hessian of the energy."""
        slope = slopes(self.implied, theta)
        pull = self.stiffness * (self.implied(theta) - self.targets[rows])
        return pull[:, None] * slope, self.stiffness * slope[:, :, None] * slope[:, None, :]


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
    spring: Spring | None = None,
    max_steps: int = 200,
) -> Polished:
    """Minimize the sum of Huber losses from each of (S, 5) starts, S problems at a time.

    `weights` (S, n) counts each run, as a bootstrap does; a `spring` holds each problem near its
    target. A step p solves (H + lambda W) p = -g with the exact Hessian H and the reweighted
    least-squares matrix W: lambda -> 0 is Newton's method, a large lambda a short step that is sure
    to descend. A step that does not descend is not taken, and lambda grows.
    """
    count, n = len(starts), len(problem.z)
    rows = np.ones((count, 1)) if weights is None else weights
    theta = np.clip(starts, *bounds(problem))
    value = np.empty(count)
    done = np.zeros(count, dtype=bool)
    steps = 0
    chunk = max(8, 24_000 // n)  # a chunk's dozen (chunk, n) arrays stay in the cache
    for low in range(0, count, chunk):
        index = np.arange(low, min(low + chunk, count))
        taken = _newton(problem, theta, value, done, index, rows, delta, spring, max_steps)
        steps = max(steps, taken)
    return Polished(theta, value, done, steps)


def objective(problem: Problem, theta: Array, delta: float) -> Array:
    """(S,) sums of Huber losses of the log residuals; delta = inf gives half the squares."""
    return _Point.at(problem, theta, np.ones((1, 1)), delta).objective


def residuals(problem: Problem, theta: Array) -> Array:
    """(S, n) log of predicted over observed loss."""
    return _Point.at(problem, theta, np.ones((1, 1)), np.inf).r


def sensitivity(problem: Problem, theta: Array) -> Array:
    """(5, n) slopes of each run's log predicted loss in the parameters of one law."""
    point = _Point.at(problem, theta[None], np.ones((1, 1)), np.inf)
    slope: Array = _jacobian(problem, point.share)[0]
    return slope


def slopes(function: Callable[[Array], Array], theta: Array) -> Array:
    """(S, 5) gradient of a function of the parameters, by central differences."""
    steps = 1e-6 * np.eye(5)
    return np.stack([(function(theta + h) - function(theta - h)) / 2e-6 for h in steps], axis=-1)


@dataclass
class _Point:
    """A batch at one place: (S, 3, n) shares of the three terms, residuals, objective."""

    share: Array
    r: Array
    objective: Array

    @staticmethod
    def at(problem: Problem, theta: Array, weights: Array, delta: float) -> _Point:
        e, a, b, alpha, beta = theta.T[:, :, None]
        share = np.empty((len(theta), 3, len(problem.z)))
        share[:, 0] = 1.0
        np.exp(a - alpha * problem.x, out=share[:, 1])
        np.exp(b - beta * problem.y, out=share[:, 2])
        loss = e + share[:, 1] + share[:, 2]
        share /= loss[:, None]
        r = np.log(loss) - problem.z
        size = np.abs(r)
        inside = np.minimum(size, delta)
        return _Point(share, r, (weights * inside * (size - 0.5 * inside)).sum(1))

    def take(self, new: _Point, where: NDArray[np.bool_]) -> None:
        for name in ("share", "r", "objective"):
            getattr(self, name)[where] = getattr(new, name)[where]

    def only(self, where: NDArray[np.bool_]) -> _Point:
        return _Point(self.share[where], self.r[where], self.objective[where])


def _newton(
    problem: Problem,
    result: Array,
    value: Array,
    done: NDArray[np.bool_],
    index: NDArray[np.intp],
    weights: Array,
    delta: float,
    spring: Spring | None,
    max_steps: int,
) -> int:
    """Polish the problems at `index` of `result` in place; those that end leave the batch."""
    theta = result[index]
    lowest, highest = bounds(problem)
    weights = weights[index] if len(weights) > 1 else weights
    point = _Point.at(problem, theta, weights, delta)
    if spring:
        point.objective += spring.energy(theta, index)
    damping = np.full(len(index), 0.1)
    for step in range(1, max_steps + 1):
        gradient, hessian = _derivatives(problem, point, weights, delta, damping)
        if spring:
            force, stiffness = spring.derivatives(theta, index)
            gradient += force
            hessian += stiffness
        pinned = ((theta <= lowest) & (gradient > 0)) | ((theta >= highest) & (gradient < 0))
        move = _solve(gradient, hessian, pinned)
        trial = np.clip(theta + move, lowest, highest)
        new = _Point.at(problem, trial, weights, delta)
        if spring:
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
    scaled = hessian / (scale[:, :, None] * scale[:, None, :]) + 1e-14 * np.eye(5)
    move = -np.linalg.solve(scaled, (gradient / scale)[..., None])[..., 0] / scale
    step: Array = np.clip(move, -2.0, 2.0)
    return step


def _jacobian(problem: Problem, share: Array) -> Array:
    jacobian = np.empty((len(share), 5, len(problem.z)))
    jacobian[:, :3] = share
    np.multiply(share[:, 1], -problem.x, out=jacobian[:, 3])
    np.multiply(share[:, 2], -problem.y, out=jacobian[:, 4])
    return jacobian


def _derivatives(
    problem: Problem, point: _Point, weights: Array, delta: float, damping: Array
) -> tuple[Array, Array]:
    """Gradient (S, 5) and damped Hessian (S, 5, 5) of the objective."""
    r, size = point.r, np.abs(point.r)
    jacobian = _jacobian(problem, point.share)
    pull = weights * np.clip(r, -delta, delta)
    reweighted = weights * (delta / np.maximum(size, delta) if np.isfinite(delta) else 1.0)
    # r is the logarithm of the loss m, so its second derivatives are m'' / m less J J'.
    curvature = np.where(size <= delta, weights, 0.0) - pull + damping[:, None] * reweighted
    gradient = (jacobian @ pull[..., None])[..., 0]
    hessian = (jacobian * curvature[:, None]) @ jacobian.transpose(0, 2, 1)
    for i, log_size in ((1, problem.x), (2, problem.y)):
        second = pull * point.share[:, i]
        first_moment = -(second @ log_size)
        hessian[:, i, i] += second.sum(1)
        hessian[:, i, i + 2] += first_moment
        hessian[:, i + 2, i] += first_moment
        hessian[:, i + 2, i + 2] += second @ log_size**2
    return gradient, hessian

"""Which runs to train next, so that the interval at a target shrinks most for the compute spent.

Notable: to first order a run narrows the interval by one rank-one update that needs no training, so
thousands of plans are compared in milliseconds. (Fedorov 1972; c-optimal design.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaling.fit import newton
from scaling.fit.parametric import ParametricFit
from scaling.fit.varpro import Problem
from scaling.law import CONSTANTS
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array
from scaling.uncertainty.profile import robust_scale
from scaling.uncertainty.quantity import Quantity, optimum


@dataclass(frozen=True)
class Design:
    """Runs to train, and what they are expected to do for the quantity asked."""

    quantity: str
    parameters: Array
    tokens: Array
    compute: Array
    factor_before: float
    """The 95 % interval of the quantity reaches from estimate / factor to estimate * factor."""
    factor_after: float


def design(
    fit: ParametricFit,
    *,
    budget: float,
    target: float | Quantity,
    runs: int = 8,
    tokens_per_parameter: tuple[float, float] = (1.0, 1000.0),
) -> Design:
    """At most `runs` runs, for up to `budget` FLOPs, that tell most of the best size at `target`.

    `target` may be any positive `Quantity` instead. Every number of equally dear runs is tried;
    each takes the size, and a part of its share of the budget, that leaves the least variance c'
    (sum J J')^-1 c, c the slopes of the quantity's logarithm; then each is exchanged for a better
    one while there is one. No run is smaller or shorter than those of the fit: there the law is not
    known to hold. The factors are for least squares on runs as noisy as those of the fit.
    """
    if not (budget > 0 and runs >= 1):
        raise ValueError(
            f"budget = {budget}, runs = {runs}: need some compute and at least one run"
        )
    asked = target if isinstance(target, Quantity) else optimum("parameters", target)
    problem = Problem.of(fit.runs)
    theta = problem.centered(fit.law)
    jacobian = newton.sensitivity(problem, theta)
    known = jacobian @ jacobian.T
    slope = newton.slopes(lambda t: np.log(asked.of(problem.natural(t))), theta[None])[0]
    plans = []
    for count in range(1, runs + 1):
        n, c = _candidates(budget / count, tokens_per_parameter, fit)
        if not len(n):
            break
        d = c / (FLOPS_PER_PARAMETER_TOKEN * n)
        new = Problem(np.log(n) - problem.x_mean, np.log(d) - problem.y_mean, 0 * n, 0, 0)
        variance, chosen = _greedy(known, newton.sensitivity(new, theta), slope, count)
        plans.append((variance, n[chosen], d[chosen], c[chosen]))
    if not plans:
        raise ValueError(
            f"budget = {budget:.3g} buys no run of {fit.runs.parameters.min():.3g} parameters and "
            f"{fit.runs.tokens.min():.3g} tokens, the least of the fit, at {tokens_per_parameter}"
            " tokens a parameter"
        )
    variance, n, d, c = min(plans, key=lambda plan: plan[0])
    freedom = max(len(fit.runs) - len(CONSTANTS), 1)
    unit = float(stdtrit(freedom, 0.975)) * math.sqrt(_noise(fit, freedom))
    before = math.sqrt(float(slope @ np.linalg.solve(known, slope)))
    factors = (math.exp(min(unit * s, 600.0)) for s in (before, math.sqrt(variance)))
    return Design(asked.name, n, d, c, *factors)


def _noise(fit: ParametricFit, freedom: int) -> float:
    """The variance of log loss that makes least squares as sure as this fit is."""
    delta = {"huber": fit.delta, "lad": 1e-4, "squares": math.inf}[fit.loss]
    return robust_scale(fit.residuals, delta, freedom)[1]


def _candidates(
    share: float, tokens_per_parameter: tuple[float, float], fit: ParametricFit
) -> tuple[Array, Array]:
    """Sizes and costs of what one run may be: its whole share of the budget, or a part of it."""
    low, high = tokens_per_parameter
    sizes, costs = [], []
    for cost in share * 2.0 ** -np.arange(8):
        pairs = cost / FLOPS_PER_PARAMETER_TOKEN
        # D / N between low and high, with N D = pairs.
        grid = np.geomspace(math.sqrt(pairs / high), math.sqrt(pairs / low), 49)
        inside = (grid >= fit.runs.parameters.min()) & (pairs / grid >= fit.runs.tokens.min())
        sizes.append(grid[inside])
        costs.append(np.full(inside.sum(), cost))
    return np.concatenate(sizes), np.concatenate(costs)


def _greedy(known: Array, jacobian: Array, slope: Array, count: int) -> tuple[float, list[int]]:
    """Pick `count` columns of (5, m) one after the other, then exchange while it helps."""
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(_best(known, jacobian, slope, chosen)[1])
    variance = math.inf
    while True:
        for _ in range(count):
            now, pick = _best(known, jacobian, slope, chosen[1:])
            chosen = [*chosen[1:], pick]
        if now >= variance * (1 - 1e-9):
            return variance, chosen
        variance = now


def _best(known: Array, jacobian: Array, slope: Array, chosen: list[int]) -> tuple[float, int]:
    """The column that leaves the least variance beside those chosen, by Sherman and Morrison."""
    inside = jacobian[:, chosen]
    inverse = np.linalg.inv(known + inside @ inside.T)
    gain = (slope @ inverse @ jacobian) ** 2 / (
        1 + np.einsum("im,ij,jm->m", jacobian, inverse, jacobian)
    )
    pick = int(np.argmax(gain))
    return float(slope @ inverse @ slope - gain[pick]), pick

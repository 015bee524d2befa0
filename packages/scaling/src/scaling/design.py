"""Which runs to train next, so that the interval at a target shrinks most for the compute spent.

Notable: to first order a run narrows the interval by one rank-one update that needs no training, so
thousands of plans are compared in milliseconds; that the law may bend is five more terms of which
little is known, so that copies of one run tell little of it. (Fedorov 1972, c-optimal design;
DuMouchel and Jones 1994, potential terms.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.parametric import ParametricFit
from scaling.fit.varpro import Problem
from scaling.law import CONSTANTS
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs
from scaling.uncertainty.doubts import bends
from scaling.uncertainty.profile import robust_scale
from scaling.uncertainty.quantity import Quantity, optimum


@dataclass(frozen=True, eq=False)
class Design(ComparesArrays):
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
    tokens_per_parameter: tuple[float, float] = (5.0, 200.0),
    largest: float = math.inf,
    apart: float = 1.25,
    discrepancy: float = 1.0,
) -> Design:
    """At most `runs` runs, for up to `budget` FLOPs, that tell most of the best size at `target`.

    `target` may be any positive `Quantity` instead. Every number of equally dear runs is tried;
    each takes the size, and a part of its share of the budget, that leaves the least variance c'
    (sum J J')^-1 c, c the slopes of the quantity's logarithm; then each is exchanged for a better
    one while there is one.

    None costs more than `largest` FLOPs, lies outside `tokens_per_parameter`, within a factor
    `apart` of another in both size and tokens, or below the smallest or shortest run of the fit,
    where the law is not known to hold. The law may bend by `discrepancy` deviations of a run's
    noise, as second and third powers of log N and log D; 0 trusts it. The factors are for least
    squares on runs as noisy as those of the fit.
    """
    numbers = {"largest": largest, "apart": apart, "discrepancy": discrepancy}
    low, high = tokens_per_parameter
    if not 0 < low < high < math.inf:
        raise ValueError(f"tokens_per_parameter = {low, high}: the least and the most, finite")
    if not (
        0 < budget < math.inf and runs >= 1 and largest > 0 and apart >= 1 and discrepancy >= 0
    ):
        told = ", ".join(f"{k} = {v:g}" for k, v in numbers.items())
        raise ValueError(
            f"budget = {budget}, runs = {runs}, {told}: need some compute, at least one run, a"
            " factor above one and nothing negative"
        )
    if len(fit.runs) <= len(CONSTANTS):
        raise ValueError(f"{len(fit.runs)} runs leave no noise to plan by; train more than five")
    asked = target if isinstance(target, Quantity) else optimum("parameters", target)
    problem = fit.problem
    theta = problem.centered(fit.law)
    bent = _Bends.of(fit.runs, newton.sensitivity(problem, theta), discrepancy)
    jacobian = bent.beside(problem, theta)
    known = jacobian @ jacobian.T + bent.prior
    slope = np.zeros(len(known))
    slope[:5] = newton.slopes(lambda t: np.log(asked.of(problem.natural(t))), theta[None])[0]
    plans = []
    for count in range(1, runs + 1):
        n, c = _candidates(min(budget / count, largest), tokens_per_parameter, fit)
        d = c / (FLOPS_PER_PARAMETER_TOKEN * n)
        rows = bent.beside(problem.elsewhere({"parameters": n, "tokens": d}), theta)
        near = np.logical_and(
            *(np.abs(np.log(v / v[:, None])) < math.log(apart) for v in (n, d)),
        )
        if found := _greedy(known, rows, slope, count, near):
            variance, chosen = found
            plans.append((variance, n[chosen], d[chosen], c[chosen]))
    if not plans:
        raise ValueError(
            f"budget = {budget:.3g} buys no run of {fit.runs.parameters.min():.3g} parameters and "
            f"{fit.runs.tokens.min():.3g} tokens, the least of the fit, at {tokens_per_parameter}"
            " tokens a parameter"
        )
    variance, n, d, c = min(plans, key=lambda plan: plan[0])
    freedom = len(fit.runs) - len(CONSTANTS)
    # The variance of log loss that makes least squares as sure as this fit is.
    delta = {"huber": fit.delta, "lad": 1e-4, "squares": math.inf}[fit.loss]
    noise = robust_scale(fit.residuals, delta, freedom)[1]
    unit = float(stdtrit(freedom, 0.975)) * math.sqrt(noise)
    before = math.sqrt(float(slope @ np.linalg.solve(known, slope)))
    factors = (math.exp(min(unit * s, 600.0)) for s in (before, math.sqrt(variance)))
    return Design(asked.name, n, d, c, *factors)


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


@dataclass(frozen=True)
class _Bends:
    """x^2, x y, y^2, x^3, y^3 of the centered logs, of which the law takes up what it can."""

    center: Array
    scale: Array
    taken_up: Array
    size: Array
    """(5,) range over the runs of what the law leaves of each."""
    prior: Array
    """What is known beforehand: of the law nothing, of the bends that they are small."""

    @staticmethod
    def of(runs: Runs, jacobian: Array, discrepancy: float) -> "_Bends":
        logs = np.log([runs.parameters, runs.tokens])
        center, scale = logs.mean(1)[:, None], logs.std(1)[:, None]
        powers = bends((logs - center) / scale)
        taken_up = np.linalg.lstsq(jacobian.T, powers.T, rcond=1e-12)[0].astype(np.float64)
        size = np.maximum(np.ptp(powers - taken_up.T @ jacobian, axis=1), 1e-9)
        small = np.full(5, max(discrepancy, 1e-6) ** -2.0)
        return _Bends(center, scale, taken_up, size, np.diag([*np.zeros(5), *small]))

    def beside(self, problem: Problem, theta: Array) -> Array:
        """(10, n) slopes of log loss in the law's parameters and in the bends."""
        slopes = newton.sensitivity(problem, theta)
        logs = np.log([problem.columns[name] for name in ("parameters", "tokens")])
        left = bends((logs - self.center) / self.scale) - self.taken_up.T @ slopes
        return np.concatenate([slopes, left / self.size[:, None]])


def _greedy(
    known: Array, jacobian: Array, slope: Array, count: int, near: NDArray[np.bool_]
) -> tuple[float, list[int]] | None:
    """Pick `count` columns of (P, m) one after the other, then exchange while it helps; None where
    so many are not apart."""
    chosen: list[int] = []
    for _ in range(count):
        if near[chosen].any(0).all():
            return None
        chosen.append(_best(known, jacobian, slope, chosen, near)[1])
    variance = math.inf
    while True:
        for _ in range(count):
            now, pick = _best(known, jacobian, slope, chosen[1:], near)
            chosen = [*chosen[1:], pick]
        if now >= variance * (1 - 1e-9):
            return variance, chosen
        variance = now


def _best(
    known: Array, jacobian: Array, slope: Array, chosen: list[int], near: NDArray[np.bool_]
) -> tuple[float, int]:
    """The column that leaves the least variance beside those chosen, by Sherman and Morrison."""
    inside = jacobian[:, chosen]
    inverse = np.linalg.inv(known + inside @ inside.T)
    gain = (slope @ inverse @ jacobian) ** 2 / (
        1 + np.einsum("im,ij,jm->m", jacobian, inverse, jacobian)
    )
    pick = int(np.argmax(np.where(near[chosen].any(0), -1.0, gain)))
    return float(slope @ inverse @ slope - gain[pick]), pick

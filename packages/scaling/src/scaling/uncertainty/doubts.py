"""What should be doubted about an answer: each kind of doubt is one warning, wherever it arises.

Notable: two methods that contradict each other on the same runs say more than either interval, and
the residuals of a law that is not true bend, which an F test sees before any extrapolation fails.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.special import fdtrc, stdtrit

from scaling.fit import newton
from scaling.fit.identifiability import design_defect
from scaling.fit.search import search
from scaling.fit.varpro import Problem
from scaling.law import Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs, ScalingWarning
from scaling.uncertainty.profile import curvature, robust_scale
from scaling.uncertainty.quantity import optimum

WIDE = 10.0
"""An interval whose ends are further apart, as a factor, is a warning."""

FAR_COMPUTE, FAR_SHAPE = 1e4, 10.0
"""How many times beyond the largest run an answer is a guess; and how many times smaller than the
smallest model, or outside the tokens a parameter of the runs."""

APART = math.log(1.1)
"""Sizes that differ by less, as a factor, contradict each other for nobody."""

BENDS = 1e-3
"""The chance of an F statistic as large where the law holds, below which it is a warning."""


@dataclass
class Doubts:
    """Doubts by kind, each with the places where it arose and the worst of its numbers."""

    places: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def add(self, kind: str, where: str = "", number: float = 0.0) -> None:
        """`kind` may hold one {} field for the number."""
        self.places.setdefault(kind, []).append((number, where))

    def __iter__(self) -> Iterator[str]:
        """One message a kind."""
        for kind, found in self.places.items():
            named = [where for _, where in found if where]
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            text = kind.format(max(number for number, _ in found))
            yield (", ".join(named[:3]) + more + ": " if named else "") + text


@dataclass(frozen=True)
class Opinion:
    """What another method makes of the best size: its logarithm, and its 95 % half-width."""

    method: str
    log_size: float
    half: float


@dataclass(frozen=True)
class ParametricOpinion:
    """The parametric law's best size at any compute, with the interval of its curvature."""

    problem: Problem
    theta: Array
    unit: float
    """Half-width of an interval per deviation that the curvature gives for a unit of noise."""

    def __call__(self, compute: float) -> Opinion:
        """Return the opinion at a compute in FLOPs."""
        asked = optimum("parameters", compute)

        def implied(rows: Array) -> Array:
            return np.log(asked.of(self.problem.natural(rows)))

        half = self.unit * curvature(self.problem, self.theta, implied)
        return Opinion("parametric", float(implied(self.theta)[0]), half)


def parametric_opinion(runs: Runs) -> ParametricOpinion | None:
    """Return what the parametric law says of the runs; None if they do not identify one."""
    freedom = len(runs) - 5
    if freedom < 3 or design_defect(runs.parameters, runs.tokens):
        return None
    problem = Problem.of(runs)
    theta = search(problem, "huber", 1e-3, prove=False)[0]
    errors = newton.residuals(problem, theta)[0]
    unit = float(stdtrit(freedom, 0.975)) * math.sqrt(robust_scale(errors, 1e-3, freedom)[1])
    return ParametricOpinion(problem, theta, unit)


def checked(best: Optimum, runs: Runs, other: Opinion | None = None) -> Optimum:
    """The same, with a ScalingWarning for each kind of doubt about it."""
    for message in _doubts(best, runs, other):
        warnings.warn(message, ScalingWarning, stacklevel=3)
    return best


def _doubts(best: Optimum, runs: Runs, other: Opinion | None) -> Iterator[str]:
    n = best.intervals["parameters"] if best.intervals else None
    at = f"at {best.compute:.3g} FLOPs the best size"
    if n and n.high > WIDE * n.low:
        yield (
            f"{at} lies between {n.low:.3g} and {n.high:.3g}: the runs do not carry that far; train"
            " at larger budgets"
        )
    each, asked = runs.tokens / runs.parameters, best.tokens / best.parameters
    top = float((FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens).max())
    far = []
    if best.compute > FAR_COMPUTE * top:
        far.append(f"{best.compute / top:.2g} times the compute of the largest")
    if best.parameters < runs.parameters.min() / FAR_SHAPE:
        far.append(f"{runs.parameters.min() / best.parameters:.2g} times smaller than the smallest")
    if not each.min() / FAR_SHAPE < asked < each.max() * FAR_SHAPE:
        span = f"{each.min():.2g} to {each.max():.2g}"
        far.append(f"at {asked:.2g} tokens a parameter where the runs have {span}")
    if far:
        yield f"{at}, {best.parameters:.3g}, is far from any run: {' and '.join(far)}"
    if other and n and 0 < n.low <= n.high < math.inf:
        half = math.log(n.high / n.low) / 2
        apart = abs(math.log(best.parameters) - other.log_size)
        if apart > max(math.hypot(half, other.half), APART):
            yield (
                f"the methods contradict each other: {at} is {best.parameters:.3g}"
                f" [{n.low:.3g}, {n.high:.3g}], by the {other.method} fit"
                f" {math.exp(other.log_size):.3g} [{math.exp(other.log_size - other.half):.3g},"
                f" {math.exp(other.log_size + other.half):.3g}]; the law is not quite true, or the"
                " budgets are skewed: look at the backtest before trusting either"
            )


def bend(problem: Problem, theta: Array, errors: Array) -> float:
    """Return the chance of residuals that bend as much with log N and log D if the law holds."""
    found = _bent(problem, theta, errors)
    if found is None:
        return 1.0
    explained, rest, directions, freedom = found
    return float(fdtrc(directions, freedom, explained / directions / (rest / freedom)))


def lack_of_fit(problem: Problem, theta: Array, errors: Array) -> float:
    """Return the standard deviation of log loss that the law's form misses, by its bends.

    It is the mean square that bends explain beyond their share of the noise. It grows from zero
    continuously, so an interval that uses it does not jump where a test becomes significant.
    """
    found = _bent(problem, theta, errors)
    if found is None:
        return 0.0
    explained, rest, directions, freedom = found
    return math.sqrt(max(explained - directions * rest / freedom, 0.0) / len(errors))


def _bent(problem: Problem, theta: Array, errors: Array) -> tuple[float, float, int, int] | None:
    """Return the squares that bends explain, the other squares, and the degrees of freedom of both.

    The bends are x^2, x y, y^2, x^3 and y^3 without what the five constants take up. The errors of
    misread runs are cut off at four spreads. None for too few runs or runs without noise.
    """
    logs = np.log([problem.columns[name] for name in ("parameters", "tokens")])
    extra = bends((logs - logs.mean(1)[:, None]) / logs.std(1)[:, None]).T
    spread = 1.4826 * float(np.median(np.abs(errors)))
    freedom = len(errors) - 10
    if freedom < 5 or spread < 1e-7:
        return None
    basis, _ = np.linalg.qr(newton.sensitivity(problem, theta).T)
    r = np.clip(errors, -4 * spread, 4 * spread)
    r, extra = r - basis @ (basis.T @ r), extra - basis @ (basis.T @ extra)
    left, sizes, _ = np.linalg.svd(extra, full_matrices=False)
    left = left[:, sizes > 1e-8 * sizes[0]]
    explained = float(((left.T @ r) ** 2).sum())
    rest = max(float(r @ r) - explained, 1e-300)
    return explained, rest, left.shape[1], freedom


def bends(logs: Array) -> Array:
    """(5, n) second and third powers of (2, n) scaled logs of N and D: what a law may lack."""
    x, y = logs
    return np.stack([x**2, x * y, y**2, x**3, y**3])

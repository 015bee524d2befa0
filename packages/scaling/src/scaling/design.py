"""Designs: the runs to train next so that the interval of a target shrinks most.

Note [Linearized design]
To first order a run adds J J' to the information matrix, where J is the gradient of its log loss,
and J does not depend on its outcome. Thousands of candidate runs are therefore compared without
training any. The variance of a target is c' (sum J J')^-1 c, where c is the gradient of the log of
the target: c-optimal design (Fedorov 1972).

The law may be slightly wrong, so second and third powers of log N and log D are added as potential
terms with a small prior variance (DuMouchel and Jones 1994). Without them the best design would
repeat a few runs many times.
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
from scaling.uncertainty.diagnostics import NUM_BEND_TERMS, bend_terms
from scaling.uncertainty.profile import robust_scale, smooth_delta
from scaling.uncertainty.quantity import Quantity, optimum


@dataclass(frozen=True, eq=False)
class Design(ComparesArrays):
    """Runs to train, and the interval of the target that is expected with them."""

    quantity: str
    parameters: Array
    tokens: Array
    compute: Array
    #: The 95 % interval, now and with the new runs, reaches from estimate / factor to
    #: estimate * factor.
    factor_before: float
    factor_after: float


@dataclass(frozen=True)
class _Candidate:
    """The best runs of one number of runs, with the variance that they leave."""

    variance: float
    parameters: Array
    tokens: Array
    compute: Array


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
    """Return the runs that shrink the interval of the best size at `target` FLOPs most.

    Every number of runs up to `runs` is tried, with the budget divided evenly. The runs are chosen
    one by one and then exchanged for better runs as long as that helps: see
    Note [Linearized design].

    Args:
        fit: The fit of the runs that were trained already.
        budget: FLOPs of all new runs together.
        target: A compute in FLOPs, or any positive `Quantity`.
        runs: The largest number of new runs.
        tokens_per_parameter: The range of D / N of the new runs.
        largest: The largest compute of one run in FLOPs.
        apart: Two new runs differ by at least this factor in size or in tokens.
        discrepancy: By how many standard deviations of a run's noise the law may be wrong, as
            powers of log N and log D. 0 assumes that the law is exact.

    No new run is smaller or shorter than the smallest or shortest run of the fit, where the law was
    not checked. The factors of the result are those of least squares with the noise of the fit.
    """
    _check_options(budget, runs, tokens_per_parameter, largest, apart, discrepancy)
    if len(fit.runs) <= len(CONSTANTS):
        raise ValueError(
            f"{len(fit.runs)} runs leave no residuals to estimate noise from; train more than five"
        )
    quantity = target if isinstance(target, Quantity) else optimum("parameters", target)
    problem = fit.problem
    theta = problem.from_law(fit.law)
    bend_model = _BendModel.of(fit.runs, newton.log_jacobian(problem, theta), discrepancy)
    jacobian = bend_model.jacobian(problem, theta)
    information = jacobian @ jacobian.T + bend_model.prior
    gradient = np.zeros(len(information))
    gradient[: len(CONSTANTS)] = newton.numerical_gradient(
        lambda t: np.log(quantity.evaluate(problem.to_constants(t))), theta[None]
    )[0]
    candidates = []
    for count in range(1, runs + 1):
        n, c = _candidate_runs(min(budget / count, largest), tokens_per_parameter, fit)
        d = c / (FLOPS_PER_PARAMETER_TOKEN * n)
        new_rows = problem.with_columns({"parameters": n, "tokens": d})
        new_jacobian = bend_model.jacobian(new_rows, theta)
        close = _are_closer(n, apart) & _are_closer(d, apart)
        selected = _select_runs(information, new_jacobian, gradient, count, close)
        if selected is not None:
            variance, rows = selected
            candidates.append(_Candidate(variance, n[rows], d[rows], c[rows]))
    if not candidates:
        raise ValueError(
            f"budget = {budget:.3g} does not suffice for a run of {fit.runs.parameters.min():.3g}"
            f" parameters and {fit.runs.tokens.min():.3g} tokens, the least of the fit, at"
            f" {tokens_per_parameter} tokens per parameter"
        )
    best = min(candidates, key=lambda candidate: candidate.variance)
    freedom = len(fit.runs) - len(CONSTANTS)
    # The variance of log loss with which least squares is as precise as this fit.
    _, noise = robust_scale(fit.residuals, smooth_delta(fit.loss, fit.delta), freedom)
    unit = float(stdtrit(freedom, 0.975)) * math.sqrt(noise)
    before = math.sqrt(float(gradient @ np.linalg.solve(information, gradient)))
    return Design(
        quantity=quantity.name,
        parameters=best.parameters,
        tokens=best.tokens,
        compute=best.compute,
        factor_before=math.exp(min(unit * before, 600.0)),
        factor_after=math.exp(min(unit * math.sqrt(best.variance), 600.0)),
    )


def _check_options(
    budget: float,
    runs: int,
    tokens_per_parameter: tuple[float, float],
    largest: float,
    apart: float,
    discrepancy: float,
) -> None:
    """Raise `ValueError` unless the options of a design are valid."""
    low, high = tokens_per_parameter
    if not 0 < low < high < math.inf:
        raise ValueError(
            f"expected tokens_per_parameter = (least, most), positive and finite, got {low, high}"
        )
    checks = {
        f"budget > 0 and finite, got budget = {budget}": 0 < budget < math.inf,
        f"runs >= 1, got runs = {runs}": runs >= 1,
        f"largest > 0, got largest = {largest}": largest > 0,
        f"apart >= 1, got apart = {apart}": apart >= 1,
        f"discrepancy >= 0, got discrepancy = {discrepancy}": discrepancy >= 0,
    }
    for expectation, is_met in checks.items():
        if not is_met:
            raise ValueError(f"expected {expectation}")


def _candidate_runs(
    compute: float, tokens_per_parameter: tuple[float, float], fit: ParametricFit
) -> tuple[Array, Array]:
    """Return sizes and costs of runs that cost `compute` FLOPs, or a half, a quarter, … of it."""
    low, high = tokens_per_parameter
    sizes = []
    costs = []
    for cost in compute * 2.0 ** -np.arange(8):
        pairs = cost / FLOPS_PER_PARAMETER_TOKEN
        # With N D = pairs, D / N lies between low and high on this grid of N.
        grid = np.geomspace(math.sqrt(pairs / high), math.sqrt(pairs / low), 49)
        allowed = (grid >= fit.runs.parameters.min()) & (pairs / grid >= fit.runs.tokens.min())
        sizes.append(grid[allowed])
        costs.append(np.full(allowed.sum(), cost))
    return np.concatenate(sizes), np.concatenate(costs)


def _are_closer(values: Array, factor: float) -> NDArray[np.bool_]:
    """Return (m, m) flags of the pairs of values that differ by less than a factor."""
    close: NDArray[np.bool_] = np.abs(np.log(values / values[:, None])) < math.log(factor)
    return close


@dataclass(frozen=True)
class _BendModel:
    """The potential terms of Note [Linearized design]: x^2, x y, y^2, x^3 and y^3.

    x and y are the standardized logs of N and D. The part of each term that the law's constants can
    absorb over the runs is subtracted.
    """

    center: Array
    scale: Array
    #: The coefficients of the law's constants that absorb each term, (5, terms).
    absorbed: Array
    #: The range of each remaining term over the runs, (terms,).
    ranges: Array
    #: The prior information: none about the constants, that of small values about the terms.
    prior: Array

    @staticmethod
    def of(runs: Runs, jacobian: Array, discrepancy: float) -> "_BendModel":
        logs = np.log([runs.parameters, runs.tokens])
        center = logs.mean(1)[:, None]
        scale = logs.std(1)[:, None]
        terms = bend_terms((logs - center) / scale)
        absorbed = np.linalg.lstsq(jacobian.T, terms.T, rcond=1e-12)[0].astype(np.float64)
        ranges = np.maximum(np.ptp(terms - absorbed.T @ jacobian, axis=1), 1e-9)
        information = np.full(NUM_BEND_TERMS, max(discrepancy, 1e-6) ** -2.0)
        prior = np.diag(np.concatenate([np.zeros(len(CONSTANTS)), information]))
        return _BendModel(center, scale, absorbed, ranges, prior)

    def jacobian(self, problem: Problem, theta: Array) -> Array:
        """Return the derivatives of log loss in the constants and the terms, (10, n)."""
        by_constants = newton.log_jacobian(problem, theta)
        logs = np.log([problem.columns[name] for name in ("parameters", "tokens")])
        terms = bend_terms((logs - self.center) / self.scale)
        remaining = terms - self.absorbed.T @ by_constants
        return np.concatenate([by_constants, remaining / self.ranges[:, None]])


def _select_runs(
    information: Array, jacobian: Array, gradient: Array, count: int, close: NDArray[np.bool_]
) -> tuple[float, list[int]] | None:
    """Select `count` columns of (P, m) greedily, then exchange them while that helps.

    Return the variance and the selected columns; None if fewer than `count` columns are far enough
    apart.
    """
    selected: list[int] = []
    for _ in range(count):
        if close[selected].any(0).all():
            return None
        selected.append(_best_addition(information, jacobian, gradient, selected, close)[1])
    variance = math.inf
    while True:
        for _ in range(count):
            others = selected[1:]
            new_variance, pick = _best_addition(information, jacobian, gradient, others, close)
            selected = [*others, pick]
        if new_variance >= variance * (1 - 1e-9):
            return variance, selected
        variance = new_variance


def _best_addition(
    information: Array,
    jacobian: Array,
    gradient: Array,
    selected: list[int],
    close: NDArray[np.bool_],
) -> tuple[float, int]:
    """Return the least variance that one more column leaves, and that column.

    The Sherman-Morrison formula gives the effect of each column without inverting again.
    """
    columns = jacobian[:, selected]
    inverse = np.linalg.inv(information + columns @ columns.T)
    leverage = np.einsum("im,ij,jm->m", jacobian, inverse, jacobian)
    gain = (gradient @ inverse @ jacobian) ** 2 / (1 + leverage)
    pick = int(np.argmax(np.where(close[selected].any(0), -1.0, gain)))
    return float(gradient @ inverse @ gradient - gain[pick]), pick

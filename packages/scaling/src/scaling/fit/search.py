"""The search for the global minimum of a fit's objective, from a grid of exponents.

Note [Vanished terms]
A minimization from a good start usually fails in one way: the amplitude of a term shrinks towards
zero, its exponent no longer has a gradient, and the search stops with a law without this term. That
law is a true minimum only if no amplitude and exponent of the term lower the objective. The search
therefore tries a grid of amplitudes and exponents for each vanished term. It continues from the
best point of the grid if this point improves the objective.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.identifiability import explain_unidentified
from scaling.fit.varpro import Problem, build_grid_starts
from scaling.law import CONSTANTS, UNKNOWN_LAW, Law
from scaling.runs import Runs, require_runs
from scaling.units import Array

Loss = Literal["huber", "lad", "squares"]

#: Minimum number of runs of a parametric fit: one per constant.
FEWEST_RUNS = len(CONSTANTS)

#: Results whose objectives have a smaller relative difference count as the same optimum.
SAME_OBJECTIVE = 1e-8

#: Number of steps after which a start counts as not converged. Almost all starts need fewer than a
#: hundred.
MAX_STEPS = 1000

#: Amplitudes at which a vanished term is retried, in units of `Problem.target_spread`.
REVIVAL_SIZES = 4.0 ** -np.arange(13)

#: Largest number of values of each exponent at which a vanished term is retried. All combinations
#: are evaluated at once, so more values would need gigabytes for a large table.
REVIVAL_EXPONENTS = 17

#: Number of best grid points from which a search without `prove` starts; half as many for forms
#: with four or more exponents.
BEST_STARTS = 8
#: Approximate number of further starts from a coarser grid, for forms with up to two exponents.
COARSE_GRID_POINTS = 25

#: The deltas from which searches start, for losses other than the Huber loss.
INITIAL_DELTAS = {"lad": 1e-3, "squares": np.inf}

#: The delta of the Huber loss that approximates least absolute deviations.
FINEST_DELTA = 1e-9

#: For more rows than this, the search without `prove` starts from the optimum of a sample of this
#: many rows.
SEARCH_ROWS = 4000


@dataclass(frozen=True)
class Proof:
    """The number of starts of a search, and how many of them converged to the best objective."""

    starts: int
    converged: int
    #: Number of converged starts that reached the best objective.
    landed: int
    #: True if the search started from the whole grid, as with `prove=True`, or because other starts
    #: reached several optima.
    complete: bool

    @property
    def holds(self) -> bool:
        """True if the whole grid was used, some start converged, and all converged starts agree."""
        return self.complete and self.landed == self.converged > 0


def describe_optima(proof: Proof) -> str:
    """Return why the result of a search may not be the only optimum; empty if all starts agree."""
    if not proof.converged:
        return (
            f"none of {proof.starts} starts converged, so the result may not be an optimum; fit"
            " more runs, or pass prove=True to try more starts"
        )
    if proof.landed == proof.converged:
        return ""
    return (
        f"{proof.landed} of {proof.converged} converged starts reached the best objective: the data"
        " leave several optima"
    )


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(ComparesArrays):
    """A fitted law without intervals, together with the runs and options of the fit."""

    runs: Runs
    law: Law
    loss: Loss
    delta: float
    #: Log of predicted over observed loss, one per run.
    residuals: Array

    @cached_property
    def unidentified(self) -> str:
        """The reason why the runs do not identify the law, which is then nan; otherwise empty."""
        return explain_unidentified(self.runs.parameters, self.runs.tokens)

    @cached_property
    def problem(self) -> Problem:
        """The problem that the fit solved: see Note [Centered parameters] in varpro.py."""
        return Problem.from_runs(self.runs)


def estimate(runs: Runs, loss: Loss, delta: float, prove: bool) -> tuple[Estimate, Array, Proof]:
    """Return a fit with its parameters theta (P,) and its proof.

    If the runs do not identify a law, all numbers are nan, because many laws fit them equally well.
    Raises `ValueError` if an option is invalid, there are too few runs, or all losses are equal.
    """
    require_runs(runs)
    require_objective(loss, delta)
    if len(runs) < FEWEST_RUNS:
        raise ValueError(
            f"{len(runs)} runs cannot fix five constants; train at least {FEWEST_RUNS}"
        )
    if np.ptp(runs.loss) == 0:
        raise ValueError(f"column 'loss' is {runs.loss[0]:g} in every run: there is nothing to fit")
    unknown = Estimate(runs, UNKNOWN_LAW, loss, delta, np.full(len(runs), np.nan))
    if unknown.unidentified:
        return unknown, UNKNOWN_LAW.constants, Proof(0, 0, 0, complete=False)
    problem = Problem.from_runs(runs)
    theta, proof = search(problem, loss, delta, prove)
    errors = newton.compute_residuals(problem, theta)[0]
    part = Estimate(runs, Law(*problem.to_constants(theta[0]).tolist()), loss, delta, errors)
    return part, theta[0], proof


def search(problem: Problem, loss: Loss, delta: float, prove: bool) -> tuple[Array, Proof]:
    """Return the best parameters (1, P), and a proof that counts the starts that reached them.

    `prove` starts from every point of the exponent grid. Otherwise the starts are the best points
    of the grid or, for more than `SEARCH_ROWS` rows, the optimum of a sample. With at most two
    exponents, a coarser grid is added, because the best points may all lie in one basin. With at
    most two exponents, the search is also repeated from the whole grid if the starts reach several
    optima. See Note [Vanished terms] for the remaining steps.
    """
    first_delta = INITIAL_DELTAS.get(loss, delta)
    dimensions = max(sum(len(axis) > 1 for axis in problem.exponent_grid), 1)
    if len(problem.log_target) > SEARCH_ROWS and not prove:
        starts = _search_sample(problem, loss, delta)
    else:
        starts = build_grid_starts(problem)
        if not prove:
            starts = starts[_select_starts(problem, starts, first_delta, dimensions)]
    ends = newton.polish(problem, starts, delta=first_delta, max_steps=MAX_STEPS)
    _revive(problem, ends, first_delta)
    last_delta = first_delta
    if loss == "lad":
        ends = _shrink_delta(problem, ends, first_delta)
        last_delta = FINEST_DELTA
    best = int(np.argmin(ends.objective))
    # Rounding changes a residual r by a few ulps of 1, and the objective by |psi(r)| times as much.
    # Here psi is the derivative of the Huber loss.
    errors = newton.compute_residuals(problem, ends.theta)
    rounding = 1e-15 * np.abs(np.clip(errors, -last_delta, last_delta)).sum(1)
    tolerance = ends.objective[best] * SAME_OBJECTIVE + 2 * (rounding + rounding[best])
    landed = ends.objective <= ends.objective[best] + tolerance
    converged = int(ends.converged.sum())
    proof = Proof(len(starts), converged, int((landed & ends.converged).sum()), prove)
    # Several results may have the same objective. Return the result with the least first constant,
    # which is E for Chinchilla's law.
    best = int(np.argmin(np.where(landed, ends.theta[:, 0], np.inf)))
    if proof.landed < proof.converged and not prove and dimensions < 3:
        return search(problem, loss, delta, True)
    return ends.theta[[best]], proof


def _search_sample(problem: Problem, loss: Loss, delta: float) -> Array:
    """Return the result of a search over `SEARCH_ROWS` rows, as a start for all rows.

    The sample is evenly spaced in the order of the targets. It has the same basins as the table,
    and its optimum is only a few steps from the optimum of the table.
    """
    order = np.argsort(problem.log_target, kind="stable")
    rows = np.sort(order[np.linspace(0, len(order) - 1, SEARCH_ROWS).astype(int)])
    columns = {name: values[rows] for name, values in problem.columns.items()}
    sample = replace(problem, columns=columns, log_target=problem.log_target[rows])
    theta, _ = search(sample, loss, delta, False)
    start: Array = np.clip(problem.from_constants(sample.to_constants(theta)), *problem.bounds)
    return start


def _select_starts(
    problem: Problem, starts: Array, delta: float, dimensions: int
) -> NDArray[np.intp]:
    """Return the indices of the best grid points and, up to two exponents, of a coarser grid."""
    count = BEST_STARTS if dimensions < 4 else BEST_STARTS // 2
    best = np.argsort(newton.compute_objective(problem, starts, delta))[:count]
    if dimensions >= 3:
        return best
    points = [len(axis) for axis in problem.exponent_grid]
    stride = math.ceil(max(points, default=1) / COARSE_GRID_POINTS ** (1 / dimensions))
    indices = np.arange(len(starts)).reshape(points)
    coarse = indices[(slice(None, None, stride),) * len(points)]
    return np.union1d(best, coarse.ravel())


def refit(
    problem: Problem,
    starts: Array,
    loss: Loss,
    delta: float,
    *,
    weights: Array | None = None,
    finest: float = FINEST_DELTA,
) -> newton.PolishResult:
    """Minimize the objective of any loss from each start, and return the results of `polish`.

    "lad" (least absolute deviations) is approximated by Huber losses whose delta shrinks to
    `finest`.
    """
    first_delta = INITIAL_DELTAS.get(loss, delta)
    ends = newton.polish(problem, starts, delta=first_delta, weights=weights)
    if loss == "lad":
        return _shrink_delta(problem, ends, first_delta, weights, finest)
    return ends


def require_objective(loss: Loss, delta: float) -> None:
    """Raise `ValueError` unless `loss` is known and the `delta` of a Huber loss is positive."""
    if loss not in get_args(Loss):
        raise ValueError(f"expected loss to be one of {get_args(Loss)}, got {loss!r}")
    if loss == "huber" and not delta > 0:
        raise ValueError(f"expected delta > 0 (1e-3 is usual), got {delta}")


def compute_residual_objective(errors: Array, loss: Loss, delta: float) -> float:
    """Return the objective of log residuals; for "lad" it is the sum of absolute residuals."""
    size = np.abs(errors)
    if loss == "lad":
        return float(size.sum())
    clipped = np.minimum(size, delta if loss == "huber" else np.inf)
    return float((clipped * (size - 0.5 * clipped)).sum())


def _shrink_delta(
    problem: Problem,
    ends: newton.PolishResult,
    delta: float,
    weights: Array | None = None,
    finest: float = FINEST_DELTA,
) -> newton.PolishResult:
    """Return the results of minimizations with deltas that shrink tenfold, down to `finest`."""
    while delta > finest * 1.01:
        delta /= 10
        ends = newton.polish(problem, ends.theta, delta=delta, weights=weights)
    return ends


def _revive(problem: Problem, ends: newton.PolishResult, delta: float) -> None:
    """Restart the minimizations that lost a necessary term, up to three times; update `ends`."""
    for _ in range(3):
        rows, starts = _revive_terms(problem, ends, delta)
        if not len(rows):
            return
        polished = newton.polish(problem, starts, delta=delta, max_steps=MAX_STEPS)
        ends.theta[rows] = polished.theta
        ends.objective[rows] = polished.objective
        ends.converged[rows] = polished.converged


def _revive_terms(problem: Problem, ends: newton.PolishResult, delta: float) -> tuple[Array, Array]:
    """Return the indices of results that a vanished term would improve, and a new start for each.

    See Note [Vanished terms]. If several terms would improve a result, the start has the term that
    improves it most. Only the amplitude of the vanished term and at most two exponents that no
    other term uses are varied.
    """
    best: dict[int, tuple[float, Array]] = {}
    sizes = np.log(REVIVAL_SIZES * problem.target_spread)
    for i, term in np.argwhere(newton.flag_vanished_terms(problem, ends.theta)):
        shared: set[int] = set()
        for k, other in enumerate(problem.terms):
            if k != term:
                shared.update(other.slopes)
        private = [j for j in problem.terms[term].slopes if j not in shared][:2]
        grids = []
        for j in private:
            axis = problem.exponent_grid[j]
            grids.append(axis[:: math.ceil(len(axis) / REVIVAL_EXPONENTS)])
        values = np.array(list(itertools.product(sizes, *grids)))
        trials = np.tile(ends.theta[i], (len(values), 1))
        trials[:, [term, *(problem.num_terms + j for j in private)]] = values
        objective = newton.compute_objective(problem, trials, delta)
        least = float(objective.min())
        known = best[i][0] if i in best else ends.objective[i] * (1 - 1e-12)
        if least < known:
            best[i] = least, trials[np.argmin(objective)]
    return np.array([*best], dtype=np.intp), np.array([start for _, start in best.values()])

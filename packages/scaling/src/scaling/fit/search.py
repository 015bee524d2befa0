"""The search for the least objective: from a grid of exponents, and back from the family's edge.

Notable: the only place where a start can be lost is where one term has died, and whether that is an
optimum can be asked outright: if no revival of the term, at any exponent, lowers the objective.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.varpro import Problem, grid_starts
from scaling.law import Law
from scaling.runs import Array, Runs

Loss = Literal["huber", "lad", "squares"]

# Objectives that differ by less, relatively, are one optimum.
SAME = 1e-8
# Steps after which a start has not converged; almost all need less than a hundred.
PATIENCE = 1000
# Sizes at which a dead term is tried again, in spreads of the loss.
REVIVALS = 4.0 ** -np.arange(13)
# Without a proof: the best points of the grid, and a coarser grid of about so many.
BEST, LATTICE = 8, 25


@dataclass(frozen=True)
class Proof:
    """What became of the starts: `landed` of the `converged` reached the best objective."""

    starts: int
    converged: int
    landed: int
    complete: bool
    """Whether the starts were the whole grid, which is what `prove=True` asks for."""

    @property
    def several(self) -> bool:
        """Whether starts that converged landed on different optima."""
        return self.landed < self.converged

    @property
    def holds(self) -> bool:
        """Whether every start of the whole grid that converged landed on the same optimum."""
        return self.complete and self.landed == self.converged > 0


@dataclass(frozen=True, eq=False)
class Estimate(ComparesArrays):
    """A law without intervals, and what it was fitted to: what any uncertainty starts from."""

    runs: Runs
    law: Law
    loss: Loss
    delta: float
    residuals: Array
    """log of predicted over observed loss, one per run."""
    untuned: float
    """The weight of runs above the law; below one, they may have been tuned too little."""

    @cached_property
    def problem(self) -> Problem:
        """What was fitted, in the parameters of the search."""
        return Problem.of(self.runs, self.untuned)


def search(
    problem: Problem,
    loss: Loss,
    delta: float,
    prove: bool,
    springs: Sequence[newton.Spring] = (),
) -> tuple[Array, Proof]:
    """(1, P) the best law from all starts of the grid, or from some of them, and the proof.

    The best points of the grid may all lie in one basin, so that a better one is missed: a coarse
    lattice goes beside them, and where they end in several places the whole grid is tried. Of three
    exponents or more that would take too long: there only `prove` looks beyond the best points.
    """
    first = _first(loss, delta)
    starts = grid_starts(problem)
    points = [len(axis) for axis in problem.axes]
    dimensions = max(sum(n > 1 for n in points), 1)
    if not prove:
        few = BEST if dimensions < 4 else BEST // 2
        lowest = np.argsort(newton.objective(problem, starts, first))[:few]
        every = math.ceil(max(points) / LATTICE ** (1 / dimensions))
        lattice = np.arange(len(starts)).reshape(points)[(slice(None, None, every),) * len(points)]
        starts = starts[np.union1d(lowest, lattice.ravel()) if dimensions < 3 else lowest]
    ends = newton.polish(problem, starts, delta=first, springs=springs, max_steps=PATIENCE)
    for _ in range(0 if springs else 3):
        back, revived = _revive(problem, ends, first)
        if not len(back):
            break
        again = newton.polish(problem, revived, delta=first, max_steps=PATIENCE)
        ends.theta[back], ends.objective[back] = again.theta, again.objective
        ends.converged[back] = again.converged
    if loss == "lad":
        ends = _shrink(problem, ends, first)
    best = int(np.argmin(ends.objective))
    # A residual r is known to a few ulps of 1, which moves the objective by |psi(r)| times that.
    rounding = 1e-15 * np.abs(np.clip(newton.residuals(problem, ends.theta), -first, first)).sum(1)
    landed = ends.objective <= ends.objective[best] * (1 + SAME) + 2 * (rounding + rounding[best])
    converged = int(ends.converged.sum())
    proof = Proof(len(starts), converged, int((landed & ends.converged).sum()), prove)
    # Of laws that are equal to the last digit the one that claims the least irreducible loss.
    best = int(np.argmin(np.where(landed, ends.theta[:, 0], np.inf)))
    if proof.several and not prove and dimensions < 3:
        return search(problem, loss, delta, True, springs)
    return ends.theta[[best]], proof


def refit(
    problem: Problem,
    starts: Array,
    loss: Loss,
    delta: float,
    *,
    weights: Array | None = None,
    finest: float = 1e-9,
    springs: Sequence[newton.Spring] = (),
) -> newton.Polished:
    """`newton.polish` for each loss; LAD is Huber with delta shrinking to `finest`."""
    first = _first(loss, delta)
    ends = newton.polish(problem, starts, delta=first, weights=weights, springs=springs)
    return ends if loss != "lad" else _shrink(problem, ends, first, weights, finest)


def check(loss: Loss, delta: float, untuned: float) -> None:
    """ValueError unless the loss is one of ours and its numbers make sense."""
    if loss not in get_args(Loss) or not (delta > 0 and 0 < untuned <= 1):
        raise ValueError(
            f"loss = {loss!r}, delta = {delta}, untuned = {untuned}: a loss of {get_args(Loss)}, a"
            " positive delta (1e-3 is usual), and a weight above 0 and at most 1"
        )


def total(problem: Problem, errors: Array, loss: Loss, delta: float) -> float:
    """The objective of log residuals: for LAD their absolute sum, not that of a narrow Huber."""
    size, weights = np.abs(errors), problem.weigh(np.ones(len(errors)), errors)
    if loss == "lad":
        return float((weights * size).sum())
    inside = np.minimum(size, delta if loss == "huber" else np.inf)
    return float((weights * inside * (size - 0.5 * inside)).sum())


def _first(loss: Loss, delta: float) -> float:
    return {"huber": delta, "lad": 1e-3, "squares": np.inf}[loss]


def _shrink(
    problem: Problem,
    ends: newton.Polished,
    delta: float,
    weights: Array | None = None,
    finest: float = 1e-9,
) -> newton.Polished:
    while delta > finest * 1.01:
        delta /= 10
        ends = newton.polish(problem, ends.theta, delta=delta, weights=weights)
    return ends


def _revive(problem: Problem, ends: newton.Polished, delta: float) -> tuple[Array, Array]:
    """Which ends lost a term whose return would lower the objective, and where to go on from."""
    back, revived = [], []
    for i, term in np.argwhere(newton.vanished(problem, ends.theta)):
        shared = {j for k, held in enumerate(problem.held) if k != term for j in held}
        own = [j for j in problem.held[term] if j not in shared][:2]
        sizes = np.log(REVIVALS * problem.spread)
        tries = np.array(list(itertools.product(sizes, *(problem.axes[j] for j in own))))
        tried = np.tile(ends.theta[i], (len(tries), 1))
        tried[:, [term, *(problem.count + j for j in own)]] = tries
        value = newton.objective(problem, tried, delta)
        if value.min() < ends.objective[i] * (1 - 1e-12):
            back.append(i)
            revived.append(tried[np.argmin(value)])
    return np.array(back, dtype=np.intp), np.array(revived)

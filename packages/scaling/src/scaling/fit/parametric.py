"""Fit L(N, D) = E + A / N^alpha + B / D^beta to runs, with evidence that nothing fits better.

Notable: the start comes from a grid over (alpha, beta) alone, so a fit takes milliseconds; `prove`
polishes every grid point and counts how many land on the answer; what the data cannot carry is a
warning. (Hoffmann et al. 2022, appendix D.3; Besiroglu et al. 2024.)
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scaling.fit import newton
from scaling.fit.identifiability import require_identified
from scaling.fit.search import Estimate, Loss, Proof, check, search, total
from scaling.fit.varpro import Problem
from scaling.isoflop import IsoflopFit, fit_isoflop
from scaling.law import CONSTANTS, Optimum
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs, ScalingWarning
from scaling.tables.cells import list_some
from scaling.uncertainty.bootstrap import Bootstrap, Prediction, bootstrap
from scaling.uncertainty.doubts import BENDS, Opinion, bend, checked
from scaling.uncertainty.drift import Drift, drift

FEWEST_RUNS = 5
"""As many as there are constants."""


@dataclass(frozen=True, eq=False)
class ParametricFit(Estimate):
    """A law and what speaks for it.

    `law` is the bare point estimate; `optimal` and `predict` give it with intervals: those of a
    bootstrap, widened beyond the runs by what earlier cuts of them would have missed.
    """

    objective: float
    proof: Proof
    warnings: tuple[str, ...]

    @cached_property
    def resampled(self) -> Bootstrap:
        """1,000 refits with seed 0; call `bootstrap` for other numbers."""
        return bootstrap(self, resamples=1000, seed=0)

    @cached_property
    def drift(self) -> Drift:
        """What the law of the smaller runs alone got wrong about the larger ones."""
        return drift(self.runs, self._refitted)

    def _refitted(self, runs: Runs) -> Bootstrap:
        """A fit of fewer runs, and its resamples, without a word about what they cannot carry."""
        _check(runs, self.loss, self.delta, self.untuned)
        problem = Problem.of(runs, self.untuned)
        theta, _ = search(problem, self.loss, self.delta, prove=False)
        errors = newton.residuals(problem, theta)[0]
        part = Estimate(runs, problem.law(theta[0]), self.loss, self.delta, errors, self.untuned)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalingWarning)
            return bootstrap(part, resamples=200)

    def optimal(self, compute: float, *, inference_tokens: float = 0.0) -> Optimum:
        """`Law.optimal`, with 95 % intervals for N, D and the loss."""
        best = self.resampled.optimal(compute, inference_tokens=inference_tokens)
        other = None if inference_tokens else self._by_isoflop(compute)
        return checked(self.drift.widened(best), self.runs, other)

    def _by_isoflop(self, compute: float) -> Opinion | None:
        """What the valleys of the same runs say, where they lie at budgets."""
        if not self.valleys:
            return None
        compute *= self.valleys.flops_per_parameter_token(compute) / FLOPS_PER_PARAMETER_TOKEN
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalingWarning)
            best = self.valleys.optimal(compute)
        interval = (best.intervals or {})["parameters"]
        half = math.log(interval.high / interval.low) / 2 if interval.low else math.inf
        return Opinion("IsoFLOP", math.log(best.parameters), half)

    @cached_property
    def valleys(self) -> IsoflopFit | None:
        """The IsoFLOP fit of the same runs; None unless they lie at three budgets or more."""
        groups = [g for g in self.runs.budgets() if len(np.unique(g.parameters)) >= 4]
        if len(groups) < 3 or sum(map(len, groups)) < 0.8 * len(self.runs):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScalingWarning)
            try:
                return fit_isoflop(self.runs)
            except ValueError:
                return None

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """`Law.predict`, with the 95 % interval of one more run, its noise included."""
        mean = self.resampled.predict(parameters, tokens)
        compute = FLOPS_PER_PARAMETER_TOKEN * parameters * tokens
        return Prediction(mean.loss, self.drift.of_a_run(mean, compute, self.residuals))


def fit_parametric(
    runs: Runs,
    loss: Loss = "huber",
    *,
    delta: float = 1e-3,
    untuned: float = 1.0,
    prove: bool = False,
) -> ParametricFit:
    """The law that minimizes the sum of loss(log predicted - log observed) over all runs.

    `loss` is "huber" (with `delta`, as Hoffmann et al.), "lad" (least absolute deviations) or
    "squares" (half the sum of squares). `prove` polishes all 289 points of a grid of exponents;
    without, some thirty of them, and all where those end in several places. `untuned`, the weight
    of runs whose loss is above the law, is below one where some were tuned too little: the law then
    follows the runs that were tuned well, as a tenth, say, makes it follow the best quarter.

    Raise `ValueError` for fewer than five runs and for runs that do not identify the law, such as
    those of one size, one budget or one ratio of tokens to parameters (`fit.identifiability`).
    ScalingWarning for an unproven optimum, a constant at its bound and runs far from the law.
    """
    _check(runs, loss, delta, untuned)
    problem = Problem.of(runs, untuned)
    theta, proof = search(problem, loss, delta, prove)
    law = problem.law(theta[0])
    errors = newton.residuals(problem, theta)[0]
    found = tuple(_doubts(runs, problem, theta[0], errors, proof))
    for message in found:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    least = total(problem, errors, loss, delta)
    return ParametricFit(runs, law, loss, delta, errors, untuned, least, proof, found)


def _check(runs: Runs, loss: Loss, delta: float, untuned: float) -> None:
    check(loss, delta, untuned)
    if len(runs) < FEWEST_RUNS:
        raise ValueError(
            f"{len(runs)} runs cannot fix five constants; train at least {FEWEST_RUNS}"
        )
    if np.ptp(runs.loss) == 0:
        raise ValueError(f"column 'loss' is {runs.loss[0]:g} in every run: there is nothing to fit")
    require_identified(runs.parameters, runs.tokens)


def _doubts(runs: Runs, problem: Problem, theta: Array, errors: Array, proof: Proof) -> list[str]:
    """What a reader of the law should know before believing it."""
    found = []
    if proof.several or not proof.converged:
        found.append(
            f"{proof.landed} of {proof.converged} converged starts reached the best objective: the "
            "data leave several optima"
        )
    if len(runs) == FEWEST_RUNS:
        found.append(
            "five runs leave no degrees of freedom for five constants: the law meets them all, and"
            " every interval is infinite; train more"
        )
    chance = bend(problem, theta, errors)
    if chance < BENDS:
        found.append(
            f"no law of this form fits: the residuals bend with size or tokens (F test, p ="
            f" {chance:.1g}); `optimal` and `predict` widen by the drift of earlier cuts,"
            " `bootstrap` and `profile` trust the form"
        )
    lowest, highest = problem.bounds
    for i, name in enumerate(CONSTANTS):
        if theta[i] <= lowest[i] or theta[i] >= highest[i]:
            value = problem.natural(theta)[i]
            found.append(f"{name} = {value:.4g} is at its bound: the data do not determine it")
    spread = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    far = np.flatnonzero(np.abs(errors) > np.maximum(10 * spread, 1e-6))
    # With fewer runs a robust law meets so many of them that the others look far.
    if 0 < len(far) <= len(errors) // 4 and len(runs) >= 3 * FEWEST_RUNS:
        rows = list_some(runs.rows[i] for i in far)
        found.append(
            f"column 'loss' in rows {rows} is more than ten spreads ({spread:.2g} in log loss) from"
            " the law: look at those runs, or drop them with without_highest"
        )
    return found

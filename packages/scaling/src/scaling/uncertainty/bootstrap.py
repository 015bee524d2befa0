"""How sure a fitted law is: refit resampled runs, all at once.

Notable: a resample is a vector of counts over the same runs, so thousands of refits are one batched
Newton iteration from the full fit; the intervals are corrected for bias and for few runs, without
which they hold the truth too rarely. (Efron 1981; Hesterberg 2015.)
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from scaling.equality import ComparesArrays
from scaling.fit.newton import vanished
from scaling.fit.search import Estimate, refit
from scaling.law import CONSTANTS, Interval, Optimum, check_level
from scaling.runs import Array, ScalingWarning
from scaling.uncertainty.quantity import FIELDS, Quantity, loss_at, optimum, quantity


@dataclass(frozen=True)
class Prediction:
    """A predicted loss in nats and its interval."""

    loss: float
    interval: Interval

    def __float__(self) -> float:
        return self.loss


@dataclass(frozen=True, eq=False)
class Bootstrap(ComparesArrays):
    """A fit's law and the laws of its resamples."""

    fit: Estimate
    constants: Array
    """(resamples, 5): E, A, B, alpha, beta."""
    level: float
    drawn: int
    """How many runs, or groups of them, were drawn."""

    def interval(self, asked: str | Quantity) -> Interval:
        """Of E, A, B, alpha, beta, "exponent" (that of N_opt in C), or any `Quantity`.

        Quantiles of the resampled values, at ends moved by the bias that the resamples show
        (Efron 1981) and spread by t sqrt(n / (n - 5)) / z, as n runs lost five degrees of freedom
        (Hesterberg 2015). Without degrees of freedom the interval is (0, inf).
        """
        asked = quantity(asked) if isinstance(asked, str) else asked
        freedom = len(self.fit.runs) - len(CONSTANTS)
        if freedom <= 0:
            return Interval(0.0, math.inf, self.level)
        values = asked.of(self.constants)
        estimate = asked.of(self.fit.law.constants[None])[0]
        below = ((values < estimate).mean() + (values <= estimate).mean()) / 2
        bias = ndtri(np.clip(below, 0.01, 0.99))
        half = reach(freedom, self.level, self.drawn)
        low, high = np.quantile(values, ndtr([2 * bias - half, 2 * bias + half]))
        return Interval(min(float(low), estimate), max(float(high), estimate), self.level)

    def sizes(self, compute: float) -> Array:
        """(resamples,) the best N of every resampled law."""
        return optimum("parameters", compute).of(self.constants)

    def losses(self, parameters: float, tokens: float) -> Array:
        """(resamples,) the loss by every resampled law."""
        return loss_at(parameters, tokens).of(self.constants)

    def optimal(self, compute: float, *, inference_tokens: float = 0.0) -> Optimum:
        """The fitted law's optimum, with an interval for its N, D and loss."""
        best = self.fit.law.optimal(compute, inference_tokens=inference_tokens)
        asked = {k: optimum(k, compute, inference_tokens=inference_tokens) for k in FIELDS}
        intervals = {k: self.interval(q) for k, q in asked.items()}
        return replace(best, intervals=intervals)

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """The fitted law's loss, with an interval for its mean, not for one more noisy run."""
        loss = self.fit.law.predict(parameters, tokens)
        return Prediction(loss, self.interval(loss_at(parameters, tokens)))


def reach(freedom: int, level: float, drawn: int) -> float:
    """At which normal deviates of `drawn` resamples an interval of a law of few runs ends."""
    t: float = stdtrit(min(freedom, drawn - 1), 0.5 + level / 2)
    return t * math.sqrt(1 + len(CONSTANTS) / freedom)


def bootstrap(
    fit: Estimate,
    *,
    resamples: int = 4000,
    level: float = 0.95,
    seed: int = 0,
    by: str | Sequence[object] | None = None,
) -> Bootstrap:
    """Refit `resamples` samples of the runs, drawn with replacement.

    Runs that share a cause of error are drawn together: those of one budget with by="budget", or
    those of one label, say the seed of each run or of its data's order. ValueError for fewer than
    five such groups. ScalingWarning where more than one refit in a hundred does not converge.
    """
    check_level(level)
    if isinstance(by, str) and by != "budget":
        raise ValueError(f"by = {by!r}: 'budget', or a label for each run, such as its seed")
    if resamples * (1 - level) < 5:
        raise ValueError(
            f"resamples = {resamples}: a {level:.0%} interval needs {math.ceil(5 / (1 - level))}"
        )
    n = len(fit.runs)
    problem = fit.problem
    group, groups = np.arange(n), n
    if by is not None:
        label = {r: i for i, g in enumerate(fit.runs.budgets()) for r in g.rows}
        named = [label[r] for r in fit.runs.rows] if isinstance(by, str) else by
        labels = [str(name) for name in named]
        if len(labels) != n or len(set(labels)) < 5:
            told = f"{len(labels)} labels, {len(set(labels))} of them different"
            raise ValueError(f"by: {told}, for {n} runs; it takes one a run, and five groups")
        group = np.unique(np.array(labels), return_inverse=True)[1]
        groups = len(set(labels))
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), resamples)
    counts = drawn[:, group]
    starts = np.tile(problem.centered(fit.law), (resamples, 1))
    weights = counts.astype(np.float64)
    ends = refit(problem, starts, fit.loss, fit.delta, weights=weights, finest=1e-6)
    settled = ends.converged & ~vanished(problem, ends.theta).any(1)
    failed = int((~settled).sum())
    if failed * 100 > resamples:
        warnings.warn(
            f"{failed} of {resamples} refits did not settle on a law: {n} runs do not fix five "
            "constants when some are left out; train more, at other sizes and budgets",
            ScalingWarning,
            stacklevel=2,
        )
    return Bootstrap(fit, problem.natural(ends.theta), level, groups)

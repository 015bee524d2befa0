"""Diagnostics of fits and answers, each issued as one `ScalingWarning`.

Note [Lack of fit]
If losses do not follow the law, the residuals are curved functions of log N and log D. The
residuals are regressed on the powers x^2, x y, y^2, x^3 and y^3 of the standardized logarithms x
and y. The part of the powers that the five constants can absorb is removed first. An F test
compares the sum of squares that the powers explain with the remaining sum.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import fdtrc

from scaling.fit import newton
from scaling.fit.varpro import Problem
from scaling.law import Optimum
from scaling.runs import Runs, ScalingWarning
from scaling.units import FLOPS_PER_PARAMETER_TOKEN, Array

#: An interval is reported as wide if its ends differ by more than this factor.
WIDE_INTERVAL = 10.0

#: An optimum is reported to be far from the runs if its compute exceeds that of the largest run by
#: more than this factor.
FAR_COMPUTE = 1e4

#: An optimum is also reported if its parameters are below those of all runs by more than this
#: factor, or if its tokens per parameter are outside the range of the runs by more than it.
FAR_SHAPE = 10.0

#: Residuals are reported as curved if the p value of the F test is smaller than this.
BEND_P_VALUE = 1e-3

#: Number of second and third powers of log N and log D: see Note [Lack of fit].
NUM_BEND_TERMS = 5


@dataclass
class Diagnostics:
    """Diagnostic messages; a problem that occurs at many budgets becomes one message."""

    #: The (number, location) pairs of each message.
    occurrences: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def add(self, message: str, location: str = "", number: float = 0.0) -> None:
        """Add an occurrence of a message; a {} in the message is replaced by the worst number."""
        self.occurrences.setdefault(message, []).append((number, location))

    def __iter__(self) -> Iterator[str]:
        """Yield one text per message, with its first three locations."""
        for message, occurrences in self.occurrences.items():
            text = message.format(max(number for number, _ in occurrences))
            locations = [location for _, location in occurrences if location]
            if locations:
                more = f" and {len(locations) - 3} more" if len(locations) > 3 else ""
                text = f"{', '.join(locations[:3])}{more}: {text}"
            yield text


def warn_of_optimum(best: Optimum, runs: Runs) -> None:
    """Issue a `ScalingWarning` if an optimum has a wide interval, or is far from all runs."""
    if math.isnan(best.parameters):
        warnings.warn(best.reason, ScalingWarning, stacklevel=3)
        return
    prefix = f"at {best.compute:.3g} FLOPs the best size"
    interval = best.intervals["parameters"] if best.intervals else None
    messages = []
    if interval and interval.high > WIDE_INTERVAL * interval.low:
        messages.append(
            f"{prefix} lies between {interval.low:.3g} and {interval.high:.3g}, with noise and"
            " drift: the runs do not determine it better; train at larger budgets"
        )
    if distances := _describe_distances(best, runs):
        messages.append(
            f"{prefix}, {best.parameters:.3g}, is far from any run: {' and '.join(distances)}"
        )
    for message in messages:
        warnings.warn(message, ScalingWarning, stacklevel=3)


def warn_of_prediction(parameters: float, tokens: float, runs: Runs) -> None:
    """Issue a `ScalingWarning` if the predicted model is far from all runs."""
    compute = FLOPS_PER_PARAMETER_TOKEN * parameters * tokens
    distances = _describe_distances(Optimum(compute, parameters, tokens, math.nan), runs)
    if distances:
        warnings.warn(
            f"a model of {parameters:.3g} parameters and {tokens:.3g} tokens is far from any run:"
            f" {' and '.join(distances)}",
            ScalingWarning,
            stacklevel=3,
        )


def _describe_distances(best: Optimum, runs: Runs) -> list[str]:
    """Return phrases that describe how a model is far from all runs; empty if it is near.

    It is far if its compute is above all runs, its parameters are below all runs, or its tokens per
    parameter are outside the range of the runs: see `FAR_COMPUTE` and `FAR_SHAPE`.
    """
    ratios = runs.tokens / runs.parameters
    ratio = best.tokens / best.parameters
    largest = float((FLOPS_PER_PARAMETER_TOKEN * runs.parameters * runs.tokens).max())
    smallest = runs.parameters.min()
    distances = []
    if best.compute > FAR_COMPUTE * largest:
        distances.append(f"{best.compute / largest:.2g} times the compute of the largest")
    if best.parameters < smallest / FAR_SHAPE:
        distances.append(f"{smallest / best.parameters:.2g} times smaller than the smallest")
    if not ratios.min() / FAR_SHAPE < ratio < ratios.max() * FAR_SHAPE:
        span = f"{ratios.min():.2g} to {ratios.max():.2g}"
        distances.append(f"at {ratio:.2g} tokens per parameter, while the runs have {span}")
    return distances


class BendTest(NamedTuple):
    """The sums of squares of the test in Note [Lack of fit]."""

    explained: float
    remaining: float
    #: Degrees of freedom of the explained and of the remaining sum of squares.
    explained_freedom: int
    remaining_freedom: int


def compute_bend_p_value(problem: Problem, theta: Array, errors: Array) -> float:
    """Return the p value of the F test in Note [Lack of fit].

    This is the probability of residuals at least this curved if the losses follow the law. It is 1
    if there are too few runs or no noise.
    """
    test = _compute_bend_test(problem, theta, errors)
    if test is None:
        return 1.0
    mean_explained = test.explained / test.explained_freedom
    mean_remaining = test.remaining / test.remaining_freedom
    ratio = mean_explained / mean_remaining
    return float(fdtrc(test.explained_freedom, test.remaining_freedom, ratio))


def compute_lack_of_fit(problem: Problem, theta: Array, errors: Array) -> float:
    """Return the standard deviation of the error of log loss due to the form of the law.

    It is the root of the mean square that the powers explain in excess of noise. It grows
    continuously from zero, so an interval that includes it does not jump at a significance level.
    """
    test = _compute_bend_test(problem, theta, errors)
    if test is None:
        return 0.0
    by_noise = test.explained_freedom * test.remaining / test.remaining_freedom
    return math.sqrt(max(test.explained - by_noise, 0.0) / len(errors))


def _compute_bend_test(problem: Problem, theta: Array, errors: Array) -> BendTest | None:
    """Return the sums of squares of the bend test; None for too few runs or runs without noise.

    Residuals are clipped at four robust standard deviations, so misread runs do not dominate.
    """
    logs = np.log([problem.columns[name] for name in ("parameters", "tokens")])
    x, y = (logs - logs.mean(1)[:, None]) / logs.std(1)[:, None]
    terms = np.stack([x**2, x * y, y**2, x**3, y**3], axis=1)
    spread = 1.4826 * float(np.median(np.abs(errors)))
    freedom = len(errors) - len(theta) - NUM_BEND_TERMS
    if freedom < 5 or spread < 1e-7:
        return None
    basis, _ = np.linalg.qr(newton.compute_log_jacobian(problem, theta).T)
    clipped = np.clip(errors, -4 * spread, 4 * spread)
    clipped = clipped - basis @ (basis.T @ clipped)
    terms = terms - basis @ (basis.T @ terms)
    directions, sizes, _ = np.linalg.svd(terms, full_matrices=False)
    directions = directions[:, sizes > 1e-8 * sizes[0]]
    explained = float(((directions.T @ clipped) ** 2).sum())
    remaining = max(float(clipped @ clipped) - explained, 1e-300)
    return BendTest(explained, remaining, directions.shape[1], freedom)

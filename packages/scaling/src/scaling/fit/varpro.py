"""Variable projection for scaling laws: a grid over the exponents, linear algebra for the rest.

Note [Variable projection]
A scaling law y = sum_k a_k g_k(x; exponents) is linear in its amplitudes a_k. For fixed exponents
the best amplitudes are therefore a small non-negative least-squares problem. The search needs
starts for the exponents only (Golub and Pereyra 1973). The starts are then refined in all constants
by Newton's method (`search.py`, `newton.py`). For Chinchilla's law, a grid over two exponents finds
the same basin as 4,500 starts over all five constants.

Note [Centered parameters]
`Problem` stores the constants as a vector theta: first the amplitudes, then the exponents. The
amplitude of a term that contains an exponent is stored as a logarithm. In addition, log g_k is
centered, which means that its mean over the rows is subtracted. Otherwise a larger exponent and a
larger amplitude would compensate each other and the Hessian would be nearly singular. Other
amplitudes are stored without a logarithm and may be zero. For Chinchilla's law theta is (E, a, b,
alpha, beta) of

    L = E + exp(a - alpha n) + exp(b - beta d),   n = log N - mean(log N), d = log D - mean(log D).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scaling.equality import ComparesArrays
from scaling.laws.form import CATALOG, Form
from scaling.runs import Runs
from scaling.units import Array

#: Approximate number of points of the grid over all exponents. On twelve tables of `hard_runs` in
#: test_parametric.py, 25 to 625 points find the same optima. The law "tied" has one exponent. For
#: this law and 150 similar tables, `prove` misses four optima with 17 points, two with 120 points
#: and none with 289.
GRID_POINTS = 289

#: The bounds of a log amplitude are this far below the log of `Problem.target_spread` and this far
#: above the mean log target. A term at the lower bound is 1e-13 times the spread, which rounding
#: errors hide. The centered amplitude of a term is its geometric mean over the rows. Terms are
#: positive, so this mean exceeds the mean target by no more than the residuals, and the upper bound
#: only prevents overflow. On the tables of `hard_runs`, ranges of 20 to 60 find the same optima.
LOG_AMPLITUDE_RANGE = 30.0

#: The grid of a positive exponent starts at this multiple of its lower bound and stops at this
#: multiple of its upper bound. On the same tables, the search misses no optimum with values of
#: `GRID_START` from 1 to 4 and of `GRID_STOP` from 0.4 to 1.
GRID_START = 2.0
GRID_STOP = 1 / 1.5

#: Least amplitude of a start, in units of `Problem.target_spread`. On the same tables, 1e-6 to 0.05
#: miss no optimum, and 0.5 misses one.
LEAST_AMPLITUDE = 0.05

#: Ridge of the normal equations of the starts, whose terms are normalized.
RIDGE = 1e-13

#: Largest change per step of Newton's method: of an exponent, of a log amplitude, and of any other
#: amplitude in units of the target's geometric mean. Without a limit, an almost singular Hessian
#: proposes steps that overflow. On the same tables, limits of 0.5 to 100 find the same optima.
MAX_NEWTON_STEP = 2.0


@dataclass(frozen=True)
class Term:
    """The logarithm of g_k in Note [Variable projection], which is linear in the exponents.

    It is the sum of a centered part and a center. The centered part of a row is
    constant + sum_j exponent_j * slope_j. The center is center_constant + sum_j exponent_j *
    center_slope_j, the same number in all rows. The amplitude in theta includes the center: see
    Note [Centered parameters].
    """

    #: Centered slope of each exponent that the term uses, by the exponent's index, (n,).
    slopes: dict[int, Array]
    #: The centered part that does not depend on any exponent, (n,).
    constant: Array
    #: The derivative of the center with respect to each exponent of the form, (exponents,).
    center_slopes: Array
    #: The part of the center that does not depend on any exponent.
    center_constant: float


@dataclass(frozen=True, eq=False, repr=False)
class Problem(ComparesArrays):
    """The data of a fit: a form, its inputs and the logarithms of the target.

    See Note [Centered parameters] for the parameter vector theta of length P.
    """

    form: Form
    columns: Mapping[str, Array]
    #: log y, (n,).
    log_target: Array

    @staticmethod
    def from_runs(runs: Runs) -> "Problem":
        """Return the problem of fitting Chinchilla's law to runs."""
        columns = {"parameters": runs.parameters, "tokens": runs.tokens}
        return Problem(CATALOG["chinchilla"], columns, np.log(runs.loss))

    @cached_property
    def num_terms(self) -> int:
        """Number of terms, K."""
        return len(self.form.terms)

    @cached_property
    def terms(self) -> list[Term]:
        """The terms, centered over the rows if they depend on an exponent."""
        terms = []
        decomposed = self.form.decompose(self.columns)
        for name, (constant, slopes) in zip(self.form.terms, decomposed, strict=True):
            if not np.isfinite([constant, *slopes.values()]).all():
                raise ValueError(
                    f"{self.form.name}: the logarithm of term {name!r} is not finite in every row"
                )
            center_slopes = np.zeros(len(self.form.exponents))
            center_constant = 0.0
            if slopes:
                center_constant = float(constant.mean())
                for j, slope in slopes.items():
                    center_slopes[j] = slope.mean()
            centered = {j: slope - center_slopes[j] for j, slope in slopes.items()}
            terms.append(Term(centered, constant - center_constant, center_slopes, center_constant))
        return terms

    @cached_property
    def log_amplitude_terms(self) -> list[int]:
        """Indices of the terms whose amplitude is stored in theta as a logarithm."""
        return [k for k, term in enumerate(self.terms) if term.slopes]

    @cached_property
    def target_spread(self) -> float:
        """The standard deviation of the target, which is the scale of a term's amplitude.

        It is at least 1e-16 times the geometric mean of the target, so that its logarithm is finite
        if all targets are equal.
        """
        mean = self.log_target.mean()
        relative = float(np.exp(self.log_target - mean).std())
        return max(relative, 1e-16) * math.exp(mean)

    @cached_property
    def max_step(self) -> Array:
        """The largest change of each parameter per step, (P,).

        It scales with the target, so targets in any unit are fitted by the same steps.
        """
        sizes = np.full(self.num_terms + len(self.form.exponents), MAX_NEWTON_STEP)
        is_log = np.isin(np.arange(self.num_terms), self.log_amplitude_terms)
        sizes[: self.num_terms][~is_log] *= math.exp(self.log_target.mean())
        return sizes

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper bounds of theta, each (P,)."""
        log_spread = math.log(self.target_spread)
        low = np.zeros(self.num_terms)
        high = np.full(self.num_terms, np.inf)
        low[self.log_amplitude_terms] = log_spread - LOG_AMPLITUDE_RANGE
        high[self.log_amplitude_terms] = self.log_target.mean() + LOG_AMPLITUDE_RANGE
        ranges = np.array([*self.form.exponents.values()], np.float64).reshape(-1, 2)
        return np.concatenate([low, ranges[:, 0]]), np.concatenate([high, ranges[:, 1]])

    @cached_property
    def exponent_grid(self) -> list[Array]:
        """Grid points of each exponent, inside its bounds."""
        points = round(GRID_POINTS ** (1 / max(len(self.form.exponents), 1)))
        grid = []
        for low, high in self.form.exponents.values():
            if low > 0:
                axis = np.geomspace(low * GRID_START, high * GRID_STOP, points)
                grid.append(np.clip(axis, low, high))
            else:
                grid.append(np.linspace(low, high, points + 2)[1:-1])
        return grid

    def compute_log_values(self, theta: Array) -> list[Array]:
        """Return the centered log g of each term, (S, n) or (1, n), for (S, P) parameters."""
        exponents = theta[:, self.num_terms :]
        values = []
        for term in self.terms:
            log_value = term.constant[None]
            is_zero = not term.constant.any()
            for j, slope in term.slopes.items():
                product = exponents[:, j, None] * slope
                # The constant is usually zero, and adding it would double the time.
                log_value = product if is_zero else log_value + product
                is_zero = False
            values.append(log_value)
        return values

    def _compute_centers(self, exponents: Array) -> Array:
        """Return the center of each term whose amplitude is stored as a logarithm: see `Term`."""
        terms = [self.terms[k] for k in self.log_amplitude_terms]
        slopes = np.array([term.center_slopes for term in terms])
        constants = np.array([term.center_constant for term in terms])
        centers: Array = constants + exponents @ slopes.T if terms else np.empty(0)
        return centers

    def to_constants(self, theta: Array) -> Array:
        """Return the uncentered constants of the form for parameters of shape (…, P)."""
        constants = theta.copy()
        logs = self.log_amplitude_terms
        log_amplitudes = theta[..., logs] - self._compute_centers(theta[..., self.num_terms :])
        # Beyond about ±700, the exponential is inf or 0 in float64.
        constants[..., logs] = np.exp(np.clip(log_amplitudes, -700, 700))
        return constants

    def from_constants(self, constants: Array) -> Array:
        """Return the parameters theta for constants of shape (…, P); inverse of `to_constants`."""
        theta = constants.copy()
        logs = self.log_amplitude_terms
        centers = self._compute_centers(constants[..., self.num_terms :])
        theta[..., logs] = np.log(constants[..., logs]) + centers
        return theta


def build_grid_starts(problem: Problem) -> Array:
    """Return (S, P) starts: each point of the exponent grid with its best amplitudes.

    The amplitudes minimize the squared relative error of the target and are not negative.
    """
    grid = np.array(list(itertools.product(*problem.exponent_grid)))
    theta = np.concatenate([np.zeros((len(grid), problem.num_terms)), grid], axis=1)
    # Each term divided by the target, (S, n), or (1, n) if the term does not use an exponent.
    relative_terms = [
        np.exp(value - problem.log_target) for value in problem.compute_log_values(theta)
    ]
    shape = (len(grid), len(problem.log_target))
    design = np.stack([np.broadcast_to(term, shape) for term in relative_terms], axis=1)
    theta[:, : problem.num_terms] = _solve_nonnegative_amplitudes(design)
    least = LEAST_AMPLITUDE * problem.target_spread
    for k in problem.log_amplitude_terms:
        # A zero amplitude has no logarithm, and the exponent of its term would have no gradient.
        theta[:, k] = np.log(np.maximum(theta[:, k], least))
    return theta


def _solve_nonnegative_amplitudes(design: Array) -> Array:
    """Return the non-negative a (S, K) that minimize |sum_k a_k design_k - 1|^2, for (S, K, n).

    At the minimum, some amplitudes are zero and the others solve a linear system. There are few
    terms, so all subsets of positive amplitudes are tried.
    """
    # The terms may differ by many orders of magnitude, so they are normalized first.
    norms = np.linalg.norm(design, axis=2)
    design = design / norms[..., None]
    gram = design @ design.transpose(0, 2, 1)
    sums = design.sum(2)
    best = np.zeros_like(sums)
    gain = np.zeros(len(sums))
    for size in range(1, sums.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(sums.shape[1]), size)):
            # The ridge keeps the systems of nearly proportional terms solvable.
            system = gram[:, subset][:, :, subset] + RIDGE * np.eye(size)
            amplitudes = np.linalg.solve(system, sums[:, subset, None])[..., 0]
            # This is the decrease of the squared error relative to amplitudes of zero.
            decrease = (amplitudes * sums[:, subset]).sum(1)
            better = (amplitudes >= 0).all(1) & (decrease > gain)
            gain[better] = decrease[better]
            best[better] = 0
            best[np.ix_(better, subset)] = amplitudes[better]
    result: Array = best / norms
    return result

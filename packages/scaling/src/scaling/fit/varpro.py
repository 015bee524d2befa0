"""Variable projection for scaling laws: a grid over the exponents, linear algebra for the rest.

Note [Variable projection]
A scaling law y = sum_k a_k g_k(x; exponents) is linear in its amplitudes a_k. For fixed exponents
the best amplitudes are therefore a small non-negative least-squares problem, and only the exponents
have to be searched (Golub and Pereyra 1973). For Chinchilla's law, a grid over two exponents finds
the same basin as 4,500 starts over all five constants.

Note [Centered parameters]
`Problem` stores the constants as a vector theta: first the amplitudes, then the exponents. The
amplitude of a term that depends on an exponent is stored as a logarithm, and log g_k is centered,
which means that its mean over the rows is subtracted. Otherwise a larger exponent and a larger
amplitude would compensate each other and the Hessian would be nearly singular. Other amplitudes are
stored without a logarithm and may be zero. For Chinchilla's law theta is (E, a, b, alpha, beta) of

    L = E + exp(a - alpha x) + exp(b - beta y),   x = log N - mean(log N), y = log D - mean(log D).

If the sum is raised to a power, all amplitudes are stored as logarithms, and the target is divided
by its geometric mean before the fit.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scaling.equality import ComparesArrays
from scaling.law import Law
from scaling.laws.form import CATALOG, Form
from scaling.runs import Runs
from scaling.units import Array

#: Approximate number of points of the grid over all exponents.
GRID_POINTS = 289

#: Largest number of grid points per exponent.
MAX_POINTS_PER_EXPONENT = 17

#: Step of complex-step derivatives. Nothing is subtracted, so a tiny step loses no digits.
COMPLEX_STEP = 1e-30

#: Number of random exponents at which the derivatives of a linear term must be equal.
LINEARITY_POINTS = 5

#: Range of a log amplitude: from log(spread) - 30 to max(log(spread), 0) + 30, where spread is
#: `Problem.target_spread`.
LOG_AMPLITUDE_RANGE = 30.0


@dataclass(frozen=True)
class Terms:
    """The values of K terms for S parameter vectors at n rows."""

    #: Centered log g of each term, of shape (S, n) or (1, n).
    log_values: list[Array]
    #: For each term, derivatives of its log value by exponent index, of shape (S, n) or (1, n).
    log_derivatives: list[dict[int, Array]]
    #: The amount that was subtracted from each term's log value, of shape (S,) or (1,).
    centers: list[Array]


@dataclass(frozen=True)
class LinearTerm:
    """A term whose log value is linear in its exponents: constant + sum_j exponent_j * slope_j."""

    #: The derivative of the centered log value with respect to each exponent, (n,).
    slopes: dict[int, Array]
    #: The part of the centered log value that does not depend on any exponent, (n,).
    constant: Array
    #: The derivative of the center with respect to each exponent; zero if the term does not use it.
    center_slopes: Array
    #: The part of the center that does not depend on any exponent.
    center_constant: float


@dataclass(frozen=True, eq=False)
class Problem(ComparesArrays):
    """The data of a fit: a form, its inputs and the logarithms of the target.

    See Note [Centered parameters] for the parameter vector theta of length P.
    """

    form: Form
    columns: Mapping[str, Array]
    #: log y, (n,).
    log_target: Array
    #: Constants that are not fitted, by name.
    fixed: Mapping[str, float] = field(default_factory=dict)
    #: The rows over which log values are averaged for centering; None means the rows of `columns`.
    centering_columns: Mapping[str, Array] | None = None

    @staticmethod
    def chinchilla(runs: Runs) -> "Problem":
        """Return the problem of fitting Chinchilla's law to runs."""
        columns = {"parameters": runs.parameters, "tokens": runs.tokens}
        return Problem(CATALOG["chinchilla"], columns, np.log(runs.loss))

    def with_columns(self, columns: Mapping[str, Array]) -> "Problem":
        """Return a problem with the same parameters theta that is evaluated at other rows."""
        n = len(next(iter(columns.values())))
        return replace(
            self, columns=columns, log_target=np.zeros(n), centering_columns=self.columns
        )

    @cached_property
    def num_terms(self) -> int:
        """Number of terms, K."""
        return len(self.form.terms)

    @cached_property
    def constant_names(self) -> tuple[str, ...]:
        """Names of the constants, in the order of theta."""
        return self.form.constants

    @cached_property
    def signs(self) -> Array:
        """Sign of each term, (K,)."""
        return np.array([self.form.signs.get(name, 1) for name in self.form.terms], np.float64)

    @cached_property
    def log_amplitude_terms(self) -> list[int]:
        """Indices of the terms whose amplitude theta stores as a logarithm."""
        exponents = enumerate(self.form.term_exponents)
        return [k for k, indices in exponents if indices or self.power_index]

    @cached_property
    def term_exponents(self) -> list[list[int]]:
        """Indices of the exponents on which the centered log value of each term depends."""
        result = []
        for k, indices in enumerate(self.form.term_exponents):
            depends = set(indices)
            if self.power_index and k not in self.free_terms:
                # A fixed amplitude is not rescaled, so its term is shifted by mean / power.
                depends.add(self.power_index - self.num_terms)
            result.append(sorted(depends))
        return result

    @cached_property
    def free_terms(self) -> list[int]:
        """Indices of the terms whose amplitude is fitted."""
        return [k for k, name in enumerate(self.form.terms) if name not in self.fixed]

    @cached_property
    def power_index(self) -> int | None:
        """Index in theta of the exponent of the whole sum; None if the sum has no exponent."""
        return self.constant_names.index(self.form.power) if self.form.power else None

    @cached_property
    def log_target_mean(self) -> float:
        """Mean of the log target, subtracted before a sum with a power is fitted; otherwise 0."""
        return float(self.log_target.mean()) if self.power_index else 0.0

    @cached_property
    def target_spread(self) -> float:
        """Scale of a term's amplitude.

        It is the standard deviation of the target, or 1 if the sum is raised to a power.
        """
        if self.power_index:
            return 1.0
        return max(float(np.exp(self.log_target).std()), 1e-16)

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper bounds of theta; a fixed constant has equal bounds."""
        log_spread = math.log(self.target_spread)
        low = np.zeros(self.num_terms)
        high = np.full(self.num_terms, np.inf)
        low[self.log_amplitude_terms] = log_spread - LOG_AMPLITUDE_RANGE
        high[self.log_amplitude_terms] = max(log_spread, 0.0) + LOG_AMPLITUDE_RANGE
        ranges = np.array([*self.form.exponents.values()], np.float64).reshape(-1, 2)
        low = np.concatenate([low, ranges[:, 0]])
        high = np.concatenate([high, ranges[:, 1]])
        for name, value in self.fixed.items():
            i = self.constant_names.index(name)
            low[i] = high[i] = math.log(value) if i in self.log_amplitude_terms else value
        return low, high

    @cached_property
    def exponent_grid(self) -> list[Array]:
        """Grid points of each exponent from which the search starts."""
        unknown = [name for name in self.form.exponents if name not in self.fixed]
        points = round(GRID_POINTS ** (1 / max(len(unknown), 1)))
        points = min(points, MAX_POINTS_PER_EXPONENT)
        grid = []
        for name, (low, high) in self.form.exponents.items():
            if name in self.fixed:
                grid.append(np.array([self.fixed[name]]))
            elif low > 0:
                grid.append(np.geomspace(low * 2, high / 1.5, points))
            else:
                grid.append(np.linspace(low, high, points + 2)[1:-1])
        return grid

    def evaluate(self, theta: Array, *, derivatives: bool = False) -> Terms:
        """Return the terms for (S, P) parameters, with their derivatives if requested."""
        exponents = theta[:, self.num_terms :]
        result = Terms([], [{} for _ in range(self.num_terms)], [])
        for k, linear in enumerate(self._linear_terms):
            if linear is None:
                log_value, center = self._evaluate_term(exponents, k)
            else:
                log_value, center = _evaluate_linear(linear, exponents)
            result.log_values.append(log_value)
            result.centers.append(center)
            if not derivatives:
                continue
            for j in self.term_exponents[k]:
                if linear is not None:
                    result.log_derivatives[k][j] = linear.slopes[j][None]
                else:
                    result.log_derivatives[k][j] = self._differentiate_term(exponents, k, j)[0]
        return result

    def _evaluate_term(self, exponents: Any, k: int) -> tuple[Any, Any]:
        """Return the centered log value and the center of a term; exponents may be complex."""
        by_name = {name: exponents[:, [j]] for j, name in enumerate(self.form.exponents)}
        shape = (len(exponents), len(self.log_target))
        log_value = self.form.log_term(k, self.columns, by_name) + np.zeros(shape)
        center = np.zeros(len(exponents), exponents.dtype)
        if k in self.log_amplitude_terms and k in self.free_terms:
            reference = log_value
            if self.centering_columns is not None:
                reference = self.form.log_term(k, self.centering_columns, by_name)
                reference = reference + np.zeros((len(exponents), 1))
            center = reference.mean(1)
        elif self.power_index:
            center = self.log_target_mean / exponents[:, self.power_index - self.num_terms]
        return log_value - center[:, None], center

    def _differentiate_term(self, exponents: Array, k: int, j: int) -> tuple[Array, Array]:
        """Return the derivatives of a term's log value and center with respect to exponent j."""
        shifted = exponents.astype(np.complex128)
        shifted[:, j] += 1j * COMPLEX_STEP
        log_value, center = self._evaluate_term(shifted, k)
        return log_value.imag / COMPLEX_STEP, center.imag / COMPLEX_STEP

    @cached_property
    def _linear_terms(self) -> list[LinearTerm | None]:
        """For each term, its linear decomposition, or None if it is not linear in its exponents.

        A term counts as linear if its derivatives are equal at several random exponents. These must
        not be on one ray from the origin, because the derivatives of alpha * beta / (alpha + beta)
        are constant along a ray.
        """
        lowest = [axis[0] for axis in self.exponent_grid]
        highest = [axis[-1] for axis in self.exponent_grid]
        random = np.random.default_rng(0)
        points = random.uniform(lowest, highest, (LINEARITY_POINTS, len(lowest)))
        result: list[LinearTerm | None] = []
        for k, indices in enumerate(self.term_exponents):
            log_value, center = self._evaluate_term(points[:1], k)
            constant = log_value[0]
            center_constant = float(center[0])
            slopes: dict[int, Array] = {}
            center_slopes = np.zeros(len(self.form.exponents))
            is_linear = True
            for j in indices:
                slope, center_slope = self._differentiate_term(points, k, j)
                is_linear &= bool(np.allclose(slope, slope[0], rtol=1e-12, atol=1e-12))
                slopes[j] = slope[0]
                center_slopes[j] = center_slope[0]
                constant = constant - points[0, j] * slope[0]
                center_constant -= points[0, j] * center_slope[0]
            if np.abs(constant).max() < 1e-12 * np.abs(log_value).max():
                constant = np.zeros_like(constant)  # only the rounding of the products
            linear = LinearTerm(slopes, constant, center_slopes, center_constant)
            result.append(linear if is_linear else None)
        return result

    def to_constants(self, theta: Array) -> Array:
        """Return the uncentered constants of the form for parameters of shape (…, P)."""
        flat = theta.reshape(-1, theta.shape[-1])
        constants = flat.copy()
        centers = self.evaluate(flat).centers
        for k in self.log_amplitude_terms:
            shift: Array | float = 0.0
            if k in self.free_terms:
                shift = centers[k]
                if self.power_index:
                    shift = shift - self.log_target_mean / flat[:, self.power_index]
            constants[:, k] = np.exp(np.clip(flat[:, k] - shift, -700, 700))
        result: Array = constants.reshape(theta.shape)
        return result

    def to_law(self, theta: Array) -> Law:
        """Return the Chinchilla law of one parameter vector (P,)."""
        return Law(*map(float, self.to_constants(theta)))

    def from_law(self, law: Law) -> Array:
        """Return the parameter vector (P,) of a Chinchilla law: the inverse of `to_law`."""
        theta = law.constants.copy()
        for k, center in enumerate(self.evaluate(theta[None]).centers):
            if k in self.log_amplitude_terms:
                theta[k] = math.log(theta[k]) + center[0]
        return theta


def _evaluate_linear(linear: LinearTerm, exponents: Array) -> tuple[Array, Array]:
    """Return the centered log value and the center of a term that is linear in its exponents."""
    indices = [*linear.slopes]
    center = linear.center_constant + exponents[:, indices] @ linear.center_slopes[indices]
    log_value = linear.constant[None]
    is_zero = not linear.constant.any()
    for j, slope in linear.slopes.items():
        product = exponents[:, j, None] * slope
        # The constant is usually zero, and adding it would double the time.
        log_value = product if is_zero else log_value + product
        is_zero = False
    return log_value, center


def grid_starts(problem: Problem) -> Array:
    """Return (S, P) starts: each point of the exponent grid with its best amplitudes.

    The amplitudes minimize the squared relative error of the target and are not negative.
    """
    lower = problem.bounds[0]
    grid = np.array(list(itertools.product(*problem.exponent_grid)))
    amplitudes = np.tile(lower[: problem.num_terms], (len(grid), 1))
    theta = np.concatenate([amplitudes, grid], axis=1)
    # The sum of the terms should equal y, or the root of y if the sum has a power.
    goal = np.broadcast_to(problem.log_target, (len(grid), len(problem.log_target)))
    if problem.power_index:
        goal = (problem.log_target - problem.log_target_mean) / theta[:, [problem.power_index]]
    log_values = problem.evaluate(theta).log_values
    columns = np.stack([np.exp(log_value - goal) for log_value in log_values], axis=1)
    columns *= problem.signs[:, None]
    free = problem.free_terms
    remainder = np.ones_like(goal)
    for k in set(range(problem.num_terms)) - set(free):
        amplitude = np.exp(lower[k]) if k in problem.log_amplitude_terms else lower[k]
        remainder = remainder - columns[:, k] * amplitude
    columns = columns[:, free]
    moment = (columns @ remainder[..., None])[..., 0]
    theta[:, free] = nonnegative_least_squares(columns @ columns.transpose(0, 2, 1), moment)
    for k in set(free) & set(problem.log_amplitude_terms):
        # If an amplitude were zero, its exponent would not have a gradient.
        theta[:, k] = np.log(np.maximum(theta[:, k], 0.05 * problem.target_spread))
    return theta


def nonnegative_least_squares(gram: Array, moment: Array) -> Array:
    """Solve batched least squares with non-negative variables, exactly, for a few variables.

    Each subset of the variables is solved with the other variables at zero, and the best
    non-negative solution is returned. `gram` is X'X, (…, K, K), and `moment` is X'y, (…, K).
    """
    best = np.zeros_like(moment)
    best_value = np.zeros(moment.shape[:-1])
    variables = range(moment.shape[-1])
    for size in range(1, moment.shape[-1] + 1):
        for subset in itertools.combinations(variables, size):
            face = list(subset)
            inside = gram[..., face, :][..., :, face]
            # Columns may differ by many orders of magnitude, so they are normalized first.
            unit = np.sqrt(np.maximum(np.einsum("...ii->...i", inside), 1e-300))
            scaled = inside / (unit[..., :, None] * unit[..., None, :]) + 1e-13 * np.eye(size)
            right = (moment[..., face] / unit)[..., None]
            solution = np.linalg.solve(scaled, right)[..., 0] / unit
            value = -(solution * moment[..., face]).sum(-1)
            better = (solution >= 0).all(-1) & (value < best_value)
            best_value = np.where(better, value, best_value)
            candidate = np.zeros_like(moment)
            candidate[..., face] = solution
            best = np.where(better[..., None], candidate, best)
    return best

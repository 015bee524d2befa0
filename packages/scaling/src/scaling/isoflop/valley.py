"""Valleys of loss over log N at fixed compute, and the model size at the bottom of each.

Note [Common shape]
The bottom of a parabola is biased by the skew of a valley. A polynomial that follows the skew of
each budget separately is noisy. However, under a law E + A / N^alpha + B / D^beta at C = 6 N D, the
valleys of all budgets have the form

    loss = c0 + c1 exp(-p u) / p + c2 exp(q u) / q,   u = log N - mean(log N),

with p = alpha and q = beta for every budget. Two numbers (p, q) therefore describe the skew of all
budgets. As both approach zero, the curves become parabolas. The coefficients c0, c1 and c2 of each
budget follow from (p, q) by linear least squares. The search is therefore over two numbers
(variable projection, Golub and Pereyra 1973). The Jacobian is Kaufman's approximation.

Note [Prior of the shape]
Noise may leave (p, q) almost undetermined, so they have the prior of Note [Prior of the exponents].
The weight of the prior is the variance of the noise. The search and the estimate of this variance
are repeated until the variance converges. The first search has no prior: without noise, the result
of this search is exact, whereas a prior may add another basin. The experiments are
`test_interval_covers_the_truth_at_four_runs_per_budget`, in which half of the intervals miss the
truth without a prior, and `test_wide_and_off_center_grids_do_not_bias_the_common_shape`, in which a
parabola is biased.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scaling.equality import ComparesArrays
from scaling.runs import Runs
from scaling.uncertainty.posterior import PRIOR_EXPONENT, PRIOR_PRECISION_ROOT
from scaling.units import Array

#: Grid of starts for p and for q; see `test_default_is_within_one_percent_for_any_law_and_grid`.
START_EXPONENTS = np.geomspace(0.06, 1.5, 5)

#: Bounds of p and q. At 0.01 a valley cannot be distinguished from a parabola. In 60 generated
#: tables of five laws, lower bounds of 0.001 to 0.03 and upper ones of 2 to 8 give equal sizes.
MIN_EXPONENT = 0.01
MAX_EXPONENT = 4.0


@dataclass(frozen=True, eq=False, repr=False)
class Valley(ComparesArrays):
    """The fitted valley of one budget."""

    compute: float
    #: The model size at the bottom.
    parameters: float
    #: The loss at the bottom.
    loss: float
    runs: Runs
    #: Coefficients in u = log N - mean(log N), of the curve in Note [Common shape] if `shape` is
    #: set, and otherwise of a parabola.
    coefficients: tuple[float, ...]
    shape: tuple[float, float] | None = None

    @property
    def tokens(self) -> float:
        """Training tokens of the best model, interpolated between the runs of the budget."""
        # Interpolation in logs reproduces D = C / (k N) exactly for any k.
        order = np.argsort(self.runs.parameters, kind="stable")
        log_sizes = np.log(self.runs.parameters)[order]
        log_tokens = np.log(self.runs.tokens)[order]
        return math.exp(np.interp(math.log(self.parameters), log_sizes, log_tokens))

    def predict(self, parameters: Array) -> Array:
        """Return the fitted loss of models of these sizes."""
        u = np.log(parameters) - np.log(self.runs.parameters).mean()
        coefficients = np.array(self.coefficients)
        if self.shape is None:
            polynomial: Array = np.polynomial.polynomial.polyval(u, coefficients)
            return polynomial
        curve: Array = _compute_curve_terms(u, *self.shape) @ coefficients
        return curve


def fit_parabola(x: Array, loss: Array) -> tuple[Array, float | None]:
    """Return the coefficients and the bottom of a parabola of loss over x = log N.

    `x` is sorted. The coefficients apply to x - mean(x). The bottom is None if it is not within the
    runs.
    """
    u = x - x.mean()
    coefficients = np.polynomial.polynomial.polyfit(u, loss, 2)
    _, slope, curvature = map(float, coefficients)
    bottom = -slope / (2 * curvature) if curvature > 0 else math.nan
    return coefficients, float(bottom + x.mean()) if u[0] <= bottom <= u[-1] else None


@dataclass(frozen=True)
class CommonShape:
    """The shape (p, q) of all valleys, with the curve of each budget."""

    exponents: tuple[float, float]
    #: c0, c1 and c2 of each budget, (budgets, 3).
    coefficients: Array
    #: The bottom of each curve in u, (budgets,); nan if a curve has none.
    bottoms: Array
    #: Covariance of the bottoms at unit variance of log loss, (budgets, budgets).
    covariance: Array


@dataclass(frozen=True)
class _Budgets:
    """The runs of all budgets, padded to the same length with runs of zero weight."""

    #: Centered log sizes, (budgets, n).
    u: Array
    #: 1 / loss, so that weighted residuals are relative; 0 for padding. (budgets, n).
    weights: Array
    #: True for runs, False for padding, (budgets, n).
    mask: NDArray[np.bool_]

    @staticmethod
    def from_sizes(sizes: Sequence[Array], losses: Sequence[Array]) -> "_Budgets":
        shape = (len(sizes), max(map(len, sizes)))
        u = np.zeros(shape)
        weights = np.zeros(shape)
        for i, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
            u[i, : len(size)] = size
            weights[i, : len(size)] = 1 / loss
        return _Budgets(u, weights, weights > 0)

    @property
    def freedom(self) -> int:
        """Number of runs beyond three per budget."""
        return int(self.mask.sum()) - 3 * len(self.u)

    def compute_terms(self, p: float, q: float) -> Array:
        """Return the weighted terms of the curves, (budgets, n, 3)."""
        return _compute_curve_terms(self.u, p, q) * self.weights[..., None]

    def solve(self, p: float, q: float) -> tuple[Array, Array]:
        """Return an orthonormal basis of the weighted terms, (budgets, n, 3), and c0, c1 and c2."""
        basis, triangle = np.linalg.qr(self.compute_terms(p, q))
        ones = self.mask.astype(np.float64)[..., None]
        coefficients: Array = np.linalg.solve(triangle, basis.transpose(0, 2, 1) @ ones)[..., 0]
        return basis, coefficients

    def compute_slopes(self, p: float, q: float, coefficients: Array) -> Array:
        """Return the weighted derivatives of the curves in p and q, (budgets, n, 2)."""
        falling = np.exp(-p * self.u) / p
        rising = np.exp(q * self.u) / q
        by_p = -coefficients[:, 1:2] * falling * (self.u + 1 / p)
        by_q = coefficients[:, 2:3] * rising * (self.u - 1 / q)
        return np.stack([by_p, by_q], axis=-1) * self.weights[..., None]

    def compute_residuals(self, log_exponents: Array) -> Array:
        """Return the relative residuals of all runs for the best coefficients."""
        basis, _ = np.linalg.qr(self.compute_terms(*np.exp(log_exponents)))
        ones = self.mask[..., None]
        fitted: Array = basis @ (basis.transpose(0, 2, 1) @ ones)
        return (fitted - ones)[..., 0][self.mask]

    def compute_jacobian(self, log_exponents: Array) -> Array:
        """Return the derivatives of `compute_residuals` in log p and log q (Kaufman 1975)."""
        p, q = np.exp(log_exponents)
        basis, coefficients = self.solve(p, q)
        slopes = self.compute_slopes(p, q, coefficients) * (p, q)
        # The part of a slope that the coefficients absorb does not change the residuals.
        remaining: Array = slopes - basis @ (basis.transpose(0, 2, 1) @ slopes)
        return remaining[self.mask]


def fit_common_shape(sizes: Sequence[Array], losses: Sequence[Array]) -> CommonShape:
    """Return the shape that the valleys of all budgets share: see Note [Common shape].

    `sizes` has one array per budget: log N minus the mean log N of the budget. The covariance
    includes the uncertainty of the coefficients and of the shape.
    """
    budgets = _Budgets.from_sizes(sizes, losses)
    log_exponents, noise = _search_shape(budgets)
    p, q = map(float, np.exp(log_exponents))
    _, coefficients = budgets.solve(p, q)
    bottoms, gradients = _compute_bottoms(coefficients, p, q)
    count = len(sizes)
    columns = 3 * count + 2
    jacobian = np.zeros((*budgets.u.shape, columns))
    terms = budgets.compute_terms(p, q)
    for i in range(count):
        jacobian[i, :, 3 * i : 3 * i + 3] = terms[i]
    jacobian[..., -2:] = budgets.compute_slopes(p, q, coefficients)
    prior = np.zeros((2, columns))
    prior[:, -2:] = noise * PRIOR_PRECISION_ROOT / (p, q)
    rows = np.concatenate([jacobian[budgets.mask], prior])
    # The columns differ by many orders of magnitude, so they are scaled before the inversion.
    scale = np.linalg.norm(rows, axis=0) + 1e-300
    inverse = np.linalg.pinv(rows / scale, rcond=1e-13)
    changes = (gradients / scale) @ inverse
    return CommonShape((p, q), coefficients, bottoms, changes @ changes.T)


def _search_shape(budgets: _Budgets) -> tuple[Array, float]:
    """Return (log p, log q) and the standard deviation of log loss.

    See Note [Prior of the shape].
    """
    prior_mean = math.log(PRIOR_EXPONENT)
    starts = [np.array(pair) for pair in itertools.product(np.log(START_EXPONENTS), repeat=2)]
    log_exponents = min(
        starts, key=lambda pair: float((budgets.compute_residuals(pair) ** 2).sum())
    )
    noise = 0.0
    for _ in range(30):
        prior = noise * PRIOR_PRECISION_ROOT

        def residuals(pair: Array, prior: Array = prior) -> Array:
            return np.concatenate([budgets.compute_residuals(pair), prior @ (pair - prior_mean)])

        def jacobian(pair: Array, prior: Array = prior) -> Array:
            return np.concatenate([budgets.compute_jacobian(pair), prior])

        log_exponents = least_squares(
            residuals,
            log_exponents,
            jacobian,
            bounds=(math.log(MIN_EXPONENT), math.log(MAX_EXPONENT)),
            xtol=1e-14,
            ftol=1e-14,
            gtol=None,
        ).x
        previous = noise
        squares = float((budgets.compute_residuals(log_exponents) ** 2).sum())
        noise = math.sqrt(squares / budgets.freedom) + 1e-15
        if abs(noise - previous) < 1e-3 * noise:
            break
    return log_exponents, noise


def _compute_bottoms(coefficients: Array, p: float, q: float) -> tuple[Array, Array]:
    """Return each curve's bottom and its gradient with respect to all coefficients, p and q.

    The slope of a curve is zero at u = log(c1 / c2) / (p + q), if c1 and c2 are positive.
    """
    count = len(coefficients)
    bottoms = np.full(count, math.nan)
    gradients = np.zeros((count, 3 * count + 2))
    for i, (_, c1, c2) in enumerate(coefficients):
        if c1 > 0 and c2 > 0:
            bottoms[i] = math.log(c1 / c2) / (p + q)
            gradients[i, 3 * i + 1] = 1 / c1 / (p + q)
            gradients[i, 3 * i + 2] = -1 / c2 / (p + q)
            gradients[i, -2:] = -bottoms[i] / (p + q)
    return bottoms, gradients


def _compute_curve_terms(u: Array, p: float, q: float) -> Array:
    """Return 1, exp(-p u) / p and exp(q u) / q, stacked along the last axis."""
    return np.stack([np.ones_like(u), np.exp(-p * u) / p, np.exp(q * u) / q], axis=-1)

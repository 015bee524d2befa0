"""Where a budget's valley of loss over log N has its bottom: a polynomial, or one shape for all.

Notable: a parabola's bottom is off by the valley's skew, and a polynomial that follows the skew of
every budget by itself pays in noise. But the valleys of a law are one curve, moved and scaled:
E + A / N^alpha + B / D^beta at C = 6 N D is c0 + c1 exp(-alpha u) + c2 exp(beta u) in u = log N,
whatever C is. So the skew of all budgets is two numbers; a parabola is the limit of both at zero.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from scaling.equality import ComparesArrays
from scaling.runs import Array, Runs

# Where the search for the shape starts, in each of its two numbers.
EXPONENTS = np.geomspace(0.06, 1.5, 5)
# Of the two numbers' prior: what both are about, and the mean and the difference of their logs in
# deviations. They are equal in a valley as symmetric as a parabola; of published laws and tables
# they differ by a factor of e^0.5 or so.
USUAL, PRIOR = 1 / 3, np.array([[0.5, 0.5], [-1.0, 1.0]]) / np.array([[0.6], [0.5]])
# Bounds of the two numbers; at 0.01 a valley is a parabola for all that runs can tell.
FLATTEST, STEEPEST = 0.01, 4.0


@dataclass(frozen=True, eq=False)
class Valley(ComparesArrays):
    """One budget: where its loss is least, from which runs."""

    compute: float
    parameters: float
    """The size at the bottom."""
    loss: float
    runs: Runs
    coefficients: tuple[float, ...]
    """With u = log N less its mean over the runs: c of
    c0 + c1 u + c2 u^2 + …, or, with a shape (p, q), of c0 + c1 exp(-p u) / p + c2 exp(q u) / q."""
    shape: tuple[float, float] | None = None

    @property
    def tokens(self) -> float:
        """What a model of the best size is trained on, by the runs' own tokens about that size."""
        # In logs between neighbors, so that D = C / (k N) comes back exactly for any k.
        order = np.argsort(self.runs.parameters, kind="stable")
        sizes, tokens = np.log(self.runs.parameters)[order], np.log(self.runs.tokens)[order]
        return math.exp(np.interp(math.log(self.parameters), sizes, tokens))

    def predict(self, parameters: Array) -> Array:
        """The fitted loss of models of these sizes."""
        u = np.log(parameters) - np.log(self.runs.parameters).mean()
        c = np.array(self.coefficients)
        of = np.polynomial.polynomial.polyval
        curve: Array = of(u, c) if self.shape is None else _terms(u, *self.shape) @ c
        return curve


def polynomial_bottom(
    x: Array, loss: Array, degree: int, bandwidth: float | None
) -> tuple[Array, float | None]:
    """Coefficients in x - mean, and the lowest bottom inside; the weights follow the bottom."""
    u = x - x.mean()
    bottom = float(u[np.argmin(loss)])
    fine = np.linspace(u[0], u[-1], 1001)
    for _ in range(20 if bandwidth else 1):
        # polyfit squares its weights.
        weights = np.exp(-0.25 * ((u - bottom) / bandwidth) ** 2) if bandwidth else None
        c = np.polynomial.polynomial.polyfit(u, loss, degree, w=weights)
        curve = np.polynomial.Polynomial(c)
        slope, bend = curve.deriv(), curve.deriv(2)
        # Not by the roots of the slope: of a leading coefficient near zero they are noise.
        rising = np.flatnonzero((slope(fine[:-1]) < 0) & (slope(fine[1:]) >= 0))
        if not rising.size:
            return c, None
        low = rising[np.argmin(curve(fine[rising]))]
        bottom = float(fine[low])
        for _ in range(8):
            step = float(slope(bottom) / bend(bottom)) if bend(bottom) else 0.0
            bottom = float(np.clip(bottom - step, fine[low], fine[low + 1]))
    return c, bottom + float(x.mean())


@dataclass(frozen=True)
class Shape:
    """The shape (p, q) of all valleys, and what it makes of each budget."""

    exponents: tuple[float, float]
    coefficients: Array
    """(budgets, 3)"""
    bottoms: Array
    """(budgets,) of u; nan where a curve has none."""
    covariance: Array
    """(budgets, budgets) of the bottoms, for a unit variance of log loss."""

    @property
    def steepest(self) -> bool:
        """Whether the search ended at its steepest: the runs have no such shape."""
        return max(self.exponents) > 0.99 * STEEPEST


def common_shape(sizes: Sequence[Array], losses: Sequence[Array]) -> Shape:
    """Least squares in log loss over p, q > 0 and three coefficients for every budget.

    `sizes` are u = log N less its mean in each budget. The coefficients follow linearly from p and
    q, so the search is over two numbers (variable projection). The covariance is that of all
    coefficients and both numbers together.
    """
    # Budgets of fewer runs are filled up with runs of no weight.
    count, longest = len(sizes), max(map(len, sizes))
    u, w = np.zeros((count, longest)), np.zeros((count, longest))
    for i, (x, loss) in enumerate(zip(sizes, losses, strict=True)):
        u[i, : len(x)], w[i, : len(x)] = x, 1 / loss
    seen = w > 0

    def residuals(logs: Array) -> Array:
        basis, _ = np.linalg.qr(_terms(u, *np.exp(logs)) * w[..., None])
        left: Array = basis @ (basis.transpose(0, 2, 1) @ seen[..., None]) - seen[..., None]
        return left[..., 0][seen]

    def jacobian(logs: Array) -> Array:
        """Kaufman's: the slopes of the terms, less what the coefficients would take up."""
        p, q = np.exp(logs)
        basis, c = _solve(u, w, p, q)
        slope = _slopes(u, p, q, c) * w[..., None] * (p, q)
        free: Array = slope - basis @ (basis.transpose(0, 2, 1) @ slope)
        return free[seen]

    usual, freedom = np.log([USUAL, USUAL]), int(seen.sum()) - 3 * count
    starts = [np.array(logs) for logs in itertools.product(np.log(EXPONENTS), repeat=2)]
    logs, noise = min(starts, key=lambda logs: float((residuals(logs) ** 2).sum())), 0.0
    # Shrunk towards a symmetric valley by as much as noise leaves the shape open: the posterior of
    # a normal prior and a noise that is not known. From the unshrunk shape upwards, since without
    # noise that is the answer, and the prior's own basin may lie between.
    for _ in range(30):
        pull, before = noise * PRIOR, noise
        found = least_squares(
            lambda z, pull=pull: np.concatenate([residuals(z), pull @ (z - usual)]),
            logs,
            lambda z, pull=pull: np.concatenate([jacobian(z), pull]),
            bounds=(math.log(FLATTEST), math.log(STEEPEST)),
            xtol=1e-14,
            ftol=1e-14,
            gtol=None,
        )
        logs = found.x
        noise = math.sqrt(float((residuals(logs) ** 2).sum()) / freedom) + 1e-15
        if abs(noise - before) < 1e-3 * noise:
            break
    p, q = map(float, np.exp(found.x))
    _, coefficients = _solve(u, w, p, q)
    terms, slopes = _terms(u, p, q) * w[..., None], _slopes(u, p, q, coefficients) * w[..., None]
    total = np.zeros((count, longest, 3 * count + 2))
    shrunk = np.zeros((2, 3 * count + 2))
    shrunk[:, -2:] = noise * PRIOR / (p, q)
    moves, bottoms = np.zeros((count, 3 * count + 2)), np.full(count, math.nan)
    total[..., -2:] = slopes
    for i, c in enumerate(coefficients):
        total[i, :, 3 * i : 3 * i + 3] = terms[i]
        if c[1] > 0 and c[2] > 0:
            bottoms[i] = bottom = math.log(c[1] / c[2]) / (p + q)
            moves[i, 3 * i + 1 : 3 * i + 3] = np.array([1 / c[1], -1 / c[2]]) / (p + q)
            moves[i, -2:] = -bottom / (p + q)
    # The columns differ by many orders, so they are scaled before they are inverted.
    rows = np.concatenate([total[seen], shrunk])
    scale = np.linalg.norm(rows, axis=0) + 1e-300
    inverse = np.linalg.pinv(rows / scale, rcond=1e-13)
    moves = (moves / scale) @ inverse
    return Shape((p, q), coefficients, bottoms, moves @ moves.T)


def _terms(u: Array, p: float, q: float) -> Array:
    """(…, 3): 1, exp(-p u) / p, exp(q u) / q; their sum is level at u = 0."""
    return np.stack([np.ones_like(u), np.exp(-p * u) / p, np.exp(q * u) / q], axis=-1)


def _slopes(u: Array, p: float, q: float, c: Array) -> Array:
    """(budgets, n, 2) slopes of the curves in p and q."""
    falling, rising = np.exp(-p * u) / p, np.exp(q * u) / q
    c1, c2 = c[:, 1:2], c[:, 2:3]
    return np.stack([-c1 * falling * (u + 1 / p), c2 * rising * (u - 1 / q)], axis=-1)


def _solve(u: Array, w: Array, p: float, q: float) -> tuple[Array, Array]:
    """An orthonormal basis of the weighted terms, and the coefficients, for each budget."""
    basis, triangle = np.linalg.qr(_terms(u, p, q) * w[..., None])
    ones = (w > 0).astype(np.float64)[..., None]
    c: Array = np.linalg.solve(triangle, basis.transpose(0, 2, 1) @ ones)[..., 0]
    return basis, c

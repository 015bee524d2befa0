"""Variable projection: for given exponents the best E, A and B follow by linear algebra.

Notable: a grid over two exponents finds the basin that 4,500 starts in five dimensions look for.
(Golub and Pereyra 1973.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from scaling.law import Law
from scaling.runs import Array, Runs

GRID = np.geomspace(0.04, 2.0, 17)


@dataclass(frozen=True)
class Problem:
    """The data of a fit, centered: x = log N - mean, y = log D - mean, z = log loss.

    Its parameters theta are (E, a, b, alpha, beta): loss = E + exp(a - alpha x) + exp(b - beta y).
    Centring keeps a and alpha, b and beta from standing in for each other.
    """

    x: Array
    y: Array
    z: Array
    x_mean: float
    y_mean: float

    @staticmethod
    def of(runs: Runs) -> Problem:
        """Center the runs."""
        x, y, z = np.log(runs.parameters), np.log(runs.tokens), np.log(runs.loss)
        return Problem(x - x.mean(), y - y.mean(), z, float(x.mean()), float(y.mean()))

    @property
    def spread(self) -> float:
        """Standard deviation of the losses: the scale on which a term is large or small."""
        return float(np.exp(self.z).std())

    def natural(self, theta: Array) -> Array:
        """(…, 5) centered parameters as (E, A, B, alpha, beta)."""
        e, a, b, alpha, beta = np.moveaxis(theta, -1, 0)
        scaled = np.exp(a + alpha * self.x_mean), np.exp(b + beta * self.y_mean)
        return np.stack([e, *scaled, alpha, beta], axis=-1)

    def law(self, theta: Array) -> Law:
        """One row of parameters as a law."""
        return Law(*map(float, self.natural(theta)))

    def centered(self, law: Law) -> Array:
        """The inverse of `law`."""
        a = np.log(law.A) - law.alpha * self.x_mean
        b = np.log(law.B) - law.beta * self.y_mean
        return np.array([law.E, a, b, law.alpha, law.beta])


def grid_starts(problem: Problem, grid: Array = GRID) -> Array:
    """(len(grid)^2, 5) starts: at every (alpha, beta) the E, A, B >= 0 of least squares in loss."""
    inverse = np.exp(-problem.z)
    columns_x = np.exp(-np.outer(grid, problem.x)) * inverse
    columns_y = np.exp(-np.outer(grid, problem.y)) * inverse
    k = len(grid)
    gram = np.empty((k, k, 3, 3))
    gram[..., 0, 0] = inverse @ inverse
    gram[..., 0, 1] = gram[..., 1, 0] = (columns_x @ inverse)[:, None]
    gram[..., 0, 2] = gram[..., 2, 0] = columns_y @ inverse
    gram[..., 1, 1] = (columns_x**2).sum(1)[:, None]
    gram[..., 2, 2] = (columns_y**2).sum(1)
    gram[..., 1, 2] = gram[..., 2, 1] = columns_x @ columns_y.T
    moment = np.empty((k, k, 3))
    moment[..., 0] = inverse.sum()
    moment[..., 1] = columns_x.sum(1)[:, None]
    moment[..., 2] = columns_y.sum(1)
    coefficients = nonnegative(gram, moment)
    # A term that is switched off keeps a part of the spread, or its exponent could not move.
    floor = 0.05 * problem.spread
    theta = np.empty((k, k, 5))
    theta[..., 0] = coefficients[..., 0]
    theta[..., 1:3] = np.log(np.maximum(coefficients[..., 1:], floor))
    theta[..., 3], theta[..., 4] = grid[:, None], grid
    return theta.reshape(-1, 5)


def nonnegative(gram: Array, moment: Array) -> Array:
    """Batched non-negative least squares of a few variables: the best of all faces, exactly."""
    best, best_value = np.zeros_like(moment), np.zeros(moment.shape[:-1])
    every = range(moment.shape[-1])
    faces = itertools.chain(*(itertools.combinations(every, k + 1) for k in every))
    for face in map(list, faces):
        inside = gram[..., face, :][..., :, face]
        # In units of each column, which may differ by many orders.
        unit = np.sqrt(np.maximum(np.einsum("...ii->...i", inside), 1e-300))
        scaled = inside / (unit[..., :, None] * unit[..., None, :]) + 1e-13 * np.eye(len(face))
        solution = np.linalg.solve(scaled, (moment[..., face] / unit)[..., None])[..., 0] / unit
        value = -(solution * moment[..., face]).sum(-1)
        better = (solution >= 0).all(-1) & (value < best_value)
        best_value = np.where(better, value, best_value)
        full = np.zeros_like(moment)
        full[..., face] = solution
        best = np.where(better[..., None], full, best)
    return best

"""Minimal implementation of the two fits of Hoffmann et al. 2022, with only NumPy and SciPy.

Read this file first. N is the number of parameters and D the number of training tokens. C = 6 N D
is the compute in floating-point operations, and L is the loss in nats. The rest of the package
finds the same answers faster and adds intervals.
"""

from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]
Constants = tuple[float, float, float, float, float]


def fit_valley(n: Array, loss: Array) -> float:
    """Return the model size N at the minimum of a parabola of loss over log N, for one budget."""
    a, b, _ = np.polyfit(np.log(n), loss, 2)
    return float(np.exp(-b / (2 * a)))


def fit_isoflop_law(n: Array, loss: Array, compute: Array) -> tuple[float, float]:
    """Return (scale, exponent) of N_opt = scale C^exponent ("Approach 2").

    The law is a line in logs through the best sizes of all budgets. Runs belong to one budget if
    their values in `compute` are exactly equal.
    """
    budgets = np.unique(compute)
    best_sizes = [fit_valley(n[compute == c], loss[compute == c]) for c in budgets]
    exponent, intercept = np.polyfit(np.log(budgets), np.log(best_sizes), 1)
    return float(np.exp(intercept)), float(exponent)


def predict_loss(constants: Constants, n: Array, d: Array) -> Array:
    """Return the loss E + A / N^alpha + B / D^beta for constants (E, A, B, alpha, beta)."""
    e, a, b, alpha, beta = constants
    loss: Array = e + a * n**-alpha + b * d**-beta
    return loss


def huber(residual: Array, delta: float = 1e-3) -> Array:
    """Return the Huber loss: quadratic up to `delta`, and linear beyond, to limit outliers."""
    size = np.abs(residual)
    return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))


def fit_parametric_law(n: Array, d: Array, loss: Array) -> Constants:
    """Return the (E, A, B, alpha, beta) with the least Huber loss of log residuals ("Approach 3").

    Runs of one size, one budget or one ratio D / N do not identify a law. The function does not
    check this and returns one of many equally good laws. Many starts are needed, because the
    objective has several minima and hardly changes if A and alpha change together.
    """

    def unpack_constants(search_point: Array) -> Constants:
        # Logarithms keep E, A and B positive, and comparable if they differ by orders of magnitude.
        e, a, b = np.exp(search_point[:3]).tolist()
        alpha, beta = search_point[3:].tolist()
        return e, a, b, alpha, beta

    def compute_objective(search_point: Array) -> float:
        predicted = predict_loss(unpack_constants(search_point), n, d)
        return float(huber(np.log(predicted) - np.log(loss)).sum())

    # log E, log A, log B, alpha, beta
    starts = product((-1.0, 0.5), (5.0, 10.0), (5.0, 10.0), (0.3, 0.6), (0.3, 0.6))
    bounds = [(-7, 3), (-5, 30), (-5, 30), (0.02, 2), (0.02, 2)]
    optima = [
        minimize(compute_objective, start, method="L-BFGS-B", bounds=bounds) for start in starts
    ]
    return unpack_constants(min(optima, key=lambda optimum: optimum.fun).x)


def compute_optimal_model(constants: Constants, compute: float) -> tuple[float, float]:
    """Return the (N, D) with the lowest loss for `compute` FLOPs.

    The derivative of the loss along 6 N D = C is zero if alpha A / N^alpha = beta B / D^beta. Then
    the same small relative increase of N or of D lowers the loss equally. See Note
    [Closed-form optimum] in law.py.
    """
    _, a, b, alpha, beta = constants
    n_times_d = compute / 6
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    n = g * n_times_d ** (beta / (alpha + beta))
    return n, n_times_d / n

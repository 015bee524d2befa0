"""Minimal implementation of the two fits of Hoffmann et al. 2022, in scipy alone.

Read this file first. N is the number of parameters and D the number of training tokens. C = 6 N D
is the compute in floating-point operations, and L is the loss in nats. The rest of the package
finds the same answers faster and adds intervals.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]
Constants = tuple[float, float, float, float, float]


def valley_bottom(n: Array, loss: Array) -> float:
    """Return the model size at the minimum of a parabola of loss over log N, for one budget."""
    a, b, _ = np.polyfit(np.log(n), loss, 2)
    return float(np.exp(-b / (2 * a)))


def isoflop_law(n: Array, loss: Array, compute: Array) -> tuple[float, float]:
    """Return (scale, exponent) of N_opt = scale C^exponent, a line in logs through valley bottoms.

    This is "Approach 2". Runs belong to one budget if their values in `compute` are exactly equal.
    """
    budgets = np.unique(compute)
    bottoms = [valley_bottom(n[compute == c], loss[compute == c]) for c in budgets]
    exponent, intercept = np.polyfit(np.log(budgets), np.log(bottoms), 1)
    return float(np.exp(intercept)), float(exponent)


def law(constants: Constants, n: Array, d: Array) -> Array:
    """Return E + A / N^alpha + B / D^beta for constants (E, A, B, alpha, beta)."""
    e, a, b, alpha, beta = constants
    loss: Array = e + a * n**-alpha + b * d**-beta
    return loss


def huber(residual: Array, delta: float = 1e-3) -> Array:
    """Return the Huber loss: quadratic up to `delta`, and linear beyond it to limit outliers."""
    size = np.abs(residual)
    return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))


def parametric_law(n: Array, d: Array, loss: Array) -> Constants:
    """Return the (E, A, B, alpha, beta) with the least Huber loss of log residuals ("Approach 3").

    Runs of one size, one budget or one ratio D / N do not identify a law. That is not checked here:
    the result is then one of many equally good laws. Many starts are needed, because the objective
    has several minima and hardly changes if A and alpha change together.
    """

    def constants_of(search_point: Array) -> Constants:
        # Logarithms keep E, A and B positive, and comparable if they differ by orders of magnitude.
        e, a, b = np.exp(search_point[:3]).tolist()
        alpha, beta = search_point[3:].tolist()
        return e, a, b, alpha, beta

    def objective(search_point: Array) -> float:
        predicted = law(constants_of(search_point), n, d)
        return float(huber(np.log(predicted) - np.log(loss)).sum())

    starts = [
        (log_e, log_a, log_b, alpha, beta)
        for log_e in (-1.0, 0.5)
        for log_a in (5.0, 10.0)
        for log_b in (5.0, 10.0)
        for alpha in (0.3, 0.6)
        for beta in (0.3, 0.6)
    ]
    box = [(-7, 3), (-5, 30), (-5, 30), (0.02, 2), (0.02, 2)]
    ends = [minimize(objective, start, method="L-BFGS-B", bounds=box) for start in starts]
    return constants_of(min(ends, key=lambda end: end.fun).x)


def best_model(constants: Constants, compute: float) -> tuple[float, float]:
    """Return the (N, D) with the lowest loss for `compute` FLOPs.

    The derivative of the loss along 6 N D = C is zero if alpha A / N^alpha = beta B / D^beta: a
    FLOP spent on size then lowers the loss as much as a FLOP spent on data.
    """
    _, a, b, alpha, beta = constants
    product = compute / 6  # N D
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    n = g * product ** (beta / (alpha + beta))
    return n, product / n

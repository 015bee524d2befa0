"""The noise of log loss about a fitted law."""

import math

import numpy as np
from scipy.special import erf, ndtr

from scaling.fit.search import Estimate
from scaling.law import CONSTANTS

#: Mean of |x| for a normal variable x with standard deviation one.
MEAN_ABSOLUTE = math.sqrt(2 / math.pi)

#: Standard deviation of a normal variable over the median of its absolute value.
NORMAL_PER_MEDIAN = 1.4826

#: Largest residual, in standard deviations by the median, that counts fully as noise.
LARGEST_RESIDUAL = 5.0


def fit_noise(fit: Estimate) -> float:
    """Return the noise of log loss with which least squares is as precise as a fit.

    The standard deviation of the runs is estimated by their mean absolute residual, which depends
    less on single runs than the residuals near zero or the largest ones do. Residuals of misread
    runs are limited to `LARGEST_RESIDUAL` deviations, because they hardly move a robust fit. A
    Huber loss that is narrower than the noise is less precise than least squares for normal errors
    (Huber 1964).
    """
    freedom = max(len(fit.runs) - len(CONSTANTS), 1)
    if fit.loss == "squares":
        return math.sqrt(float((fit.residuals**2).sum()) / freedom)
    # A robust fit passes through about five runs, whose residuals say nothing about the noise.
    sizes = np.sort(np.abs(fit.residuals))[-freedom:]
    limit = LARGEST_RESIDUAL * NORMAL_PER_MEDIAN * float(np.median(sizes))
    deviation = float(np.minimum(sizes, limit).mean()) / MEAN_ABSOLUTE
    width = (fit.delta if fit.loss == "huber" else 0.0) / max(deviation, 1e-300)
    return deviation / math.sqrt(huber_efficiency(width))


def huber_efficiency(width: float) -> float:
    """Return the efficiency of a Huber loss for normal errors of standard deviation one.

    It is E[psi']^2 / E[psi^2], which is 2 / pi at width zero and 1 at width infinity.
    """
    if width < 1e-4:
        return 2 / math.pi
    if width > 10:
        return 1.0  # also for noiseless runs, whose width in standard deviations is huge
    inside = float(erf(width / math.sqrt(2)))
    density = math.exp(-(width**2) / 2) / math.sqrt(2 * math.pi)
    square = inside - 2 * width * density + 2 * width**2 * float(ndtr(-width))
    return inside**2 / square

"""The noise of log loss about a fitted law."""

import math

import numpy as np
from scipy.special import erf, ndtr

from scaling.fit.search import Estimate
from scaling.law import CONSTANTS

#: Mean of |x| for a normal variable x with standard deviation one.
MEAN_ABSOLUTE = math.sqrt(2 / math.pi)

#: Ratio of a normal variable's standard deviation to the median of its absolute value.
NORMAL_PER_MEDIAN = 1.4826

#: Residuals are limited to this many standard deviations, estimated by the median.
LARGEST_RESIDUAL = 5.0


def fit_noise(fit: Estimate) -> float:
    """Return the noise of log loss at which least squares would be as precise as a robust fit.

    The standard deviation of the runs is estimated by their mean absolute residual. This mean
    depends less on single runs than the smallest or the largest residuals. Residuals of misread
    runs are limited to `LARGEST_RESIDUAL` deviations, because they hardly move a robust fit. For
    normal errors, a Huber loss narrower than the noise is less precise than least squares (Huber
    1964).
    """
    freedom = max(len(fit.runs) - len(CONSTANTS), 1)
    if fit.loss == "squares":
        return math.sqrt(float((fit.residuals**2).sum()) / freedom)
    # A robust fit passes through about five runs, whose residuals do not measure the noise.
    sizes = np.sort(np.abs(fit.residuals))[-freedom:]
    limit = LARGEST_RESIDUAL * NORMAL_PER_MEDIAN * float(np.median(sizes))
    deviation = float(np.minimum(sizes, limit).mean()) / MEAN_ABSOLUTE
    width = (fit.delta if fit.loss == "huber" else 0.0) / max(deviation, 1e-300)
    return deviation / math.sqrt(huber_efficiency(width))


def huber_efficiency(width: float) -> float:
    """Return the efficiency of a Huber loss for normal errors with standard deviation one.

    It is E[psi']^2 / E[psi^2], which is 2 / pi at width zero and approaches 1 for large widths.
    """
    if width < 1e-4:
        return 2 / math.pi
    if width > 10:
        return 1.0  # also for noiseless runs, whose width in standard deviations is huge
    inside = float(erf(width / math.sqrt(2)))
    density = math.exp(-(width**2) / 2) / math.sqrt(2 * math.pi)
    square = inside - 2 * width * density + 2 * width**2 * float(ndtr(-width))
    return inside**2 / square

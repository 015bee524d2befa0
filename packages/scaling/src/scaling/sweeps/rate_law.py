"""The best learning rate as a function of batch size: saturating for SGD, surging for Adam.

The best rate of SGD is linear in the batch size B until the gradient noise is averaged away. Adam's
steps follow the signs of the gradients, and the reliability of these signs grows as erf(sqrt(B)).
Adam's best rate grows as sqrt(B), peaks and falls to a plateau (McCandlish et al. 2018; Li et al.
2024, "Surge phenomenon").
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, erfinv

from scaling.units import Array

RateShape = Literal["saturating", "surge"]

#: Values of `RateLaw.surge` that are tried in a fit.
SURGES = np.geomspace(1.05, 30, 40)

#: Power laws that the best rate follows far from B_c, by the exponent of the batch size B.
LIMITS = {0.0: "a constant", 0.5: "a multiple of sqrt(B)", 1.0: "a multiple of B"}


@dataclass(frozen=True)
class RateLaw:
    """The best rate at batch size B.

    A saturating law is r / (1 + B_c / B). A surge is 2 r / (1 / s + s), with
    s = k erf(erfinv(1 / k) sqrt(B / B_c)). Here r is `highest_rate`, B_c is `batch_size`, and k is
    `surge`.
    """

    shape: RateShape
    #: r, the plateau of a saturating law or the peak of a surge.
    highest_rate: float
    #: B_c, the batch size at which a saturating law reaches half its plateau, or a surge its peak.
    batch_size: float
    #: k, the reliability of signs at large batches; 1 for a saturating law. The plateau of a surge
    #: is 2 / (1 / k + k) times its peak.
    surge: float
    #: Root mean square of log(predicted rate / observed rate).
    error: float

    def predict(self, batch_size: ArrayLike) -> Array:
        """Return the best rate at a batch size."""
        u = np.asarray(batch_size, np.float64) / self.batch_size
        form = _saturating(u) if self.shape == "saturating" else _surging(u, self.surge)
        return self.highest_rate * form


def _saturating(u: Array) -> Array:
    return u / (1 + u)


def _surging(u: Array, k: float) -> Array:
    reliability: Array = k * erf(erfinv(1 / k) * np.sqrt(u))
    return 2 / (1 / reliability + reliability)


def fit_rate_law(batch_sizes: ArrayLike, rates: ArrayLike) -> RateLaw:
    """Fit the constants of each shape by squared log error on a grid; return the better shape.

    Steps of the grid are one to two percent in B_c and nine percent in k. The shapes are compared
    by AICc, because a surge has a third constant.

    Raises:
        ValueError: There are fewer than five batch sizes, a number is not positive and finite, or
            B_c is not visible: a constant, or a multiple of B or of sqrt(B), has a lower AICc.
    """
    b = np.asarray(batch_sizes, np.float64)
    r = np.asarray(rates, np.float64)
    is_valid = all((v > 0).all() and np.isfinite(v).all() for v in (b, r))
    if b.shape != r.shape or len(np.unique(b)) < 5 or not is_valid:
        raise ValueError(
            "expected a positive and finite rate at each of five or more batch sizes, got"
            f" {r.tolist()} at {b.tolist()}"
        )
    grid = np.geomspace(b.min() / 100, b.max() * 100, 1001)
    u = b / grid[:, None]
    saturating = _fit_scale("saturating", 1.0, _saturating(u), r, grid)
    surges = [_fit_scale("surge", k, _surging(u, k), r, grid) for k in SURGES]
    surge = min(surges, key=lambda law: law.error)
    n = len(b)

    def aicc(error: float, constants: int) -> float:
        correction = 2 * constants * n / (n - constants - 1)
        return float(2 * n * np.log(error + 1e-12) + correction)

    law = saturating
    if aicc(surge.error, 3) < aicc(saturating.error, 2):
        law = surge
    for exponent, name in LIMITS.items():
        error = float(np.std(np.log(r) - exponent * np.log(b)))
        if aicc(error, 1) < aicc(law.error, 3 if law is surge else 2):
            raise ValueError(
                "expected rates that saturate or peak within the batch sizes, got"
                f" {r.tolist()} at {b.tolist()}; {name} describes them as well with fewer"
                " constants, so no critical batch size can be seen"
            )
    return law


def _fit_scale(shape: RateShape, k: float, forms: Array, rates: Array, sizes: Array) -> RateLaw:
    """Return the law with the best B_c in `sizes`, and the highest rate that fits best with it.

    `forms` are the values of the law with highest rate 1 for each B_c in `sizes`, (sizes, rates).
    """
    error = np.log(rates) - np.log(forms)
    height = error.mean(1)
    spread = np.sqrt(((error - height[:, None]) ** 2).mean(1))
    i = int(np.argmin(spread))
    return RateLaw(shape, float(np.exp(height[i])), float(sizes[i]), float(k), float(spread[i]))

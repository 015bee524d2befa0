"""The best learning rate as a function of batch size: saturating (SGD) or surging (Adam).

Notable: SGD's rate is linear in B until the noise of the gradient is averaged away. Adam moves by
signs, and how sure signs are goes with erf(sqrt(B)): its rate grows as a square root, peaks, and
falls to a plateau. (McCandlish et al. 2018; Li et al. 2024, "Surge phenomenon".)
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, erfinv

from scaling.runs import Array

Shape = Literal["saturating", "surge"]

SURGES = np.geomspace(1.05, 30, 40)


@dataclass(frozen=True)
class RateLaw:
    """r / (1 + B_c / B), or 2 r / (1 / s + s) with s = k erf(erfinv(1 / k) sqrt(B / B_c))."""

    shape: Shape
    highest_rate: float
    """r, the plateau of a saturating law and the peak of a surge."""
    batch_size: float
    """B_c, where a saturating law is at half its height and a surge at its peak."""
    surge: float
    """k, how sure the signs become: the plateau is 2 / (1 / k + k) of the peak. 1 if saturating."""
    error: float
    """Root mean square of log predicted over observed rate."""

    def predict(self, batch_size: ArrayLike) -> Array:
        """The best rate at a batch size."""
        u = np.asarray(batch_size, np.float64) / self.batch_size
        return self.highest_rate * (
            _saturating(u) if self.shape == "saturating" else _surge(u, self.surge)
        )

    def regime(self, batch_size: float) -> str:
        """What a larger batch would do to the best rate."""
        u = batch_size / self.batch_size
        below, here, above = {
            "saturating": ("linear", "saturating", "saturated"),
            "surge": ("square root", "peak", "falling"),
        }[self.shape]
        return below if u < 0.2 else above if u > 5 else here


def _saturating(u: Array) -> Array:
    return u / (1 + u)


def _surge(u: Array, k: float) -> Array:
    sure: Array = k * erf(erfinv(1 / k) * np.sqrt(u))
    return 2 / (1 / sure + sure)


def fit_rate_law(batch_sizes: ArrayLike, rates: ArrayLike) -> RateLaw:
    """The shape and constants of least squared log error; a surge must earn its third constant.

    ValueError for fewer than five batch sizes. The shapes are compared by AICc.
    """
    b, r = np.asarray(batch_sizes, np.float64), np.asarray(rates, np.float64)
    if len(np.unique(b)) < 5 or not ((b > 0).all() and (r > 0).all()):
        raise ValueError(f"need positive rates at five batch sizes: {b.tolist()}, {r.tolist()}")
    grid = np.geomspace(b.min() / 100, b.max() * 100, 1001)
    u = b / grid[:, None]
    saturating = _least("saturating", 1.0, _saturating(u), r, grid)
    surge = min((_least("surge", k, _surge(u, k), r, grid) for k in SURGES), key=lambda f: f.error)
    n = len(b)

    def score(fit: RateLaw, constants: int) -> float:
        return float(2 * n * np.log(fit.error + 1e-12) + 2 * constants * n / (n - constants - 1))

    return surge if score(surge, 3) < score(saturating, 2) else saturating


def _least(shape: Shape, k: float, form: Array, rates: Array, sizes: Array) -> RateLaw:
    """The best B_c of a grid, each with its best height; form is (sizes, rates)."""
    error = np.log(rates) - np.log(form)
    height = error.mean(1)
    spread = np.sqrt(((error - height[:, None]) ** 2).mean(1))
    at = int(np.argmin(spread))
    return RateLaw(shape, float(np.exp(height[at])), float(sizes[at]), float(k), float(spread[at]))

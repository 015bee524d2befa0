"""IsoFLOP curves: the best model size of each budget, and the power law through those sizes.

Notable: the size is the bottom of a parabola in log N, not the best run, which can only be a size
that somebody happened to train; D follows from C = 6 N D, so both laws agree at every budget.
(Hoffmann et al. 2022, section 3.2, "Approach 2".)
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import curve_fit
from scipy.special import stdtrit

from scaling.law import Interval, Optimum, checked
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs, ScalingWarning, list_some

Method = Literal["parabola", "minimum", "minimum-linear", "minimum-offset"]

COARSE = 2.5
"""Sizes about the best run that are further apart, as a factor, leave a parabola to guess."""

COARSE_MINIMUM = 1.2
"""The same where the best run itself is taken for the optimum."""


@dataclass(frozen=True)
class Valley:
    """One budget: where its loss is least, from which runs."""

    compute: float
    parameters: float
    loss: float
    runs: Runs
    coefficients: tuple[float, ...] | None
    """c of loss = c0 + c1 u + c2 u^2 + …, where u is log N less its mean over the runs."""


@dataclass(frozen=True)
class IsoflopFit:
    """N_opt = scale * C^exponent + offset, and D_opt = C / (6 N_opt)."""

    runs: Runs
    method: Method
    valleys: tuple[Valley, ...]
    scale: float
    exponent: float
    offset: float
    level: float
    warnings: tuple[str, ...]

    def optimal(self, compute: float) -> Optimum:
        """N and D at a budget, with the interval of the regression line through the valleys.

        The interval is Student's, from the scatter of the valleys about the line in log N; its ends
        for D follow from those for N. Two budgets leave no scatter, and the interval is (0, inf).
        ValueError where an offset makes N negative.
        """
        n = self._size(compute)
        x = np.log([v.compute for v in self.valleys])
        y = np.log([v.parameters for v in self.valleys])
        errors = y - np.log([self._size(v.compute) for v in self.valleys])
        freedom = len(x) - 2 - (self.offset != 0)
        low, high = 0.0, math.inf
        if freedom > 0:
            leverage = (math.log(compute) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
            variance = float((errors**2).sum()) / freedom * (1 / len(x) + leverage)
            half = float(stdtrit(freedom, 0.5 + self.level / 2)) * math.sqrt(variance)
            low, high = n * math.exp(-half), n * math.exp(min(half, 600.0))
        pairs = compute / FLOPS_PER_PARAMETER_TOKEN
        intervals = {
            "parameters": Interval(low, high, self.level),
            "tokens": Interval(pairs / high, pairs / low if low else math.inf, self.level),
        }
        return checked(Optimum(compute, n, pairs / n, math.nan, intervals))

    def _size(self, compute: float) -> float:
        n = self.scale * compute**self.exponent + self.offset
        if not n > 0:
            raise ValueError(
                f"the offset {self.offset:.3g} makes N = {n:.3g} at {compute:.3g} FLOPs; use"
                " method='parabola'"
            )
        return float(n)


def fit_isoflop(
    runs: Runs,
    method: Method = "parabola",
    *,
    nearest: int | None = None,
    bandwidth: float | None = None,
    degree: int = 2,
    tolerance: float = 0.05,
    level: float = 0.95,
) -> IsoflopFit:
    """The law of the optimum through the valley of every budget.

    "parabola" fits one in log N to each budget: through all its runs, or through the `nearest` to
    the best, or with weights exp(-(distance / bandwidth)^2 / 2) by the distance in log N to its
    bottom. The closer, the less the valley's skew matters and the more its noise; `degree` 3 or 4
    instead of 2 follows the skew. "minimum" takes the best run instead, and a line in logs;
    "minimum-linear" fits a C^b to the best runs by least squares in N, "minimum-offset" a C^b + c.
    Those three are for comparison, and warn. Budgets are told apart by `tolerance` in compute.

    ValueError: fewer than five runs, one budget, too few runs for a parabola, a law that falls or
    is negative. ScalingWarning: coarse grids, a minimum at an edge, minima that do not grow with
    compute, offsets, fewer than four budgets.
    """
    if method not in ("parabola", "minimum", "minimum-linear", "minimum-offset"):
        raise ValueError(f"method = {method!r} is not parabola, minimum, minimum-linear or -offset")
    if len(runs) < 5:
        raise ValueError(
            f"{len(runs)} runs are too few; train five or more, at two budgets or more"
        )
    budgets = runs.budgets(tolerance)
    if len(budgets) < 2:
        raise ValueError(
            f"column 'compute' holds one budget, {budgets[0].compute[0]:.3g}: a law needs two"
        )
    doubts: list[str] = []
    valleys = [_valley(group, method, nearest, bandwidth, degree, doubts) for group in budgets]
    kept = tuple(v for v in valleys if v is not None)
    if len(kept) < 2:
        raise ValueError("fewer than two budgets have a valley:\n" + "\n".join(doubts))
    n = [v.parameters for v in kept]
    for before, after in itertools.pairwise(kept):
        if after.parameters <= before.parameters:
            doubts.append(
                f"the best size falls from {before.parameters:.3g} at {before.compute:.3g} FLOPs"
                f" to {after.parameters:.3g} at {after.compute:.3g}: too coarse or too noisy"
            )
    if len(kept) < 4:
        doubts.append(
            f"{len(kept)} budgets leave {len(kept) - 2} degrees of freedom for the interval"
        )
    scale, exponent, offset = _power_law(np.array([v.compute for v in kept]), np.array(n), method)
    if offset:
        doubts.append(
            f"the offset {offset:.3g} in N = a C^b + c contradicts C = 6 N D: N and D cannot both"
            " be such laws, and the exponent pays for it"
        )
    if method != "parabola":
        doubts.append(
            "the best run of a budget is a size somebody chose, not the optimum, and extrapolating"
            " multiplies the error; use method='parabola'"
        )
    for message in doubts:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    return IsoflopFit(runs, method, kept, scale, exponent, offset, level, tuple(doubts))


def _valley(
    group: Runs,
    method: Method,
    nearest: int | None,
    bandwidth: float | None,
    degree: int,
    doubts: list[str],
) -> Valley | None:
    """One budget's bottom; None, and a doubt, where it has none."""
    group = group[np.argsort(group.parameters, kind="stable")]
    x, compute = np.log(group.parameters), float(np.exp(np.log(group.compute).mean()))
    best = int(np.argmin(group.loss))
    where = f"compute = {compute:.3g} (rows {list_some(group.rows)})"
    if (spread := group.compute.max() / group.compute.min()) > 1.2:
        doubts.append(f"{where}: 'compute' spans a factor of {spread:.2f}: not one budget")
    if best in (0, len(group) - 1):
        doubts.append(f"{where}: the least 'loss' is at an edge of 'parameters'; train beyond it")
    gap = math.exp(np.diff(x)[max(best - 1, 0) : best + 1].max(initial=0.0))
    if gap > (COARSE if method == "parabola" else COARSE_MINIMUM):
        doubts.append(f"{where}: 'parameters' {gap:.2f}x apart leave the best size to the form")
    if method != "parabola":
        return Valley(compute, math.exp(x[best]), float(group.loss[best]), group, None)
    if nearest is not None:
        near = np.sort(np.argsort(np.abs(x - x[best]), kind="stable")[:nearest])
        group, x = group[near], x[near]
    if len(np.unique(x)) <= degree:
        doubts.append(f"{where}: {len(np.unique(x))} sizes do not fix degree {degree}; left out")
        return None
    c, bottom = _curve(x, group.loss, degree, bandwidth)
    if bottom is None:
        doubts.append(f"{where}: 'loss' has no bottom within 'parameters'; left out")
        return None
    loss = float(np.polynomial.polynomial.polyval(bottom - x.mean(), c))
    return Valley(compute, math.exp(bottom), loss, group, (*map(float, c),))


def _curve(
    x: Array, loss: Array, degree: int, bandwidth: float | None
) -> tuple[Array, float | None]:
    """Coefficients in x - mean, and the lowest bottom inside; the weights follow the bottom."""
    bottom = float(x[np.argmin(loss)])
    for _ in range(20 if bandwidth else 1):
        # polyfit squares its weights.
        weights = np.exp(-0.25 * ((x - bottom) / bandwidth) ** 2) if bandwidth else None
        c = np.polynomial.polynomial.polyfit(x - x.mean(), loss, degree, w=weights)
        curve = np.polynomial.Polynomial(c)
        flat = curve.deriv().roots()
        flat = flat[np.isreal(flat)].real
        flat = flat[(curve.deriv(2)(flat) > 0) & (flat >= x[0] - x.mean())]
        flat = flat[flat <= x[-1] - x.mean()]
        if not flat.size:
            return c, None
        bottom = float(flat[np.argmin(curve(flat))] + x.mean())
    return c, bottom


def _power_law(c: Array, n: Array, method: Method) -> tuple[float, float, float]:
    exponent, log_scale = np.polyfit(np.log(c), np.log(n), 1)
    scale, offset = math.exp(log_scale), 0.0
    if method in ("minimum-linear", "minimum-offset"):
        # In units of the means: curve_fit's steps are absolute.
        u, v = c / c.mean(), n / n.mean()
        start = [scale * c.mean() ** exponent / n.mean(), exponent]
        if method == "minimum-linear":
            (a, exponent), _ = curve_fit(lambda x, a, b: a * x**b, u, v, start, maxfev=20_000)
        else:
            (a, exponent, o), _ = curve_fit(
                lambda x, a, b, o: a * x**b + o, u, v, [*start, 0.0], maxfev=20_000
            )
            offset = float(o) * float(n.mean())
        scale = float(a) * float(n.mean()) / float(c.mean()) ** float(exponent)
    if not (scale > 0 and exponent > 0):
        raise ValueError(
            f"the fitted law N = {scale:.3g} C^{exponent:.3g} does not grow with compute: these"
            " budgets do not fix an optimum"
        )
    return float(scale), float(exponent), offset

"""IsoFLOP curves: the best model size of each budget, and the power law through those sizes.

Notable: the size is the bottom of a curve in log N, not the best run, which can only be a size
that somebody happened to train; D follows from C and N by the runs' own C / (N D), so both laws
agree at every budget; the line weighs each budget by how well its runs fix the bottom, so that the
interval holds.
(Hoffmann et al. 2022, section 3.2, "Approach 2".)
"""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri, stdtrit

from scaling.equality import ComparesArrays
from scaling.fit.identifiability import singular_values
from scaling.law import Interval, Optimum, check_level, require_numbers
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array, Runs, ScalingWarning
from scaling.tables.cells import list_some
from scaling.uncertainty.doubts import Doubts, ParametricOpinion, checked, parametric_opinion
from scaling.uncertainty.drift import per_decade
from scaling.valley import Valley, common_shape, polynomial_bottom

Method = Literal["parabola"]

# Sizes about the best run that are further apart, as a factor, leave a parabola to guess.
COARSE = 2.5
# Least singular value of log N and its half square in a budget; three sizes 1.1 apart have 0.002.
LEAST_BEND = 0.002
# Runs beyond the three that the curve of each budget takes, for a skew that all share.
FEWEST_BEYOND = 3


@dataclass(frozen=True, eq=False)
class IsoflopFit(ComparesArrays):
    """N_opt = scale * C^exponent, and D_opt = C / (k N_opt), k = C / (N D) of the runs."""

    runs: Runs
    valleys: tuple[Valley, ...]
    scale: float
    exponent: float
    covariance: Array
    """(2, 2) of the line's height at the middle budget and its slope, in logs."""
    drift: float
    """Standard deviation of log N per decade beyond the budgets: see Note [Shrunken drift]."""
    level: float
    warnings: tuple[str, ...]

    def optimal(self, compute: float) -> Optimum:
        """N and D at a budget, with the interval of the regression line through the valleys.

        The interval is Student's, from the scatter of the valleys about the line in log N, and from
        its `drift` beyond the largest budget; its ends for D follow from those for N. Two budgets
        leave no scatter, and the interval is (0, inf).
        """
        require_numbers(compute=compute)
        if not 0 < compute < math.inf:
            raise ValueError(f"compute = {compute}: must be positive and finite")
        n, freedom = self.scale * compute**self.exponent, len(self.valleys) - 2
        low, high = 0.0, math.inf
        if freedom > 0:
            middle = float(np.mean(np.log([v.compute for v in self.valleys])))
            reach = np.array([1.0, math.log(compute) - middle])
            beyond = self.drift * max(math.log10(compute / self.valleys[-1].compute), 0.0)
            scatter = math.sqrt(float(reach @ self.covariance @ reach))
            student, normal = stdtrit(freedom, 0.5 + self.level / 2), ndtri(0.5 + self.level / 2)
            half = math.hypot(float(student) * scatter, float(normal) * beyond)
            low, high = n * math.exp(-half), n * math.exp(min(half, 600.0))
        pairs = compute / self.flops_per_parameter_token(compute)
        tokens = Interval(pairs / high, pairs / low if low else math.inf, self.level)
        intervals = {"parameters": Interval(low, high, self.level), "tokens": tokens}
        best = Optimum(compute, n, pairs / n, math.nan, intervals)
        # The parametric law knows of 6 N D alone: it is asked for as many pairs.
        law = self._by_parametric
        other = law(FLOPS_PER_PARAMETER_TOKEN * pairs) if law else None
        return checked(best, self.runs, other)

    @cached_property
    def _by_parametric(self) -> ParametricOpinion | None:
        """The parametric law of the same runs, if they identify one."""
        return parametric_opinion(self.runs)

    def flops_per_parameter_token(self, compute: float) -> float:
        """C / (N D) of the best models: between budgets in logs, beyond them that of the last."""
        c = np.array([v.compute for v in self.valleys])
        pairs = np.array([v.parameters * v.tokens for v in self.valleys])
        return math.exp(np.interp(math.log(compute), np.log(c), np.log(c / pairs)))


def fit_isoflop(
    runs: Runs,
    method: Method = "parabola",
    *,
    nearest: int | None = None,
    bandwidth: float | None = None,
    degree: int | None = None,
    tolerance: float = 0.05,
    level: float = 0.95,
) -> IsoflopFit:
    """The law of the optimum through the valley of every budget.

    "parabola" fits one in log N to each budget, bent by a skew that all budgets share (see
    `valley`). With `degree` 2 it is a plain one, with 3 or 4 a polynomial that follows each budget
    by itself: through all its runs, or through the `nearest` to the best, or with weights
    exp(-(distance / bandwidth)^2 / 2) by the distance in log N to its bottom; both of these take
    degree 2 unless told. So, with a warning, do fewer than five runs a budget, and valleys that no
    shared skew fits. Budgets are told apart by `tolerance` in compute.

    ValueError: fewer than five runs, one budget, too few runs for a parabola, a law that falls, or
    "minimum", which takes the best run of each budget. ScalingWarning: coarse grids, a minimum at
    an edge, minima that do not grow with compute, fewer than four budgets.
    """
    if method != "parabola":
        raise ValueError(
            f"method = {method!r} is not 'parabola': the best run of a budget is a size somebody"
            " chose, not the optimum, and extrapolating multiplies the error: see scaling.bench"
        )
    check_level(level)
    least = 3 if degree is None else degree + 1
    for option, given, sound in (
        ("nearest", nearest, nearest is None or nearest >= least),
        ("bandwidth", bandwidth, bandwidth is None or bandwidth > 0),
        ("degree", degree, degree in (None, 2, 3, 4)),
        ("tolerance", tolerance, tolerance >= 0),
    ):
        if not sound:
            told = f"degree is 2, 3 or 4, nearest {least} or more, the others are positive"
            raise ValueError(f"{option} = {given}: {told}")
    if len(runs) < 5:
        raise ValueError(f"{len(runs)} runs are too few; train five or more, at two budgets")
    budgets = runs.budgets(tolerance)
    if len(budgets) < 2:
        raise ValueError(
            f"column 'compute' holds one budget, {budgets[0].compute[0]:.3g}: a law needs two"
        )
    doubts = Doubts()
    groups = [_look(group, doubts) for group in budgets]
    local = nearest is not None or bandwidth is not None
    if degree is None and not local and (shared := _skewed_alike(groups, doubts)):
        kept, covariance = shared
    else:
        found = (_polynomial(g, nearest, bandwidth, degree or 2, doubts) for g in groups)
        kept = [v for v in found if v is not None]
        covariance = np.eye(len(kept))
    if len(kept) < 2:
        raise ValueError("fewer than two budgets have a valley:\n" + "\n".join(doubts))
    for before, after in itertools.pairwise(kept):
        if after.parameters <= before.parameters:
            doubts.add(
                "the budgets are too coarse or too noisy",
                f"the best size falls from {before.parameters:.3g} at {before.compute:.3g} FLOPs"
                f" to {after.parameters:.3g} at {after.compute:.3g}",
            )
    if len(kept) < 4:
        doubts.add(f"{len(kept)} budgets leave {len(kept) - 2} degrees of freedom for the interval")
    c, n = np.array([(v.compute, v.parameters) for v in kept]).T
    moved = _drift(c, n, covariance)
    scale, exponent, covariance = _power_law(c, n, covariance)
    for message in doubts:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    return IsoflopFit(runs, tuple(kept), scale, exponent, covariance, moved, level, tuple(doubts))


def _where(group: Runs) -> str:
    return f"compute = {_budget(group):.3g} (rows {list_some(group.rows)})"


def _budget(group: Runs) -> float:
    return float(np.exp(np.log(group.compute).mean()))


def _look(group: Runs, doubts: Doubts) -> Runs:
    """The runs of a budget by size, and what is doubtful about them."""
    group = group[np.argsort(group.parameters, kind="stable")]
    x, best, where = np.log(group.parameters), int(np.argmin(group.loss)), _where(group)
    if (spread := group.compute.max() / group.compute.min()) > 1.2:
        doubts.add("'compute' spans a factor of {:.2f}: not one budget", where, spread)
    if best in (0, len(group) - 1):
        doubts.add("the least 'loss' is at an edge of 'parameters'; train beyond it", where)
    gap = math.exp(np.diff(x)[max(best - 1, 0) : best + 1].max(initial=0.0))
    if gap > COARSE:
        doubts.add("'parameters' {:.2f}x apart leave the best size to the form", where, gap)
    return group


def _polynomial(
    group: Runs, nearest: int | None, bandwidth: float | None, degree: int, doubts: Doubts
) -> Valley | None:
    """One budget's bottom by itself; None, and a doubt, where it has none."""
    where, x = _where(group), np.log(group.parameters)
    if nearest is not None:
        best = int(np.argmin(group.loss))
        near = np.sort(np.argsort(np.abs(x - x[best]), kind="stable")[:nearest])
        group, x = group[near], x[near]
    if not _enough(x, degree + 1, where, doubts):
        return None
    c, bottom = polynomial_bottom(x, group.loss, degree, bandwidth)
    if bottom is None:
        doubts.add("'loss' has no bottom within 'parameters'; left out", where)
        return None
    loss = float(np.polynomial.polynomial.polyval(bottom - x.mean(), c))
    return Valley(_budget(group), math.exp(bottom), loss, group, (*map(float, c),))


def _enough(x: Array, needed: int, where: str, doubts: Doubts) -> bool:
    """Return whether the log sizes of a budget carry `needed` coefficients; add a doubt if not."""
    if (sizes := len(np.unique(x))) < needed:
        doubts.add(f"{sizes} sizes do not fix {needed} coefficients; left out", where)
        return False
    # Repetitions of one size differ by rounding, and a curve through them is noise.
    if singular_values(np.stack([x, (x - x.mean()) ** 2 / 2])).min() < LEAST_BEND:
        doubts.add("sizes that hardly differ do not fix a valley; left out", where)
        return False
    return True


def _skewed_alike(groups: list[Runs], doubts: Doubts) -> tuple[list[Valley], Array] | None:
    """The budgets that have a bottom, and the covariance of the bottoms up to a factor.

    None, and a doubt, where the runs do not carry a shape.
    """
    if sum(map(len, groups)) - 3 * len(groups) < FEWEST_BEYOND:
        doubts.add(
            f"{sum(map(len, groups))} runs at {len(groups)} budgets are too few for a skew that all"
            " budgets share, which takes four runs a budget or more: these are plain parabolas"
        )
        return None
    sizes = [np.log(g.parameters) for g in groups]
    pairs = zip(groups, sizes, strict=True)
    groups = [g for g, x in pairs if _enough(x, 3, _where(g), doubts)]
    if not groups:
        return [], np.empty((0, 0))
    sizes = [np.log(g.parameters) for g in groups]
    shape = common_shape([x - x.mean() for x in sizes], [g.loss for g in groups])
    if shape.steepest:
        p, q = shape.exponents
        doubts.add(
            f"the shape ({p:.3g}, {q:.3g}) that would fit all budgets is at its bound: their skews"
            " differ, or are noise; these are plain parabolas"
        )
        return None
    valleys, kept = [], []
    for i, (group, x) in enumerate(zip(groups, sizes, strict=True)):
        bottom = float(shape.bottoms[i] + x.mean())
        if not x[0] <= bottom <= x[-1]:
            doubts.add("'loss' has no bottom within 'parameters'; left out", _where(group))
            continue
        c, size = shape.coefficients[i], math.exp(bottom)
        curve = Valley(_budget(group), size, 0.0, group, (*map(float, c),), shape.exponents)
        valleys.append(replace(curve, loss=float(curve.predict(np.array([size]))[0])))
        kept.append(i)
    return valleys, shape.covariance[np.ix_(kept, kept)]


def _power_law(c: Array, n: Array, covariance: Array) -> tuple[float, float, Array]:
    """Scale and exponent, and the covariance of the line in logs from its scatter."""
    x, weight = np.log(c), np.linalg.inv(covariance / np.trace(covariance))
    line, inverse, scatter = _line(x - x.mean(), np.log(n), weight)
    height, exponent = map(float, line)
    scale = math.exp(height - exponent * float(x.mean()))
    if not exponent > 0:
        raise ValueError(
            f"the fitted law N = {scale:.3g} C^{exponent:.3g} does not grow with compute: these"
            " budgets do not fix an optimum"
        )
    return scale, exponent, scatter * inverse


def _line(x: Array, y: Array, weight: Any) -> tuple[Array, Any, float]:
    """Height and slope of least weighted squares, their covariance, and the scatter about it."""
    rows = np.stack([np.ones_like(x), x], axis=1)
    inverse = np.linalg.inv(rows.T @ weight @ rows)
    line = inverse @ rows.T @ weight @ y
    errors = y - rows @ line
    return line, inverse, float(errors @ weight @ errors) / max(len(x) - 2, 1)


def _drift(c: Array, n: Array, covariance: Array) -> float:
    """What lines through all but the largest budgets foretell of the largest, per decade.

    Of nested least squares the variance of the difference is the difference of the variances.
    """
    x, y = np.log(c / c[-1]), np.log(n)
    lines = [
        _line(x[:count], y[:count], np.linalg.inv(covariance[:count, :count]))
        for count in range(3, len(c) + 1)
    ]
    cuts = []
    for i, (line, inverse, _) in enumerate(lines[:-1]):
        (top, _), whole, scatter = lines[-1]
        explained = math.sqrt(scatter * (inverse[0, 0] - whole[0, 0])) + 1e-12
        # Every budget is several runs, so these cuts count fully.
        cuts.append((math.log10(c[-1] / c[i + 2]), float(line[0] - top), explained, 1.0))
    return per_decade(cuts)

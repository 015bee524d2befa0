"""The optimum of each budget: the bottom of the valley of loss over log N.

The bottom is the minimum of a fitted curve, not the size of the best run. By default all budgets
share one skewed shape: see Note [Common shape] in valley.py. Plain parabolas are used on request,
or if the runs do not determine a common shape.
"""

import math
from dataclasses import replace

import numpy as np

from scaling.fit.identifiability import compute_singular_values
from scaling.isoflop.valley import MAX_EXPONENT, Valley, fit_common_shape, fit_parabola
from scaling.runs import Runs
from scaling.tables.cells import list_some
from scaling.uncertainty.diagnostics import Diagnostics
from scaling.units import Array

#: A grid is reported as coarse if the next size below or above the best run differs by more than
#: this factor. With this ratio, the best size of a parabola through noiseless runs of three laws is
#: off by 4 to 13 % at 1e22 FLOPs.
MAX_SIZE_RATIO = 2.5

#: The runs of a budget determine no curve if the smallest singular value of their columns x and
#: x^2 / 2 is below this. Here x is log N minus its mean. Sizes N, 1.1 N and 1.21 N have 0.0021.
MIN_BUDGET_SINGULAR_VALUE = 0.002

#: Number of sizes that a common shape needs in addition to three per budget.
FEWEST_EXTRA_SIZES = 3


def fit_valleys(
    budgets: list[Runs], nearest: int | None, diagnostics: Diagnostics
) -> tuple[list[Valley], Array]:
    """Return the valleys that have a bottom, and the covariance of the log sizes at the bottoms.

    With a common shape, the covariance is computed for unit variance of log loss; otherwise it is
    the identity. Messages about coarse grids and budgets that are left out are added to
    `diagnostics`. `nearest` requests separate parabolas, each of this many runs.
    """
    groups = [_sort_and_check(group, diagnostics) for group in budgets]
    if nearest is None:
        common = _fit_valleys_of_common_shape(groups, diagnostics)
        if common is not None:
            return common
    fitted = [_fit_parabola_valley(group, nearest, diagnostics) for group in groups]
    valleys = [valley for valley in fitted if valley is not None]
    return valleys, np.eye(len(valleys))


def _format_location(group: Runs) -> str:
    return f"compute = {_compute_budget(group):.3g} (rows {list_some(group.rows)})"


def _compute_budget(group: Runs) -> float:
    """Return the geometric mean of the compute of a group of runs."""
    return float(np.exp(np.log(group.compute).mean()))


def _sort_and_check(group: Runs, diagnostics: Diagnostics) -> Runs:
    """Return the runs of a budget in order of size, and add messages about their grid of sizes."""
    group = group[np.argsort(group.parameters, kind="stable")]
    # Runs of one size, for example with several seeds, are one point of the grid.
    x = np.unique(np.log(group.parameters))
    best = int(np.searchsorted(x, np.log(group.parameters[np.argmin(group.loss)])))
    location = _format_location(group)
    if (spread := group.compute.max() / group.compute.min()) > 1.2:
        diagnostics.add("'compute' spans a factor of {:.2f}: not one budget", location, spread)
    if best in (0, len(x) - 1):
        diagnostics.add("the least 'loss' is at an edge of 'parameters'; train beyond it", location)
    gap = math.exp(np.diff(x)[max(best - 1, 0) : best + 1].max(initial=0.0))
    if gap > MAX_SIZE_RATIO:
        diagnostics.add(
            "'parameters' {:.2f}x apart: the best size depends on the form of the curve",
            location,
            gap,
        )
    return group


def _fit_parabola_valley(
    group: Runs, nearest: int | None, diagnostics: Diagnostics
) -> Valley | None:
    """Return the parabola of one budget, or None with a message if the runs fix no bottom.

    `nearest` limits the fit to this many runs, the nearest in log size to the best run.
    """
    location = _format_location(group)
    x = np.log(group.parameters)
    if nearest is not None:
        best = int(np.argmin(group.loss))
        near = np.sort(np.argsort(np.abs(x - x[best]), kind="stable")[:nearest])
        group = group[near]
        x = x[near]
    if not _can_fix_a_valley(group, diagnostics):
        return None
    coefficients, bottom = fit_parabola(x, group.loss)
    if bottom is None:
        diagnostics.add("'loss' has no bottom within 'parameters'; left out", location)
        return None
    loss = float(np.polynomial.polynomial.polyval(bottom - x.mean(), coefficients))
    return Valley(
        _compute_budget(group), math.exp(bottom), loss, group, (*map(float, coefficients),)
    )


def _can_fix_a_valley(group: Runs, diagnostics: Diagnostics) -> bool:
    """Return True if a budget's runs fix three coefficients of a curve; otherwise add a message."""
    location = _format_location(group)
    x = np.log(group.parameters)
    if (sizes := len(np.unique(x))) < 3:
        diagnostics.add(f"{sizes} sizes do not fix 3 coefficients; left out", location)
        return False
    # Repetitions of one size differ by rounding, and a curve through them is noise.
    columns = np.stack([x, (x - x.mean()) ** 2 / 2])
    if compute_singular_values(columns).min() < MIN_BUDGET_SINGULAR_VALUE:
        diagnostics.add("sizes that hardly differ do not fix a valley; left out", location)
        return False
    # The bottom of a curve through equal losses is determined by rounding.
    if np.ptp(group.loss) <= 1e-12 * group.loss.mean():
        diagnostics.add("equal losses do not fix a valley; left out", location)
        return False
    return True


def _fit_valleys_of_common_shape(
    groups: list[Runs], diagnostics: Diagnostics
) -> tuple[list[Valley], Array] | None:
    """Return the valleys of a common shape that have a bottom, and the covariance of the bottoms.

    The result is None, with a message, if there are too few sizes or the shape is at its bound.
    """
    left_out = Diagnostics()
    usable = [group for group in groups if _can_fix_a_valley(group, left_out)]
    count = sum(len(np.unique(group.parameters)) for group in usable)
    needed = 3 * len(usable) + FEWEST_EXTRA_SIZES
    if count < needed:
        diagnostics.add(
            f"{count} sizes at {len(usable)} budgets are too few for a skew that all budgets"
            f" share, which needs {needed}; each budget is fitted by a plain parabola"
        )
        return None
    diagnostics.occurrences |= left_out.occurrences
    log_sizes = [np.log(group.parameters) for group in usable]
    shape = fit_common_shape([x - x.mean() for x in log_sizes], [g.loss for g in usable])
    if max(shape.exponents) > 0.99 * MAX_EXPONENT:  # The search stopped at its upper bound.
        p, q = shape.exponents
        diagnostics.add(
            f"the shape ({p:.3g}, {q:.3g}) that would fit all budgets is at its bound: their skews"
            " differ, or are noise; each budget is fitted by a plain parabola"
        )
        return None
    valleys = []
    indices = []
    for i, (group, x) in enumerate(zip(usable, log_sizes, strict=True)):
        bottom = float(shape.bottoms[i] + x.mean())
        if not x[0] <= bottom <= x[-1]:
            diagnostics.add(
                "'loss' has no bottom within 'parameters'; left out", _format_location(group)
            )
            continue
        size = math.exp(bottom)
        coefficients = (*map(float, shape.coefficients[i]),)
        valley = Valley(_compute_budget(group), size, 0.0, group, coefficients, shape.exponents)
        valleys.append(replace(valley, loss=float(valley.predict(np.array([size]))[0])))
        indices.append(i)
    return valleys, shape.covariance[np.ix_(indices, indices)]

"""The compute that a training recipe needs to match another, as a ratio with an interval.

The best loss of a law for compute C is its minimum over N on 6 N D = C. A search finds this minimum
by narrowing a grid. This loss falls with compute, so bisection and interpolation find the compute
that reaches a given loss. Both searches work for any law of N and D, and for all laws of a sample
at once. A small error in the loss becomes a much larger error in the compute.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scaling.fit.parametric import ParametricFit
from scaling.law import Interval, compute_quantiles, require_budget, require_numbers
from scaling.laws.fit import LawFit
from scaling.laws.form import Form
from scaling.uncertainty.diagnostics import compute_lack_of_fit
from scaling.uncertainty.drift import NORMAL_QUANTILE, PRIOR_LOSS_DRIFT, compute_drift_start
from scaling.units import FLOPS_PER_PARAMETER_TOKEN, Array

Fit = ParametricFit | LawFit

#: Number of pairs of laws, one from each sample, from which an interval is computed.
PAIRS = 200

#: Logarithms of the smallest and the largest compute of the search.
COMPUTE_RANGE = (math.log(1e-30), math.log(1e60))

#: Number of grid points over log N, and number of times that the grid is narrowed to the neighbors
#: of its best point.
GRID_POINTS = 33
NARROWINGS = 5

#: Number of computes at which the error of a law is evaluated.
CROSSING_POINTS = 3000

#: Number of bisection steps, which determine log compute to within 0.05, and of the interpolations
#: after them, which determine it to within about 1e-9.
BISECTIONS = 12
INTERPOLATIONS = 4


@dataclass(frozen=True)
class Speedup:
    """The second recipe needs `factor` times `compute` FLOPs for the first's `loss` in nats."""

    compute: float
    loss: float
    factor: float
    interval: Interval
    #: The reason why the interval is (0, inf); empty if it is not.
    reason: str = ""


def effective_speedup(
    a: Fit, b: Fit, compute: float, *, inputs: Mapping[str, float] | None = None
) -> Speedup:
    """Return the factor of compute that `b` needs to reach the best loss of `a` at `compute`.

    The best loss is the lowest over all N. `factor` is the compute with which `b` reaches this
    loss, divided by `compute`. It is inf if `b` never reaches the loss. Both losses must be
    measured on the same text. The 95 % interval combines the spread over pairs of laws consistent
    with the runs of `a` and `b` with two further errors. These are the drift of both laws beyond
    their runs, and their lack of fit. If either fit has no finite intervals, the interval is
    (0, inf), and `reason` says why.

    Args:
        a: The result of `fit_parametric`, or of `fit_law` with a law of parameters and tokens.
        b: The fit of the other recipe; its law may have another form.
        compute: The training compute of `a` in FLOPs, 6 N D.
        inputs: Values of further inputs of the laws, such as `{"granularity": 8}`.

    Raises:
        TypeError: A fit is of another kind, or a number is not a number.
        ValueError: The runs of a fit do not identify its law, a law needs other inputs, or a number
            is not positive and finite.
    """
    inputs = inputs or {}
    first = _build_recipe(a, inputs, seed=0)
    second = _build_recipe(b, inputs, seed=1)
    if unused := {*inputs} - {*first.inputs, *second.inputs}:
        raise ValueError(f"inputs: neither law has the inputs {sorted(unused)}")
    require_budget(compute)
    loss = first.compute_best_loss(first.constants, np.array([math.log(compute)]))
    log_factor = float(second.solve_log_compute(second.constants, loss)[0]) - math.log(compute)
    factor = math.exp(log_factor)
    best = float(loss[0])
    if reason := first.reason or second.reason:
        return Speedup(compute, best, factor, Interval(0.0, math.inf), reason)
    losses = first.compute_best_loss(first.sample, np.full(PAIRS, math.log(compute)))
    log_factors = second.solve_log_compute(second.sample, losses) - math.log(compute)
    low, high = compute_quantiles(log_factors, [0.025, 0.975])
    nearest, farthest = second.find_crossings(best, first.compute_law_error(np.log(compute)))
    if not math.isfinite(factor):
        low = min(low, nearest - math.log(compute))
        return Speedup(compute, best, factor, Interval(_exp(low), math.inf))
    widening = max(first.widening, second.widening)
    reached = math.log(compute) + log_factor
    down = math.hypot(widening * min(low - log_factor, 0), reached - nearest)
    up = math.hypot(widening * max(high - log_factor, 0), farthest - reached)
    interval = Interval(_exp(log_factor - down), _exp(log_factor + up))
    return Speedup(compute, best, factor, interval)


def _exp(x: float) -> float:
    """Return e^x, or inf if it overflows. For a law that never reaches the loss, x is inf."""
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True)
class _Recipe:
    """A law of parameters and tokens, with a sample of laws consistent with its runs."""

    form: Form
    inputs: Mapping[str, float]
    #: The fitted constants, (1, P).
    constants: Array
    #: Constants of `PAIRS` laws, (PAIRS, P); empty if there is a `reason`.
    sample: Array
    #: The reason why the law has no finite intervals; empty if it has.
    reason: str
    #: Factor that widens an interval of the sample to account for the number of fitted constants.
    widening: float
    #: Log of the compute above which drift grows, and the drift of log loss per decade.
    log_start: float
    drift: float
    #: Standard deviation of the error of log loss due to the form of the law.
    lack: float

    def compute_law_error(self, log_compute: Array) -> Array:
        """Return the standard deviation of log loss beyond noise: drift and lack of fit."""
        decades = np.maximum((log_compute - self.log_start) / math.log(10), 0.0)
        return np.hypot(self.drift * decades, self.lack)

    def compute_best_loss(self, constants: Array, log_compute: Array) -> Array:
        """Return the least loss (S,) over all N, for each pair of law and compute."""
        log_product = log_compute[:, None] - math.log(FLOPS_PER_PARAMETER_TOKEN)
        low = np.zeros_like(log_product)
        high = log_product
        steps = np.linspace(0.0, 1.0, GRID_POINTS)
        by_name = dict(zip(self.form.constants, constants.T[..., None], strict=True))
        for _ in range(NARROWINGS):
            grid = low + (high - low) * steps
            columns = {"parameters": np.exp(grid), "tokens": np.exp(log_product - grid)}
            loss = self.form.predict(by_name, **columns, **self.inputs)
            best = np.argmin(loss, axis=1)[:, None]
            low = np.take_along_axis(grid, np.maximum(best - 1, 0), axis=1)
            high = np.take_along_axis(grid, np.minimum(best + 1, GRID_POINTS - 1), axis=1)
        least: Array = loss.min(1)
        return least

    def solve_log_compute(self, constants: Array, loss: Array) -> Array:
        """Return the log of the least compute (S,), for each pair of law and loss."""
        low, high = (np.full(len(loss), end) for end in COMPUTE_RANGE)
        # Positive below the compute that reaches the loss, and otherwise at most 0.
        low_gap, high_gap = (
            np.log(self.compute_best_loss(constants, x) / loss) for x in (low, high)
        )
        is_reached = high_gap <= 0
        middle = high
        for step in range(BISECTIONS + INTERPOLATIONS):
            fraction = np.full(len(loss), 0.5)
            if step >= BISECTIONS:
                gaps = low_gap[is_reached], high_gap[is_reached]
                fraction[is_reached] = gaps[0] / (gaps[0] - gaps[1])
            middle = low + fraction * (high - low)
            gap = np.log(self.compute_best_loss(constants, middle) / loss)
            above = gap > 0
            low = np.where(above, middle, low)
            low_gap = np.where(above, gap, low_gap)
            high = np.where(above, high, middle)
            high_gap = np.where(above, high_gap, gap)
        return np.where(is_reached, middle, np.inf)

    def find_crossings(self, loss: float, error: Array) -> tuple[float, float]:
        """Return the log of the compute at which the ends of the 95 % band reach a loss.

        The band combines the error of the law and `error`, the standard deviation of the log of the
        loss itself. Its lower end reaches the loss first. inf stands for an end that never does.
        """
        grid = np.linspace(*COMPUTE_RANGE, CROSSING_POINTS)
        gaps = np.log(self.compute_best_loss(self.constants, grid) / loss)
        margin = NORMAL_QUANTILE * np.hypot(error, self.compute_law_error(grid))
        return _interpolate_crossing(grid, gaps - margin), _interpolate_crossing(
            grid, gaps + margin
        )


def _interpolate_crossing(x: Array, y: Array) -> float:
    """Return the first x at which y, interpolated linearly, is at most 0; inf if there is none."""
    i = int(np.argmax(y <= 0))
    if y[i] > 0:
        return math.inf
    return float(x[i - 1] + (x[i] - x[i - 1]) * y[i - 1] / (y[i - 1] - y[i])) if i else float(x[0])


def _build_recipe(fit: Fit, inputs: Mapping[str, float], seed: int) -> _Recipe:
    """Return the recipe of a fit; raise an error if its law has unexpected inputs."""
    if not isinstance(fit, ParametricFit | LawFit):
        raise TypeError(
            f"expected the result of fit_parametric or fit_law, got {type(fit).__name__}"
        )
    problem = fit.problem
    form = problem.form
    if not {"parameters", "tokens"} <= {*form.inputs} or form.target != "loss":
        raise ValueError(f"expected a law of the loss by parameters and tokens, got {form.name!r}")
    needed = {*form.inputs} - {"parameters", "tokens"}
    if missing := needed - {*inputs}:
        raise ValueError(f"{form.name} also needs inputs={{{sorted(missing)[0]!r}: …}}")
    for name in needed:
        value = inputs[name]
        require_numbers(**{name: value})
        if not 0 < value < math.inf:
            raise ValueError(f"expected inputs[{name!r}] to be positive and finite, got {value}")
    widening = 1.0
    if isinstance(fit, ParametricFit):
        constants = fit.law.constants
        sample = fit.posterior.resample(PAIRS, seed)
        theta = problem.from_constants(fit.law.constants)
        start = fit.drift.start
        drift = fit.drift.loss
        reason = fit.posterior.reason
    else:
        constants = np.array([*fit.constants.values()])
        sample = np.empty((0, len(constants)))
        if not fit.reason:
            sample = fit.resample_constants(seed)[:PAIRS]
        widening = math.sqrt(len(fit.residuals) / max(fit.freedom, 1))
        theta = fit.theta[0]
        product = problem.columns["parameters"] * problem.columns["tokens"]
        start = compute_drift_start(FLOPS_PER_PARAMETER_TOKEN * product)
        drift = PRIOR_LOSS_DRIFT
        reason = fit.reason
    lack = compute_lack_of_fit(problem, theta, fit.residuals)
    used = {name: inputs[name] for name in needed}
    log_start = math.log(start)
    return _Recipe(form, used, constants[None], sample, reason, widening, log_start, drift, lack)

"""Fits of any form of law.

`fit_law` fits any `Form` as `fit_parametric` fits Chinchilla's law. A grid of exponents and linear
algebra for the amplitudes give the starts, and Newton steps then refine all constants.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.identifiability import (
    MIN_SINGULAR_VALUE,
    compute_singular_values,
    explain_unidentified,
)
from scaling.fit.search import (
    Loss,
    Proof,
    compute_residual_objective,
    describe_optima,
    refit,
    require_objective,
    search,
)
from scaling.fit.varpro import Problem
from scaling.law import CONFIDENCE_LEVEL, Interval, compute_quantiles
from scaling.laws.form import CATALOG, Form
from scaling.runs import Runs, ScalingWarning
from scaling.units import COLUMNS, Array

Rows = Runs | Mapping[str, ArrayLike]

#: Number of resamples from which an interval is computed.
RESAMPLES = 400


@dataclass(frozen=True, eq=False, repr=False)
class LawFit(ComparesArrays):
    """A fitted law of some form, with the data and options of the fit."""

    form: Form
    constants: dict[str, float]
    objective: float
    #: log(predicted / observed), one per row.
    residuals: Array
    proof: Proof
    problem: Problem
    #: The fitted parameters of the problem, (1, P).
    theta: Array
    loss: Loss
    delta: float

    @property
    def freedom(self) -> int:
        """Number of rows minus the number of fitted constants."""
        return len(self.residuals) - len(self.constants)

    @property
    def reason(self) -> str:
        """The reason why the intervals are infinite; empty if they are not."""
        if self.freedom > 0:
            return ""
        return (
            f"{len(self.residuals)} rows leave no degrees of freedom for the"
            f" {len(self.constants)} constants of {self.form.name}, so every interval is infinite;"
            " add rows"
        )

    def resample_constants(self, seed: int = 0) -> Array:
        """Return the constants (RESAMPLES, P) of refits to rows drawn with replacement."""
        n = len(self.problem.log_target)
        random = np.random.default_rng(seed)
        counts = random.multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)
        ends = refit(
            self.problem,
            np.tile(self.theta, (RESAMPLES, 1)),
            self.loss,
            self.delta,
            weights=counts,
            finest=1e-6,
        )
        return self.problem.to_constants(ends.theta)

    def predict(self, **inputs: ArrayLike) -> Array:
        """Return the predictions of the fitted law, for one keyword argument per input of the form.

        Raises `ValueError` if an input is missing, unknown, not positive or not finite.
        """
        if set(inputs) != set(self.form.inputs):
            raise ValueError(
                f"expected the inputs {[*self.form.inputs]} of {self.form.name}, got {[*inputs]}"
            )
        for name in inputs:
            _extract_column(inputs, name)
        return self.form.predict(self.constants, **inputs)

    def interval(self, target: str | Callable[[Mapping[str, float]], float]) -> Interval:
        """Return the interval of a constant, or of any function of the constants.

        The ends are quantiles of 400 resamples. Their distances from the estimate are multiplied by
        sqrt(n / (n - P)) for n rows and P fitted constants. If the estimate and the lower end are
        positive, the distances are those of the logarithms. The interval is infinite if there is a
        `reason`.

        Raises:
            ValueError: The constant is unknown, or the function does not return a finite number
                for the fitted constants, or returns NaN for a resample.
        """
        if isinstance(target, str) and target not in self.constants:
            raise ValueError(f"expected one of {self.form.constants}, got {target!r}")

        def evaluate(constants: Mapping[str, float]) -> float:
            return constants[target] if isinstance(target, str) else target(constants)

        estimate = evaluate(self.constants)
        if np.ndim(estimate) or not np.isfinite(np.asarray(estimate, float)):
            raise ValueError(
                f"expected one finite number for the fitted constants, got {estimate}; the interval"
                " is widened around this number"
            )
        if self.reason:
            return Interval(-math.inf, math.inf)
        rows = self.resample_constants()
        values = [evaluate(dict(zip(self.form.constants, row, strict=True))) for row in rows]
        ends = np.array(
            compute_quantiles(values, [0.5 - CONFIDENCE_LEVEL / 2, 0.5 + CONFIDENCE_LEVEL / 2])
        )
        widening = math.sqrt(len(self.residuals) / self.freedom)
        if estimate > 0 and ends[0] > 0:
            low, high = estimate * (ends / estimate) ** widening
        else:
            low, high = estimate + widening * (ends - estimate)
            if isinstance(target, str) and target in self.form.terms:
                low = max(low, 0.0)
        return Interval(min(float(low), estimate), max(float(high), estimate))


def fit_law(
    form: Form | str,
    rows: Rows,
    loss: Loss = "huber",
    *,
    delta: float = 1e-3,
    prove: bool = False,
) -> LawFit:
    """Return the fit of a form to the logarithms of a target.

    Args:
        form: A `Form`, or the name of one in `CATALOG`.
        rows: `Runs`, or a mapping with one vector per input of the form and one for the target.
        loss: "huber", "lad" or "squares", as in `fit_parametric`.
        delta: The log residual at which the Huber loss becomes linear; other losses ignore it.
        prove: Refine the fit from every point of the exponent grid, not only from the best points.

    Raises:
        TypeError: `form` is neither a `Form` nor a name.
        ValueError: The form or an option is unknown, columns are missing or of unequal length, a
            value is not positive and finite, or there are fewer rows than constants. Sizes and
            tokens that do not identify the law also raise it, and so do a constant target of a law
            with a constant term, and terms whose logarithms are not linear in the exponents.

    A `ScalingWarning` reports several optima, a failure to converge, constants at a bound, and as
    many rows as constants.
    """
    form = _resolve_form(form)
    columns, log_target = _extract_columns(form, rows)
    require_objective(loss, delta)
    needed = len(form.constants)
    if len(log_target) < needed:
        raise ValueError(
            f"expected at least {needed} rows to fit {form.name}, got {len(log_target)}"
        )
    _require_identified(form, columns)
    problem = Problem(form, columns, log_target)
    num_power_laws = len(problem.log_amplitude_terms)  # raises for a term that is not finite
    form.require_linearity(columns)  # `minimum` and `maximum` may be linear for some inputs only
    # A constant term fits equal targets exactly, which leaves the exponents undetermined.
    if np.ptp(log_target) == 0 and 0 < num_power_laws < problem.num_terms:
        raise ValueError(
            f"column {form.target!r} is {math.exp(log_target[0]):g} in every row: there is nothing"
            " to fit"
        )
    theta, proof = search(problem, loss, delta, prove)
    errors = newton.compute_residuals(problem, theta)[0]
    if several := describe_optima(proof):
        warnings.warn(several, ScalingWarning, stacklevel=2)
    if at_bound := newton.list_constants_at_bound(problem, theta[0]):
        warnings.warn(
            f"{', '.join(at_bound)} of {form.name} ended at a bound: the rows do not determine it,"
            " or do not follow such a law",
            ScalingWarning,
            stacklevel=2,
        )
    values = map(float, problem.to_constants(theta)[0])
    fit = LawFit(
        form,
        dict(zip(form.constants, values, strict=True)),
        compute_residual_objective(errors, loss, delta),
        errors,
        proof,
        problem,
        theta,
        loss,
        delta,
    )
    if fit.reason:
        warnings.warn(fit.reason, ScalingWarning, stacklevel=2)
    return fit


def _require_identified(form: Form, columns: Mapping[str, Array]) -> None:
    """Raise `ValueError` if the sizes and tokens of the rows do not identify the exponents."""
    present = [k for k in ("parameters", "tokens") if k in form.inputs]
    if not present or not form.exponents:
        return
    if len(present) == 2 and len(form.terms) > 1:
        if reason := explain_unidentified(columns["parameters"], columns["tokens"]):
            raise ValueError(reason)
        return
    logs = np.stack([np.log(columns[k]) for k in present])
    if compute_singular_values(logs).min() < MIN_SINGULAR_VALUE:
        raise ValueError(
            f"these {logs.shape[1]} rows do not identify {form.name}: the logarithms of"
            f" {' and '.join(present)} do not vary independently; add rows that do, or pass a Form"
            " with numbers instead of the exponents"
        )


def _resolve_form(form: Form | str) -> Form:
    if isinstance(form, Form):
        return form
    if not isinstance(form, str):
        raise TypeError(f"expected form to be a Form or its name, got {type(form).__name__}")
    if form not in CATALOG:
        raise ValueError(f"no law {form!r} in the catalog {[*CATALOG]}; pass a name or a Form")
    return CATALOG[form]


def _extract_column(rows: Mapping[str, ArrayLike], name: str) -> Array:
    """Return a copy of a column; raise `ValueError` unless it is positive and finite."""
    if name not in rows:
        raise ValueError(f"expected a column {name!r}, got columns {[*rows]}")
    # np.array would copy the number under a mask, so masked cells become nan, which is refused. A
    # copy does not change if the caller changes the rows later.
    column: Array = np.array(np.ma.filled(np.ma.asarray(rows[name], float), math.nan))
    valid = np.isfinite(column) & (column > 0)
    for row in np.flatnonzero(~valid):
        raise ValueError(
            f"column {name!r} must be positive and finite, but row {row + 1} is"
            f" {column.reshape(-1)[row]}"
        )
    return column


def _extract_columns(form: Form, rows: Rows) -> tuple[dict[str, Array], Array]:
    """Return a form's input columns and its log target; raise `ValueError` if lengths differ."""
    if isinstance(rows, Runs):
        rows = {name: getattr(rows, name) for name in COLUMNS}
    columns = {k: _extract_column(rows, k) for k in form.inputs}
    y = _extract_column(rows, form.target)
    if {v.shape for v in columns.values()} != {y.shape} or y.ndim != 1:
        shapes = {k: v.shape for k, v in {**columns, form.target: y}.items()}
        raise ValueError(f"expected one-dimensional columns of one length, got shapes {shapes}")
    return columns, np.log(y)

"""Fit any form of law, with fixed constants and priors, and choose among laws by their foresight.

Notable: this is the fit of `fit_parametric` (amplitudes by linear algebra, exponents from a grid,
all polished by Newton's method, the same proof) for whatever terms a `Form` writes down.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.identifiability import LEAST, require_identified, singular_values
from scaling.fit.search import Loss, Proof, check, refit, search, total
from scaling.fit.varpro import Problem
from scaling.law import Interval, check_level
from scaling.laws.form import CATALOG, Form
from scaling.runs import Array, Runs, ScalingWarning

Rows = Runs | Mapping[str, ArrayLike]
DRAWS = 400


@dataclass(frozen=True, eq=False)
class LawFit(ComparesArrays):
    """A law of a form, and what it was fitted to."""

    form: Form
    constants: dict[str, float]
    objective: float
    residuals: Array
    """log of predicted over observed, one a row."""
    proof: Proof
    problem: Problem
    theta: Array
    """(1, P) the fitted parameters of the problem."""
    loss: Loss
    delta: float
    springs: tuple[newton.Spring, ...]
    """The priors."""

    def draw(self) -> Array:
        """Return (DRAWS, P) constants of refits to resampled rows."""
        n = len(self.problem.z)
        counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS).astype(float)
        starts = np.tile(self.theta, (DRAWS, 1))
        ends = refit(
            self.problem,
            starts,
            self.loss,
            self.delta,
            weights=counts,
            finest=1e-6,
            springs=self.springs,
        )
        return self.problem.natural(ends.theta)

    def predict(self, **inputs: ArrayLike) -> Array:
        """The fitted law at other inputs."""
        return self.form.predict(self.constants, **inputs)

    def interval(
        self, asked: str | Callable[[Mapping[str, float]], float], *, level: float = 0.95
    ) -> Interval:
        """Of a constant, or of anything that constants imply, by 400 resamples.

        Quantiles spread by sqrt(n / (n - constants)), as the fit took up that many of n rows;
        without degrees of freedom anything may be.
        """
        check_level(level)
        if isinstance(asked, str) and asked not in self.constants:
            raise ValueError(f"{asked!r} is not one of {self.form.constants}")
        of = (lambda c: c[asked]) if isinstance(asked, str) else asked
        center, n, p = of(self.constants), len(self.residuals), len(self.constants)
        if n <= p:
            return Interval(-math.inf, math.inf, level)
        values = [of(dict(zip(self.form.constants, row, strict=True))) for row in self.draw()]
        ends = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
        wider = math.sqrt(n / (n - p))
        if center > 0 and min(values) > 0:
            # What cannot be negative is spread in logs, or its interval would end below zero.
            low, high = center * (ends / center) ** wider
        else:
            low, high = center + wider * (ends - center)
            if isinstance(asked, str) and asked in self.form.terms:
                low = max(low, 0.0)
        return Interval(min(float(low), center), max(float(high), center), level)


def fit_law(
    form: Form | str,
    rows: Rows,
    loss: Loss = "huber",
    *,
    target: str | None = None,
    delta: float = 1e-3,
    fixed: Mapping[str, float] | None = None,
    priors: Mapping[str, tuple[float, float]] | None = None,
    untuned: float = 1.0,
    prove: bool = False,
) -> LawFit:
    """The constants of least loss between logs of predicted and observed `target`.

    `form` may be a name of `CATALOG`. `rows` holds its inputs and the target (by default the
    form's own), a vector each. `fixed` constants stay. `priors` are (value, factor): the logarithm
    of the constant is normal about that of value, with deviation log factor. `untuned` and `prove`
    are those of `fit_parametric`. ValueError: missing, non-positive or unequal columns, unknown
    constants, fewer rows than constants, rows that do not identify the law.
    ScalingWarning: a constant at its bound.
    """
    form = _named(form)
    fixed, priors = dict(fixed or {}), dict(priors or {})
    columns, z = _columns(form, rows, target or form.target)
    if unknown := {*fixed, *priors} - {*form.constants}:
        raise ValueError(f"{sorted(unknown)} are not constants of {form.name}: {form.constants}")
    if wrong := [k for k, (value, factor) in priors.items() if not (value > 0 and factor > 1)]:
        raise ValueError(f"priors of {wrong}: a positive value, and a factor above one")
    if bad := [k for k, v in fixed.items() if not math.isfinite(v) or (k in form.terms and v < 0)]:
        raise ValueError(f"fixed {bad}: must be finite, and amplitudes cannot be negative")
    check(loss, delta, untuned)
    needed = len(form.constants) - len(fixed) - len(priors)
    if len(z) < needed:
        raise ValueError(f"{len(z)} rows cannot fix {needed} constants of {form.name}")
    if not priors:
        _require_identified(form, columns, fixed)
    problem = Problem(form, columns, z, fixed, untuned=untuned)
    theta, proof = search(problem, loss, delta, prove)
    springs = []
    if priors:
        # The weight of a prior is against the noise of the rows, known once they are fitted.
        errors = newton.residuals(problem, theta)[0]
        freedom = len(z) - len(form.constants) + len(fixed)
        size = 1.4826 * float(np.median(np.abs(errors))) if freedom > 0 else delta
        noise = max(size * math.sqrt(len(z) / max(freedom, 1)), 1e-12)
        springs = [_prior(problem, k, *prior, noise) for k, prior in priors.items()]
        theta, proof = search(problem, loss, delta, prove, springs)
    errors = newton.residuals(problem, theta)[0]

    low, high = problem.bounds
    gone = newton.vanished(problem, theta)[0]
    ends = (theta[0] <= low) | (theta[0] >= high)
    ends[: problem.count] |= gone
    if bound := [k for k, at in zip(form.constants, ends, strict=True) if at and k not in fixed]:
        warnings.warn(
            f"{', '.join(bound)} of {form.name} at a bound: the rows do not determine it, or are"
            " not of such a law",
            ScalingWarning,
            stacklevel=2,
        )
    constants = dict(zip(form.constants, map(float, problem.natural(theta)[0]), strict=True))
    least = total(problem, errors, loss, delta)
    return LawFit(
        form, constants, least, errors, proof, problem, theta, loss, delta, tuple(springs)
    )


def _require_identified(
    form: Form, columns: Mapping[str, Array], fixed: Mapping[str, float]
) -> None:
    """Raise `ValueError` if the rows' sizes and tokens leave a constant of the form open."""
    known = all(name in fixed for name in form.exponents)
    logs = [np.log(columns[k]) for k in ("parameters", "tokens") if k in form.inputs]
    if known or not logs:
        return
    names = " and ".join(k for k in ("parameters", "tokens") if k in form.inputs)
    if len(logs) == 2 and len(form.terms) > 1:
        require_identified(columns["parameters"], columns["tokens"])
    elif singular_values(np.stack(logs)).min() < LEAST:
        raise ValueError(
            f"these {len(logs[0])} rows do not identify {form.name}: the logarithms of {names} do"
            " not vary independently; add rows that do, fix the exponents, or give them priors"
        )


def select_law(
    rows: Rows,
    forms: Sequence[Form | str] | None = None,
    *,
    by: str = "compute",
    share: float = 0.7,
    target: str | None = None,
) -> list[tuple[float, LawFit]]:
    """Each form fitted to all rows, with its score, the best first; None: all that the rows allow.

    The score is the root mean square of log predicted over observed for the rows above the `share`
    quantile of `by`, foretold from those below: what a law is for, and no count of its constants.
    """
    axis = _column(rows, by)
    below = axis <= np.quantile(axis, share)
    if below.all():
        raise ValueError(f"share = {share} holds no rows out by {by!r}")
    chosen = [_named(form) for form in forms or CATALOG.values()]
    if forms is None:
        wanted = target or "loss"
        chosen = [f for f in chosen if f.target == wanted and all(_has(rows, k) for k in f.inputs)]
    found = []
    for form in chosen:
        columns, z = _columns(form, rows, target or form.target)
        table = {**columns, "y": np.exp(z)}
        part = fit_law(form, {k: v[below] for k, v in table.items()}, target="y")
        foretold = part.predict(**{k: columns[k][~below] for k in form.inputs})
        score = float(np.sqrt(np.mean((np.log(foretold) - z[~below]) ** 2)))
        whole = fit_law(form, table, target="y")
        found.append((score, whole))
    return sorted(found, key=lambda pair: pair[0])


def _named(form: Form | str) -> Form:
    if isinstance(form, Form):
        return form
    if form not in CATALOG:
        raise ValueError(f"no law {form!r}: there are {[*CATALOG]}, or write a Form")
    return CATALOG[form]


def _has(rows: Rows, name: str) -> bool:
    return name in rows if isinstance(rows, Mapping) else hasattr(rows, name)


def _column(rows: Rows, name: str, zero: bool = False) -> Array:
    if not _has(rows, name):
        kept = [*rows] if isinstance(rows, Mapping) else ["parameters", "tokens", "compute", "loss"]
        raise ValueError(f"the rows have no {name!r}; they have {kept}")
    column = np.asarray(rows[name] if isinstance(rows, Mapping) else getattr(rows, name), float)
    sound = np.isfinite(column) & ((column > 0) | (zero & (column == 0)))
    for row in np.flatnonzero(~sound):
        raise ValueError(
            f"column {name!r} must be positive and finite, but row {row + 1} is {column[row]}"
        )
    return column


def _columns(form: Form, rows: Rows, target: str) -> tuple[dict[str, Array], Array]:
    columns = {k: _column(rows, k, k in form.zero) for k in form.inputs}
    y = _column(rows, target)
    if {v.shape for v in columns.values()} != {y.shape} or y.ndim != 1:
        raise ValueError(f"columns {[*columns, target]} differ in length")
    return columns, np.log(y)


@dataclass(frozen=True, eq=False)
class LogConstant(ComparesArrays):
    """The logarithm of one constant, as a function of the parameters of a problem."""

    problem: Problem
    at: int

    def __call__(self, theta: Array) -> Array:
        """Return (S,) logarithms of (S, P) parameters."""
        logs: Array = np.log(np.maximum(self.problem.natural(theta)[:, self.at], 1e-300))
        return logs


def _prior(problem: Problem, name: str, value: float, factor: float, noise: float) -> newton.Spring:
    at = problem.names.index(name)

    target = np.log([value])
    return newton.Spring(LogConstant(problem, at), target, (noise / math.log(factor)) ** 2)

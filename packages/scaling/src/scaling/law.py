"""The law L(N, D) = E + A / N^alpha + B / D^beta and its compute-optimal models.

Note [Closed-form optimum]
Under C = 6 N D the optimum is N = G (C / 6)^(beta / (alpha + beta)) and D = C / (6 N). Here
G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4).
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import overload

import numpy as np
from numpy.typing import ArrayLike

from scaling.equality import ComparesArrays
from scaling.units import FLOPS_PER_PARAMETER_TOKEN, Array

CONSTANTS = ("E", "A", "B", "alpha", "beta")

#: The numbers of an `Optimum`, in the order of `compute_optima`.
OPTIMUM_FIELDS = ("parameters", "tokens", "loss")

#: Probability with which an interval covers the true value.
CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A confidence interval that covers the true value with probability `level`."""

    low: float
    high: float
    level: float = CONFIDENCE_LEVEL

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"[{self.low:.5g}, {self.high:.5g}] {self.level:.0%}"


def require_numbers(**named: object) -> None:
    """Raise `TypeError` unless each argument is a real number and not a bool."""
    for name, value in named.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be one number, got {reprlib.repr(value)}")


def require_budget(compute: float) -> None:
    """Raise `TypeError` or `ValueError` unless a budget is one positive and finite number."""
    require_numbers(compute=compute)
    if not 0 < compute < math.inf:
        raise ValueError(f"expected a positive and finite compute, got compute = {compute}")


def require_model(parameters: float, tokens: float) -> None:
    """Raise `TypeError` or `ValueError` unless N and D are positive and finite numbers."""
    require_numbers(parameters=parameters, tokens=tokens)
    if not (0 < parameters < math.inf and 0 < tokens < math.inf):
        raise ValueError(
            f"expected positive and finite numbers, got parameters = {parameters}, tokens ="
            f" {tokens}"
        )


def compute_quantiles(
    values: ArrayLike, levels: Sequence[float], weights: Array | None = None
) -> list[float]:
    """Return the quantiles `levels` of `values`, which are one value per sampled law.

    `weights` must sum to 1 and are equal by default. Raises `ValueError` if a value is NaN.
    """
    numbers = np.asarray(values, dtype=float)
    missing = int(np.isnan(numbers).sum())
    if missing:
        raise ValueError(
            f"expected a number for every sampled law, got NaN for {missing} of {len(numbers)}"
        )
    if weights is None:
        weights = np.full(len(numbers), 1 / len(numbers))
    order = np.argsort(numbers)
    below = np.cumsum(weights[order]) - weights[order] / 2
    # Quantiles are not interpolated, because values may be infinite.
    positions = np.searchsorted(below, levels).clip(0, len(numbers) - 1)
    result: list[float] = numbers[order][positions].tolist()
    return result


@dataclass(frozen=True, eq=False, repr=False)
class Optimum(ComparesArrays):
    """The compute-optimal model of a budget in FLOPs."""

    compute: float
    parameters: float
    tokens: float
    #: The loss in nats; nan if the optimum is from an IsoFLOP fit, which does not model the loss.
    loss: float
    #: Intervals by field name; None if the law is known and was not fitted to runs.
    intervals: dict[str, Interval] | None = None
    #: A statement of how often such intervals covered later optima of tables; empty if the
    #: intervals do not include drift.
    coverage: str = ""
    #: The reason why the intervals are (0, inf); empty if they are not. If the runs do not identify
    #: the optimum, N, D and the loss are nan.
    reason: str = ""

    def __str__(self) -> str:
        lines = [f"at {self.compute:.4g} FLOPs"]
        for name in OPTIMUM_FIELDS:
            interval = (self.intervals or {}).get(name)
            if interval or self.intervals is None:
                line = f"  {name:<12}{getattr(self, name):<12.5g}{interval or ''}"
                lines.append(line.rstrip())
        lines += [f"  {text}" for text in (self.coverage, self.reason) if text]
        return "\n".join(lines)


def build_unidentified_optimum(compute: float, reason: str) -> Optimum:
    """Return the optimum of runs that do not identify it: nan, with intervals from 0 to inf."""
    intervals = dict.fromkeys(OPTIMUM_FIELDS, Interval(0.0, math.inf))
    return Optimum(compute, math.nan, math.nan, math.nan, intervals, reason=reason)


@dataclass(frozen=True)
class Law:
    """The loss E + A / N^alpha + B / D^beta, in nats, of a model with N parameters after D tokens.

    Raises `ValueError` unless all constants are finite, E >= 0 and the others positive. The
    exception is `UNKNOWN_LAW` (all nan), which represents runs that do not identify a law.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if np.isnan(self.constants).all():
            return
        for name in ("A", "B", "alpha", "beta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"expected {name} to be positive and finite, got {value}: otherwise no model"
                    " is optimal"
                )
        if not (math.isfinite(self.E) and self.E >= 0):
            raise ValueError(f"expected a finite irreducible loss E >= 0, got {self.E}")

    @property
    def constants(self) -> Array:
        """The constants E, A, B, alpha and beta, (5,)."""
        return np.array([self.E, self.A, self.B, self.alpha, self.beta])

    @overload
    def predict(self, parameters: float, tokens: float) -> float: ...
    @overload
    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> Array: ...
    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> Array | float:
        """Return the loss in nats of models with N parameters after D tokens; the inputs broadcast.

        Raises `ValueError` unless all parameters and tokens are positive.
        """
        n = np.asarray(parameters, np.float64)
        d = np.asarray(tokens, np.float64)
        if not ((n > 0).all() and (d > 0).all()):
            raise ValueError(
                f"expected positive parameters and tokens, got parameters = {reprlib.repr(n)},"
                f" tokens = {reprlib.repr(d)}"
            )
        loss = compute_loss(self.constants, n, d)
        return loss if loss.ndim else float(loss)

    @property
    def exponent(self) -> float:
        """The exponent beta / (alpha + beta) of C in N_opt; D_opt has 1 minus this exponent."""
        return self.beta / (self.alpha + self.beta)

    def optimal(self, compute: float) -> Optimum:
        """Return the model with the lowest loss among those with 6 N D = `compute` FLOPs.

        Raises `TypeError` or `ValueError` unless `compute` is one positive and finite number.
        """
        require_budget(compute)
        n, d, loss = map(float, compute_optima(self.constants, compute))
        return Optimum(compute, n, d, loss)


#: The law of runs that do not identify a law; it predicts nan.
UNKNOWN_LAW = Law(math.nan, math.nan, math.nan, math.nan, math.nan)


def compute_loss(constants: Array, parameters: ArrayLike, tokens: ArrayLike) -> Array:
    """Return L(N, D) for constants of shape (…, 5)."""
    e, a, b, alpha, beta = np.moveaxis(constants, -1, 0)
    loss: Array = e + a * parameters**-alpha + b * tokens**-beta
    return loss


def compute_optima(constants: Array, compute: float) -> Array:
    """Return N, D and loss of the optima, (3, …), for constants of shape (…, 5).

    See Note [Closed-form optimum].
    """
    _, a, b, alpha, beta = np.moveaxis(constants, -1, 0)
    log_product = math.log(compute / FLOPS_PER_PARAMETER_TOKEN)
    log_n = (np.log(alpha * a / (beta * b)) + beta * log_product) / (alpha + beta)
    # An N or D that would overflow float64 is limited to e^700.
    log_n = np.clip(log_n, log_product - 700, 700)
    n = np.exp(log_n)
    d = np.exp(log_product - log_n)
    return np.stack([n, d, compute_loss(constants, n, d)])

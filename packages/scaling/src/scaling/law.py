"""The law L(N, D) = E + A / N^alpha + B / D^beta, and what it says about spending compute.

Notable: the optimum under C = 6 N D is a closed form (Hoffmann et al. 2022, equation 4);
with tokens to be served after training it is the root of one monotone function.
"""

import math
import reprlib
from dataclasses import dataclass
from numbers import Real
from typing import overload

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from scaling.equality import ComparesArrays
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array

CONSTANTS = ("E", "A", "B", "alpha", "beta")

FLOPS_PER_PARAMETER_SERVED_TOKEN = 2.0
"""A forward pass alone."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval; it holds the truth in `level` of all repetitions."""

    low: float
    high: float
    level: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def require_numbers(**named: object) -> None:
    """TypeError unless each is one number: text, None, truth values and arrays are not."""
    for name, value in named.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} = {reprlib.repr(value)}: must be one number")


def check_level(level: float) -> None:
    """ValueError unless it is the level of a confidence interval."""
    if not 0 < level < 1:
        raise ValueError(f"level = {level}: must lie between 0 and 1")


@dataclass(frozen=True, eq=False)
class Optimum(ComparesArrays):
    """The best model for a compute budget in FLOPs; intervals where it was inferred from runs."""

    compute: float
    parameters: float
    tokens: float
    loss: float
    """nan from an IsoFLOP fit, which does not model it."""
    intervals: dict[str, Interval] | None = None
    """By field name. None: the law was given, not fitted, so there is nothing to doubt."""


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats; N parameters, D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("A", "B", "alpha", "beta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value}: must be positive, or no model is optimal")
        if not (math.isfinite(self.E) and self.E >= 0):
            raise ValueError(f"E = {self.E}: the irreducible loss cannot be negative")

    @property
    def constants(self) -> Array:
        """(5,): E, A, B, alpha, beta."""
        return np.array([self.E, self.A, self.B, self.alpha, self.beta])

    @overload
    def predict(self, parameters: float, tokens: float) -> float: ...
    @overload
    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> Array: ...
    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> Array | float:
        """The loss in nats of a model of N parameters after D tokens; broadcasts."""
        n, d = np.asarray(parameters, np.float64), np.asarray(tokens, np.float64)
        if not ((n > 0).all() and (d > 0).all()):
            raise ValueError("parameters and tokens must be positive")
        loss = loss_of(self.constants, n, d)
        return loss if loss.ndim else float(loss)

    @property
    def exponent(self) -> float:
        """beta / (alpha + beta): N_opt grows as C to this power, D_opt as C to one minus it."""
        return self.beta / (self.alpha + self.beta)

    @property
    def balance(self) -> float:
        """G of N_opt = G (C / 6)^exponent."""
        return float(optima_of(self.constants, FLOPS_PER_PARAMETER_TOKEN)[0])

    def optimal(self, compute: float, *, inference_tokens: float = 0.0) -> Optimum:
        """The N and D of least loss that `compute` FLOPs can train, 6 N D, and serve, 2 N T.

        `inference_tokens` is T, the tokens that the model will serve in its life: the more, the
        smaller the model and the longer its training (Sardana et al. 2024).
        """
        require_numbers(compute=compute, inference_tokens=inference_tokens)
        if not (0 < compute < math.inf and 0 <= inference_tokens < math.inf):
            raise ValueError(
                f"compute = {compute}, inference_tokens = {inference_tokens}: the first must be "
                "positive, the second not negative, both finite"
            )
        pairs = compute / FLOPS_PER_PARAMETER_TOKEN
        n = float(optima_of(self.constants, compute)[0])
        served = inference_tokens * FLOPS_PER_PARAMETER_SERVED_TOKEN / FLOPS_PER_PARAMETER_TOKEN
        if served:
            # With D = pairs / N - served, dL/dlogN = 0 is one monotone equation in log N.
            def slope(log_n: float) -> float:
                d = pairs * math.exp(-log_n) - served
                fall = math.log(self.alpha * self.A) - self.alpha * log_n
                rise = math.log(self.beta * self.B * (d + served)) - (self.beta + 1) * math.log(d)
                return rise - fall

            largest = math.log(pairs / served)
            low, high = min(math.log(n), largest) - 60, min(math.log(n), largest - 1e-12)
            n = math.exp(brentq(slope, low, high, xtol=1e-14))
        d = pairs / n - served
        return Optimum(compute, n, d, self.predict(n, d))

    def cheapest(self, loss: float, *, inference_tokens: float = 0.0) -> Optimum:
        """The N and D that reach `loss` for the fewest FLOPs, training and serving together."""
        if not loss > self.E:
            raise ValueError(f"loss {loss} is not above the irreducible loss E = {self.E}")

        def excess(log_compute: float) -> float:
            best = self.optimal(math.exp(log_compute), inference_tokens=inference_tokens)
            return math.log(best.loss - self.E) - math.log(loss - self.E)

        low, high = 0.0, 60.0
        while excess(high) > 0:
            high *= 2
            if high > 600:
                raise ValueError(f"loss {loss} needs more than e^600 FLOPs; E = {self.E}")
        compute = math.exp(brentq(excess, low, high, xtol=1e-12))
        return self.optimal(compute, inference_tokens=inference_tokens)


def loss_of(constants: Array, parameters: ArrayLike, tokens: ArrayLike) -> Array:
    """L(N, D) of (…, 5) constants: the formula stands here."""
    e, a, b, alpha, beta = np.moveaxis(constants, -1, 0)
    loss: Array = e + a * parameters**-alpha + b * tokens**-beta
    return loss


def optima_of(constants: Array, compute: float) -> Array:
    """(3, …) N, D and loss of the optima: the closed form stands here.

    N = G (C / 6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta)).
    """
    _, a, b, alpha, beta = np.moveaxis(constants, -1, 0)
    log_pairs = math.log(compute / FLOPS_PER_PARAMETER_TOKEN)
    log_n = (np.log(alpha * a / (beta * b)) + beta * log_pairs) / (alpha + beta)
    # A law whose optimum no float64 holds is as far out as one that just fits.
    log_n = np.clip(log_n, log_pairs - 700, 700)
    n, d = np.exp(log_n), np.exp(log_pairs - log_n)
    return np.stack([n, d, loss_of(constants, n, d)])

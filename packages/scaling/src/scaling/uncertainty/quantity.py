"""What can be asked of a law, as functions of many laws at once: one form for all intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scaling.law import CONSTANTS, Law
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN, Array

FIELDS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class Quantity:
    """A number that a law implies: `of` takes (laws, 5) constants to (laws,)."""

    name: str
    of: Callable[[Array], Array]


def quantity(name: str) -> Quantity:
    """A constant by its name, or "exponent", that of N_opt in C."""
    if name == "exponent":
        return Quantity(name, lambda c: c[:, 4] / (c[:, 3] + c[:, 4]))
    if name not in CONSTANTS:
        raise ValueError(f"{name!r} is not one of {CONSTANTS} or 'exponent'")
    column = CONSTANTS.index(name)
    return Quantity(name, lambda c: c[:, column])


def optimum(field: str, compute: float, *, inference_tokens: float = 0.0) -> Quantity:
    """The "parameters", "tokens" or "loss" of the best model for `compute` FLOPs."""
    if field not in FIELDS:
        raise ValueError(f"{field!r} is not one of {FIELDS}")
    row = FIELDS.index(field)
    name = f"best {field} at {compute:.3g} FLOPs"
    return Quantity(name, lambda c: optima(c, compute, inference_tokens)[row])


def loss_at(parameters: float, tokens: float) -> Quantity:
    """The loss of one model."""

    def of(constants: Array) -> Array:
        e, a, b, alpha, beta = constants.T
        value: Array = e + a * parameters**-alpha + b * tokens**-beta
        return value

    return Quantity(f"loss at N = {parameters:.3g}, D = {tokens:.3g}", of)


def optima(constants: Array, compute: float, inference_tokens: float = 0.0) -> Array:
    """(3, laws): N, D and loss of the optimum of each of (laws, 5)."""
    if inference_tokens:
        laws = (Law(*map(float, row)) for row in constants)
        best = [law.optimal(compute, inference_tokens=inference_tokens) for law in laws]
        return np.array([(o.parameters, o.tokens, o.loss) for o in best]).T
    e, a, b, alpha, beta = constants.T
    log_pairs = np.log(compute / FLOPS_PER_PARAMETER_TOKEN)
    log_n = (np.log(alpha * a / (beta * b)) + beta * log_pairs) / (alpha + beta)
    # A resample whose optimum no float64 holds is as far out as one that just fits.
    log_n = np.clip(log_n, log_pairs - 700, 700)
    log_d = log_pairs - log_n
    loss = e + a * np.exp(-alpha * log_n) + b * np.exp(-beta * log_d)
    return np.stack([np.exp(log_n), np.exp(log_d), loss])

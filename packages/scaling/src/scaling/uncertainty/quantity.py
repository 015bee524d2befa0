"""What can be asked of a law, as functions of many laws at once: one form for all intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from scaling.law import CONSTANTS, Law, loss_of, optima_of, require_numbers
from scaling.runs import Array

FIELDS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class Quantity:
    """A number that a law implies: `of` takes (laws, 5) constants to (laws,)."""

    name: str
    of: Callable[[Array], Array]


def quantity(name: str) -> Quantity:
    """Return the quantity of a constant, or "exponent", that of N_opt in C."""
    if name == "exponent":
        return Quantity(name, _exponent)
    if name not in CONSTANTS:
        raise ValueError(f"{name!r} is not one of {CONSTANTS} or 'exponent'")
    return Quantity(name, partial(_constant, CONSTANTS.index(name)))


def optimum(field: str, compute: float, *, inference_tokens: float = 0.0) -> Quantity:
    """The "parameters", "tokens" or "loss" of the best model for `compute` FLOPs."""
    if field not in FIELDS:
        raise ValueError(f"{field!r} is not one of {FIELDS}")
    require_numbers(compute=compute, inference_tokens=inference_tokens)
    if not 0 < compute < math.inf:
        raise ValueError(f"compute = {compute}: must be positive and finite")
    row, name = FIELDS.index(field), f"best {field} at {compute:.3g} FLOPs"
    return Quantity(name, partial(_optimum, row, compute, inference_tokens))


def loss_at(parameters: float, tokens: float) -> Quantity:
    """The loss of one model."""
    require_numbers(parameters=parameters, tokens=tokens)
    if not (parameters > 0 and tokens > 0):
        raise ValueError(f"parameters = {parameters}, tokens = {tokens}: must be positive")
    told = f"loss at N = {parameters:.3g}, D = {tokens:.3g}"
    return Quantity(told, partial(_loss, parameters, tokens))


def optima(constants: Array, compute: float, inference_tokens: float = 0.0) -> Array:
    """(3, laws): N, D and loss of the optimum of each of (laws, 5)."""
    if not inference_tokens:
        return optima_of(constants, compute)
    laws = (Law(*map(float, row)) for row in constants)
    best = [law.optimal(compute, inference_tokens=inference_tokens) for law in laws]
    return np.array([(o.parameters, o.tokens, o.loss) for o in best]).T


# Functions of this module rather than lambdas, so that a quantity can be pickled.


def _exponent(constants: Array) -> Array:
    exponent: Array = constants[:, 4] / (constants[:, 3] + constants[:, 4])
    return exponent


def _constant(column: int, constants: Array) -> Array:
    return constants[:, column]


def _optimum(row: int, compute: float, inference_tokens: float, constants: Array) -> Array:
    best: Array = optima(constants, compute, inference_tokens)[row]
    return best


def _loss(parameters: float, tokens: float, constants: Array) -> Array:
    return loss_of(constants, parameters, tokens)

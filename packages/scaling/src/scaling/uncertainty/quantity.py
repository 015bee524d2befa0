"""Quantities that a law implies, evaluated for many laws at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from scaling.law import CONSTANTS, loss_of, optima_of, require_budget, require_numbers
from scaling.units import Array

FIELDS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class Quantity:
    """A number that a law implies, such as the best size at some compute."""

    name: str
    #: A function from constants (laws, 5) to values (laws,).
    evaluate: Callable[[Array], Array]


def named_quantity(name: str) -> Quantity:
    """Return a constant as a quantity; "exponent" is the exponent of N_opt in C."""
    if name == "exponent":
        return Quantity(name, _exponent)
    if name not in CONSTANTS:
        raise ValueError(f"expected one of {CONSTANTS} or 'exponent', got {name!r}")
    return Quantity(name, partial(_constant, CONSTANTS.index(name)))


def optimum(field: str, compute: float) -> Quantity:
    """Return "parameters", "tokens" or "loss" of the best model at `compute` as a quantity."""
    if field not in FIELDS:
        raise ValueError(f"expected one of {FIELDS}, got {field!r}")
    require_budget(compute)
    row = FIELDS.index(field)
    name = f"best {field} at {compute:.3g} FLOPs"
    return Quantity(name, partial(_optimum, row, compute))


def loss_at(parameters: float, tokens: float) -> Quantity:
    """Return the loss of one model as a quantity; raise an error for invalid numbers."""
    require_numbers(parameters=parameters, tokens=tokens)
    if not (0 < parameters < math.inf and 0 < tokens < math.inf):
        raise ValueError(
            f"expected positive and finite numbers, got parameters = {parameters}, tokens ="
            f" {tokens}"
        )
    name = f"loss at N = {parameters:.3g}, D = {tokens:.3g}"
    return Quantity(name, partial(_loss, parameters, tokens))


# Quantities are built from functions of this module rather than lambdas, so they can be pickled.


def _exponent(constants: Array) -> Array:
    exponent: Array = constants[:, 4] / (constants[:, 3] + constants[:, 4])
    return exponent


def _constant(column: int, constants: Array) -> Array:
    return constants[:, column]


def _optimum(row: int, compute: float, constants: Array) -> Array:
    best: Array = optima_of(constants, compute)[row]
    return best


def _loss(parameters: float, tokens: float, constants: Array) -> Array:
    return loss_of(constants, parameters, tokens)

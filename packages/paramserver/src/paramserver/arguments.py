"""Checks of arguments, whose errors name the argument and the values that it accepts."""

import operator
from typing import SupportsFloat


def require_integer(name: str, value: object, minimum: int) -> int:
    """Return an argument as an int; integers of numpy and torch are accepted.

    Raises `TypeError` for another type, and `ValueError` for an integer below `minimum`.
    """
    try:
        integer = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        integer = None
    if integer is None:
        raise TypeError(f"expected {name} to be an integer >= {minimum}, got {value!r}")
    if integer < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {integer}")
    return integer


def require_number(name: str, value: object) -> float:
    """Return an argument as a float, also from numpy and torch; raise `TypeError` otherwise."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    return float(value)


def require_timeout(timeout: object) -> float:
    """Return a timeout in seconds as a float; raise `ValueError` unless it is at least 0."""
    seconds = require_number("timeout in seconds", timeout)
    if not seconds >= 0:
        raise ValueError(f"expected timeout in seconds >= 0, got {timeout!r}")
    return seconds

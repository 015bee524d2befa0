"""Checks of arguments, whose errors name the argument and the values that it accepts."""

import operator
from numbers import Real


def require_integer(name: str, value: object, minimum: int) -> int:
    """Return an argument as an int; integers of numpy and torch are accepted.

    Raises `TypeError` for another type, and `ValueError` for an integer below `minimum`.
    """
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"expected {name} to be an integer >= {minimum}, got {value!r}") from None
    if integer < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {integer}")
    return integer


def require_number(name: str, value: object) -> None:
    """Raise `TypeError` unless an argument is a real number."""
    if not isinstance(value, Real):
        raise TypeError(f"expected {name} to be a number, got {value!r}")


def require_timeout(timeout: float) -> None:
    """Raise `TypeError` or `ValueError` unless a timeout is a number of seconds of at least 0."""
    require_number("timeout in seconds", timeout)
    if not timeout >= 0:
        raise ValueError(f"expected timeout in seconds >= 0, got {timeout!r}")

"""The checks that every number and every name passes where it enters, with one wording for all."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

MOST_LAYERS = 100_000
"""Layers are listed one by one; what asks for more of them is a mistake."""
P = ParamSpec("P")
R = TypeVar("R")


def whole(name: str, value: object, *, least: float = 1, most: float = math.inf) -> int:
    """A whole number from `least` to `most`; those of numpy and torch are taken, booleans not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    if number > most:
        raise ValueError(f"{name} is {number}; it must be at most {most:,}")
    return number


def number(
    name: str, value: object, *, least: float = 0.0, most: float = math.inf, open: bool = True
) -> float:
    """A finite number above `least` (or at it, if not `open`) and at most `most`."""
    if isinstance(value, bool | str | None) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    found = float(value)
    bound = f"lie above {least:g}" if open else f"be at least {least:g}"
    bound += f" and at most at {most:g}" if most < math.inf else ""
    if not math.isfinite(found) or found > most or found < least or (open and found == least):
        raise ValueError(f"{name} is {value}; it must {bound}")
    return found


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return value


def fields(
    kind: Any, given: Mapping[str, object], prefix: str = "", /, **about: Any
) -> dict[str, int]:
    """Fields of a dataclass by their types: whole numbers from 1 (from 0 where that is what they
    are if not given), numbers above 0, switches; returns the whole ones.

    `about` has the least of a number where it is another, or the names to choose from.
    """
    found = {}
    for field in dataclasses.fields(kind):
        if field.name not in given:
            continue
        name, value, rule = prefix + field.name, given[field.name], about.get(field.name)
        type_of = getattr(field.type, "__name__", field.type)
        if type_of == "int":
            least = rule if isinstance(rule, int) else int(field.default != 0)
            most = MOST_LAYERS if name == "layers" else math.inf
            found[name] = whole(name, value, least=least, most=most)
        elif type_of == "float":
            number(name, value, open=rule is None)
        elif type_of == "bool":
            flag(name, value)
        if isinstance(rule, tuple):
            choice(name, value, rule)
    return found


def instance(name: str, value: object, kind: type, how: str) -> None:
    """Of that class; `how` says what to give."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.60}; it must be {how}")


def choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """One of `allowed`; the message has the nearest of them where one is near."""
    known = tuple(allowed)
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ValueError(f"{name} is {value!r}; it must be one of {listed}{nearest(value, known)}")


def nearest(value: object, known: Iterable[object]) -> str:
    """`; did you mean ...?` where a known name is close to a string, else nothing."""
    from difflib import get_close_matches

    names = {str(name).lower(): str(name) for name in known}
    found = get_close_matches(str(value).lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def positive_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Every number that the function is given must be finite and above zero."""
    names = function.__code__.co_varnames

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, int | float):
                number(name, value)
        return function(*args, **kwargs)

    return checked

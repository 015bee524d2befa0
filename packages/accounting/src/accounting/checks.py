"""The checks that every number and every name passes where it enters, with one wording for all."""

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

MOST_LAYERS = 100_000
"""Layers are listed one by one; what asks for more of them is a mistake."""
P = ParamSpec("P")
R = TypeVar("R")


def entry(*more: str, **about: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check what a function is given, before it runs, by the types that it declares.

    A whole number is at least 1 (0 where that is its default), a number above 0, a switch True or
    False, a `Literal` one of its names. `about` has the least of a number where it is another, or
    the names to choose from. `more` are keywords that the function hands on. What it does not have
    is a `TypeError` with the nearest name.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        order = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        handed_on = any(p.kind is p.VAR_KEYWORD for p in parameters) and not more
        scope: dict[str, Any] = getattr(function, "__globals__", {})
        rules = {}
        for p in named:
            kind = p.annotation
            if isinstance(kind, str) and isinstance(scope.get(kind), type):
                kind = scope[kind]
            rule = get_args(kind) if get_origin(kind) is Literal else about.get(p.name)
            rules[p.name] = (kind, p.default, rule)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in rules and name not in more and not handed_on:
                    known = (*rules, *more)
                    raise TypeError(
                        f"{name!r} is no argument here; there are {', '.join(known)}"
                        f"{nearest(name, known)}"
                    )
            first = [
                _typed(name, value, *rules[name]) for name, value in zip(order, args, strict=False)
            ]
            rest = {
                name: _typed(name, value, *rules[name]) if name in rules else value
                for name, value in kwargs.items()
            }
            return function(*first, *args[len(first) :], **rest)  # type: ignore[arg-type]

        return checked

    return wrap


def named(kind: type[R]) -> type[R]:
    """A dataclass that answers a field that it does not have with the nearest that it has.

    `derived_sizes` of the class are those that are worked out where they are not given: an explicit
    0 is refused, unless there are no heads.
    """
    made: Any = kind.__init__

    @wraps(made)
    def init(self: object, *args: Any, **kwargs: Any) -> None:
        known = kind.__dataclass_fields__  # type: ignore[attr-defined]
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{name!r} is no field of {kind.__name__}; there are {', '.join(known)}"
                    f"{nearest(name, known)}"
                )
        for name in getattr(kind, "derived_sizes", ()):
            if name in kwargs and kwargs[name] == 0 and kwargs.get("heads") != 0:
                raise ValueError(f"{name} is 0; it must be at least 1, or left out to be derived")
        made(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


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
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
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
    """Fields of a dataclass by their types, as `entry` has arguments; returns the whole ones."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.name in given:
            name, value, rule = prefix + field.name, given[field.name], about.get(field.name)
            value = _typed(name, value, field.type, field.default, rule)
            if field.type in (int, "int"):
                found[name] = value
    return found


def layers(name: str, listed: object, most: int = MOST_LAYERS) -> tuple[int, ...]:
    """Layers, each once and in order, of which there are `most`."""
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise TypeError(f"{name} is {listed!r}; it must list layers, from 0 on")
    found = tuple(sorted({whole(name, layer, least=0) for layer in listed}))
    if found and found[-1] >= most:
        raise ValueError(f"{name} names layer {found[-1]}; there are {most}, from 0 on")
    return found


def instance(name: str, value: object, kind: type | tuple[type, ...], how: str) -> None:
    """Of that class; `how` says what to give."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.60}; it must be {how}")


def choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """One of `allowed`; the message has the nearest of them where one is near."""
    known = tuple(allowed)
    # 1 is no True, and True no 1.
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        listed = ", ".join(map(str, known))
        raise ValueError(f"{name} is {value!r}; it must be one of {listed}{nearest(value, known)}")


def nearest(value: object, known: Iterable[object]) -> str:
    """`; did you mean ...?` where a known name is close to a string, else nothing."""
    from difflib import get_close_matches

    names = {str(name).lower(): str(name) for name in known}
    found = get_close_matches(str(value).lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def _typed(name: str, value: Any, kind: Any, default: object, rule: Any) -> Any:
    """A value of the type that its field or argument declares; whole numbers as Python's own."""
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if text.endswith(" | None"):
        if value is None:
            return None
        text = text.removesuffix(" | None")
    if text == "int":
        least = rule if isinstance(rule, int) else 0 if rule else int(default != 0)
        most = MOST_LAYERS if name == "layers" else math.inf
        value = whole(name, value, least=least, most=most)
    elif text == "float" or (text == "Quantity" and not hasattr(value, "low")):
        number(name, value, open=rule is None and default != 0)
    elif text == "bool":
        flag(name, value)
    elif text == "str" and not isinstance(rule, tuple) and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a name")
    elif text in ("Shape", "Transformer") and isinstance(kind, type):
        instance(name, value, kind, "a Transformer")
    if isinstance(rule, tuple):
        choice(name, value, rule)
    return value

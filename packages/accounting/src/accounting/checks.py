"""Checks of arguments and fields, with messages of one form.

Each message names the expected and the received value: `expected 0 < utilization <= 1, got 1.4`.
"""

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

#: Maximum number of layers. Layers are listed individually, so a larger number is refused.
MOST_LAYERS = 100_000
P = ParamSpec("P")
R = TypeVar("R")


class Rule(NamedTuple):
    """The declared type and default of an argument, and a limit on its values."""

    kind: Any
    default: object
    #: The smallest value of a number, a tuple of allowed values, or None.
    limit: Any


def validate(**limits: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of each call against the declared types.

    `limits` maps an argument to its smallest value (for a float, only 0) or to a tuple of its
    allowed values. Without a limit, an integer must be at least 1, or at least 0 if its default is
    0. A float must be finite and greater than 0, or at least 0 if its default is 0. A bool must be
    True or False, and a `Literal` must be one of its values. Integers of other libraries become
    Python integers. Keywords that `**kwargs` accepts are not checked.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        rules, order = _collect_rules(function, limits)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            named = zip(order, args, strict=False)
            positional = [_check_value(name, value, rules[name]) for name, value in named]
            keywords: dict[str, Any] = dict(kwargs)
            for name in rules.keys() & kwargs.keys():
                keywords[name] = _check_value(name, kwargs[name], rules[name])
            return function(*positional, *args[len(order) :], **keywords)  # type: ignore[arg-type]

        return checked

    return decorate


def _collect_rules(
    function: Callable[..., Any], limits: Mapping[str, Any]
) -> tuple[dict[str, Rule], list[str]]:
    """Return the rule of each named argument, and the names of positional arguments in order."""
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    rules = {}
    order = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = parameter.annotation
        if isinstance(kind, str) and isinstance(scope.get(kind), type):
            kind = scope[kind]
        limit = get_args(kind) if get_origin(kind) is Literal else limits.get(parameter.name)
        rules[parameter.name] = Rule(kind, parameter.default, limit)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            order.append(parameter.name)
    return rules, order


def require_integer(
    name: str, value: object, *, minimum: float = 1, maximum: float = math.inf
) -> int:
    """Return an integer, also of numpy or torch, as an int from `minimum` to `maximum`.

    Raises `TypeError` for a bool or another type, and `ValueError` for an integer out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        # An instance of a subclass of int is returned unchanged.
        integer = value if isinstance(value, int) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"expected {name} to be an integer, got {value!r}") from None
    if integer < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {integer}")
    if integer > maximum:
        raise ValueError(f"expected {name} <= {maximum:,}, got {integer}")
    return integer


def require_number(
    name: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf, open: bool = True
) -> float:
    """Return a number as a float from `minimum` to `maximum`; `open` excludes the minimum.

    Raises `TypeError` unless it is a number, and `ValueError` if it is infinite or out of range.
    """
    if isinstance(value, bool | str | None) or not hasattr(value, "__float__"):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    below = converted <= minimum if open else converted < minimum
    if not math.isfinite(converted) or converted > maximum or below:
        lower = f"{minimum:g} < {name}" if open else f"{minimum:g} <= {name}"
        upper = f" <= {maximum:g}" if maximum < math.inf else " < inf"
        raise ValueError(f"expected {lower}{upper}, got {value}")
    return converted


def validate_fields(
    kind: Any, values: Mapping[str, object], prefix: str = "", /, **limits: Any
) -> dict[str, int]:
    """Check `values` of a dataclass as `validate` checks arguments, and return the integer fields.

    Integers of numpy and torch are returned as Python integers. `prefix` precedes the names of
    fields in messages.
    """
    integers = {}
    for field in dataclasses.fields(kind):
        if field.name not in values:
            continue
        name = prefix + field.name
        rule = Rule(field.type, field.default, limits.get(field.name))
        value = _check_value(name, values[field.name], rule)
        if field.type in (int, "int"):
            integers[field.name] = value
    return integers


def convert_fields(record: Any, prefix: str = "", /, **limits: Any) -> None:
    """Check the fields of a frozen dataclass, and store integers of numpy or torch as ints."""
    for name, value in validate_fields(type(record), vars(record), prefix, **limits).items():
        object.__setattr__(record, name, value)


def require_layers(name: str, indices: object, maximum: int = MOST_LAYERS) -> tuple[int, ...]:
    """Return sorted distinct layer indices.

    Raises `TypeError` unless `indices` are integers, and `ValueError` unless
    0 <= index < `maximum`.
    """
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise TypeError(f"expected {name} to list layers, counted from 0, got {indices!r}")
    ordered = tuple(sorted({require_integer(name, layer, minimum=0) for layer in indices}))
    if ordered and ordered[-1] >= maximum:
        raise ValueError(f"expected layers of {name} from 0 to {maximum - 1}, got {ordered[-1]}")
    return ordered


def require_instance(
    name: str, value: object, kind: type | tuple[type, ...], expected: str
) -> None:
    """Raise `TypeError` if a value is not of a class; `expected` describes the class."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {name} to be {expected}, got {value!r:.60}")


def require_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` that lists the allowed values if a value is not one of them."""
    known = tuple(allowed)
    for option in known:
        # 1 == True in Python, but neither is accepted in place of the other.
        if value is option or (type(value) is type(option) and value == option):
            return
    listed = ", ".join(map(str, known))
    raise ValueError(f"expected {name} to be one of {listed}, got {value!r}")


def _check_value(name: str, value: Any, rule: Rule) -> Any:
    """Check a value against its rule and return it, with other libraries' integers as ints."""
    kind = rule.kind
    declared = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if declared.endswith(" | None"):
        if value is None:
            return None
        declared = declared.removesuffix(" | None")
    if declared == "int":
        maximum = MOST_LAYERS if name == "layers" else math.inf
        value = require_integer(name, value, minimum=_get_minimum(rule), maximum=maximum)
    elif declared == "float":
        converted = require_number(name, value, open=rule.limit is None and rule.default != 0)
        if not isinstance(value, int | float):
            value = converted
    elif declared == "bool":
        require_instance(name, value, bool, "True or False")
    elif declared == "str" and not isinstance(rule.limit, tuple):
        require_instance(name, value, str, "a name")
    elif declared == "Transformer" and isinstance(kind, type):
        require_instance(name, value, kind, "a Transformer")
    if isinstance(rule.limit, tuple):
        require_choice(name, value, rule.limit)
    return value


def _get_minimum(rule: Rule) -> int:
    """Return the smallest integer that a rule allows."""
    if isinstance(rule.limit, int):
        return rule.limit
    if rule.limit or rule.default == 0:
        return 0
    return 1

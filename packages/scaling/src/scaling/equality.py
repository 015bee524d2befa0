"""Equality and printing of dataclasses that contain arrays."""

import reprlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

#: Largest number of lines in a repr after the class name.
LONGEST = 9


class ComparesArrays:
    """Base class of dataclasses whose `==` compares arrays by value; nan equals nan.

    The repr has at most ten lines. Declare subclasses with `eq=False, repr=False`, because the
    comparison that `dataclass` generates raises an error for arrays.
    """

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        lines = [f"{name} = {_format_short(value)}" for name, value in named]
        if len(lines) > LONGEST:
            lines[LONGEST - 1 :] = [f"and {', '.join(name for name, _ in named[LONGEST - 1 :])}"]
        return "\n  ".join([type(self).__name__, *lines])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _have_equal_fields(self, other)


def _have_equal_fields(a: Any, b: Any) -> bool:
    return all(_is_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        first = np.asarray(a)
        second = np.asarray(b)
        is_float = first.dtype.kind == second.dtype.kind == "f"
        return bool(np.array_equal(first, second, equal_nan=is_float))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return _have_equal_fields(a, b)
    return bool(a == b) or (a != a and b != b)


def _format_short(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isfinite(value).any():
        return f"{value.shape} from {np.nanmin(value):.4g} to {np.nanmax(value):.4g}"
    if isinstance(value, ComparesArrays):
        return type(value).__name__ + (f" of {len(value)}" if hasattr(value, "__len__") else "")
    if isinstance(value, tuple | list) and any(isinstance(v, ComparesArrays) for v in value):
        return f"{len(value)} {type(value[0]).__name__}s"
    text = repr(value) if is_dataclass(value) else reprlib.repr(value)
    text = text.replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}…"

"""Equality of dataclasses that contain arrays."""

from dataclasses import fields
from typing import Any

import numpy as np


class ComparesArrays:
    """Base class whose `==` compares fields, arrays elementwise; nan equals nan.

    Subclasses are declared with `eq=False`, because the generated comparison raises for arrays.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        first = np.asarray(a)
        second = np.asarray(b)
        is_float = first.dtype.kind == second.dtype.kind == "f"
        return bool(np.array_equal(first, second, equal_nan=is_float))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (a != a and b != b)

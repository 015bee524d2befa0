"""TOML tables whose entries may be formulas over named values."""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

Table = dict[str, Any]
_ALLOWED = (math.ceil, int, len, max, min, range, sum)
#: The only functions that formulas can call.
FUNCTIONS: Table = {function.__name__: function for function in _ALLOWED}


def read_tables(name: str) -> Table:
    """Return the content of a TOML file; `name` is its path in this package."""
    return tomllib.loads((Path(__file__).parents[1] / name).read_text(encoding="utf-8"))


def evaluate(entry: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of a formula, or a number or a bool unchanged.

    Names in `names` take precedence over the functions in `FUNCTIONS`.
    """
    return eval(_compile(entry), _GLOBALS, names) if isinstance(entry, str) else entry


def list_names(text: str) -> tuple[str, ...]:
    """Return the names in a formula, and the texts in it, such as the arguments of `get`."""
    code = _compile(text)
    return (*code.co_names, *(value for value in code.co_consts if isinstance(value, str)))


_GLOBALS: Table = {"__builtins__": FUNCTIONS}


@cache
def _compile(text: str) -> CodeType:
    return compile(text, text, "eval")

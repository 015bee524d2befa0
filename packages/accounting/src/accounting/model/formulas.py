"""TOML tables whose entries may be formulas over named values."""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

Table = dict[str, Any]
FUNCTIONS: Table = {
    **{"ceil": math.ceil, "int": int, "len": len, "sum": sum, "range": range},
    **{"max": max, "min": min},
}


def tables(name: str) -> Table:
    """Return the content of a TOML file of this package."""
    return tomllib.loads((Path(__file__).parents[1] / name).read_text(encoding="utf-8"))


def value(entry: Any, names: Mapping[str, Any]) -> Any:
    """Evaluate a formula; a number or a bool is returned as it is.

    Names in `names` take precedence over the functions.
    """
    return eval(_compiled(entry), _GLOBALS, names) if isinstance(entry, str) else entry


_GLOBALS: Table = {"__builtins__": FUNCTIONS}


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, text, "eval")

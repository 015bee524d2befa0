"""Cells to numbers: 7B, 1.4T, 49,893,420, 3,2157, 6x10^18, 300B tokens.

Notable: whether a comma parts thousands or begins decimals is asked of the whole table, since one
cell (2,859) cannot say; where its cells contradict each other both are named.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.tables.names import FLOPS, PETAFLOP_DAY, PREFIXES, UNITS

BLANK = {"", "na", "n/a", "nan", "none", "null", "-", "--", "?", "nil", "#n/a", "undefined"}

NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d[\d,._'\u2019\u00a0\u202f ]*|\.\d+))"
    r"(?:\s*(?:[x*\u00d7\u00b7]\s*10\s*(?:\^|\*\*)?\s*|e)(?P<power>[-+]?\d+))?"
    r"\s*(?P<unit>[a-z][a-z/ .-]*)?",
    re.IGNORECASE,
)
SEPARATORS = re.compile(r"(?<=\d)[_'\u2019\u00a0\u202f ](?=\d{3})")
DIGITS = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")


def blank(cell: Any) -> bool:
    """Whether nothing was measured there."""
    if cell is None or cell is np.ma.masked:
        return True
    if isinstance(cell, str):
        return cell.strip().lower() in BLANK
    try:
        return math.isnan(cell)
    except TypeError:
        return str(cell) in ("<NA>", "NaT")


def decimal_comma(columns: Iterable[tuple[str, Sequence[tuple[int, Any]]]]) -> bool:
    """Whether the comma begins decimals in a table, of (name, (row, cell)…) of its columns."""
    comma, point = "", ""
    for name, cells in columns:
        for row, cell in cells:
            if not isinstance(cell, str) or not (found := NUMBER.match(cell.strip())):
                continue
            digits, where = found["digits"].strip(), f"column {name!r}, row {row}: {cell!r}"
            grouped = re.fullmatch(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+", digits)
            dotted = re.fullmatch(r"[-+]?[1-9]\d{0,2}(?:\.\d{3})+", digits)
            if "," in digits and "." in digits:
                comma, point = (
                    (where, point) if digits.rfind(",") > digits.rfind(".") else (comma, where)
                )
            elif digits.count(",") == 1 and (not grouped or found["power"]):
                comma = where
            elif digits.count(".") == 1 and (not dotted or found["power"]):
                point = where
            elif digits.count(",") > 1:
                point = point or where
            elif digits.count(".") > 1:
                comma = comma or where
    if comma and point:
        raise ValueError(
            f"the decimal mark is a comma in {comma} and a point in {point}: write one of them"
        )
    return bool(comma)


def number(cell: Any, comma: bool, thousands: bool = True, unit: float = 1.0) -> float:
    """A cell as a float; nan where it is none. A suffix multiplies, or `unit` where there is none.

    `comma`: the comma begins decimals. `thousands` false: one mark before three digits is decimal
    even so, as in a loss of 2,859.
    """
    if not isinstance(cell, str):
        try:
            return float(cell) * unit
        except (TypeError, ValueError):
            return math.nan
    text = cell.strip().lstrip("$~\u2248").strip()
    found = NUMBER.fullmatch(text)
    if not found:
        return float(text) if text.lower() in ("inf", "-inf", "infinity") else math.nan
    said = _unit(found["unit"])
    digits = SEPARATORS.sub("", found["digits"].strip())
    mark, other = (",", ".") if comma else (".", ",")
    if other in digits:
        if not thousands and re.fullmatch(rf"[-+]?\d{{1,2}}\{other}\d+", digits):
            digits = digits.replace(other, mark)
        elif re.fullmatch(rf"[-+]?\d{{1,3}}(?:\{other}\d{{3}})+(?:\{mark}\d*)?", digits):
            digits = digits.replace(other, "")
    digits = digits.replace(mark, ".")
    if not DIGITS.fullmatch(digits) or math.isnan(said):
        return math.nan
    return float(f"{digits}e{found['power'] or 0}") * (said or unit)


def _unit(text: str | None) -> float:
    """What a suffix multiplies by; nan if it is none, 0 if it names no unit."""
    words = re.sub(r"[ .]", "", (text or "").lower())
    words = re.sub("(?:tokens?|param(?:eter)?s?)$", "", words)
    if not words or words in ("flop", "flops"):
        return 0.0
    if words in ("nat", "nats", "bit", "bits"):
        return 1.0 if words.startswith("n") else math.log(2)
    if words in UNITS:
        return UNITS[words]
    if re.fullmatch("(?:pf|pflops?|petaflops?)(?:/?s)?-?days?", words):
        return PETAFLOP_DAY
    if scaled := FLOPS.fullmatch(words):
        return PREFIXES[scaled[1]]
    return math.nan


def numbers(
    cells: Sequence[Any], comma: bool, thousands: bool = True, unit: float = 1.0
) -> NDArray[np.float64]:
    """All cells of a column."""
    return np.array([number(cell, comma, thousands, unit) for cell in cells], np.float64)


def list_some(items: Iterable[object]) -> str:
    """Return the first eight items as text, and the number of the others."""
    listed = [str(item) for item in items]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")

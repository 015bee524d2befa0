"""Conversion of cells to numbers: 7B, 1.4T, 49,893,420, 6x10^18, 300B tokens."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.tables.names import FLOPS, PETAFLOP_DAY, PREFIXES, UNITS

#: Cell contents that mean that the value is missing.
BLANK = {"", "na", "n/a", "nan", "none", "null", "-", "--", "?", "nil", "#n/a", "undefined"}

#: A number with optional separators, a power of ten and a unit.
NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d[\d,._'\u2019\u00a0\u202f ]*|\.\d+))"
    r"(?:\s*(?:[x*\u00d7\u00b7]\s*10\s*(?:\^|\*\*)?\s*|e)(?P<power>[-+]?\d+))?"
    r"\s*(?P<unit>[a-z][a-z/ .-]*)?",
    re.IGNORECASE,
)
SEPARATORS = re.compile(r"(?<=\d)[_'\u2019\u00a0\u202f ](?=\d{3})")
DIGITS = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")

#: A number whose point or comma may start decimals or separate thousands, such as 1.000.
AMBIGUOUS = re.compile(r"[-+]?[1-9]\d{0,2}[.,]\d{3}")


def is_blank(cell: Any) -> bool:
    """Return True if a cell has no value."""
    if cell is None or cell is np.ma.masked:
        return True
    if isinstance(cell, str):
        return cell.strip().lower() in BLANK
    try:
        return math.isnan(cell)
    except TypeError:
        return str(cell) in ("<NA>", "NaT")


def require_unambiguous(name: str, rows: Sequence[int], cells: Sequence[Any], marks: str) -> None:
    """Raise `ValueError` if marks in a column may start decimals or separate thousands.

    `marks` are the characters to check, such as ".,". They are ambiguous if every cell that has one
    has a single one, followed by three digits, as in 1.000 and 26.500.
    """
    marked = []
    for row, cell in zip(rows, cells, strict=True):
        if isinstance(cell, str) and any(mark in cell for mark in marks):
            parsed = NUMBER.match(cell.strip())
            if not parsed or parsed["power"] or not AMBIGUOUS.fullmatch(parsed["digits"].strip()):
                return
            marked.append((row, cell))
    if marked:
        row, cell = marked[0]
        raise ValueError(
            f"column {name!r}, row {row}: {cell!r} may be {cell.replace(',', '.')} or"
            f" {cell.replace(',', '').replace('.', '')}; write the column without separators"
        )


def parse_number(cell: Any, unit: float = 1.0, is_count: bool = True) -> float:
    """Return a cell as a float; nan if it is not a number.

    A suffix such as B multiplies the number; a number without a suffix is multiplied by `unit`.
    Decimals start with a point. Commas may separate thousands if `is_count` is True.
    """
    if not isinstance(cell, str):
        try:
            return float(cell) * unit
        except (TypeError, ValueError):
            return math.nan
    text = cell.strip().lstrip("$~\u2248").strip()
    parsed = NUMBER.fullmatch(text)
    if not parsed:
        return float(text) if text.lower() in ("inf", "-inf", "infinity") else math.nan
    suffix_unit = _parse_suffix(parsed["unit"])
    digits = SEPARATORS.sub("", parsed["digits"].strip())
    if is_count and not parsed["power"] and THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    if not DIGITS.fullmatch(digits) or math.isnan(suffix_unit):
        return math.nan
    return float(f"{digits}e{parsed['power'] or 0}") * (suffix_unit or unit)


def _parse_suffix(text: str | None) -> float:
    """Return the factor of a suffix; nan if it is unknown, and 0 if it states no factor."""
    words = re.sub(r"[ .]", "", (text or "").lower())
    words = re.sub("(?:tokens?|param(?:eter)?s?)$", "", words)
    if not words or words in ("flop", "flops"):
        return 0.0
    if words in ("nat", "nats"):
        return 1.0
    if words in ("bit", "bits"):
        return math.log(2)
    if words in UNITS:
        return UNITS[words]
    if re.fullmatch("(?:pf|pflops?|petaflops?)(?:/?s)?-?days?", words):
        return PETAFLOP_DAY
    if scaled := FLOPS.fullmatch(words):
        return PREFIXES[scaled[1]]
    return math.nan


def parse_numbers(
    cells: Sequence[Any] | NDArray[Any], unit: float = 1.0, is_count: bool = True
) -> NDArray[np.float64]:
    """Return all cells of a column as floats: see `parse_number`."""
    try:
        # NumPy calls `float`, which is faster than `parse_number` and equal for plain numbers.
        column = cells if isinstance(cells, np.ndarray) else np.fromiter(cells, object, len(cells))
        return column.astype(np.float64) * unit
    except (TypeError, ValueError):  # At least one cell has a unit, separators or no value.
        return np.array([parse_number(cell, unit, is_count) for cell in cells], np.float64)


def flag_blank_cells(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return flags of the cells of a column that have no value."""
    try:
        return np.isnan(column.astype(np.float64))  # fast, if all cells are numbers
    except (TypeError, ValueError):
        return np.fromiter(map(is_blank, column.tolist()), bool, len(column))


def list_some(items: Iterable[object]) -> str:
    """Return the first eight items and the number of further items as text."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more

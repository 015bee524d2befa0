"""Conversion of cells to numbers: 7B, 1.4T, 49,893,420, 3,2157, 6x10^18, 300B tokens.

A comma may separate thousands or start the decimals. A single cell such as 2,859 is ambiguous, so
the decision is made for the whole table, and a table with contradictory cells is refused.
"""

import math
import re
from collections.abc import Container, Iterable, Sequence
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


#: The name of a column, the number of each row, and the cells.
NumberedCells = tuple[str, Sequence[int], Sequence[Any]]


def uses_decimal_comma(columns: Sequence[NumberedCells], losses: Container[str] = ()) -> bool:
    """Return True if the decimal mark of a table is a comma.

    Raises `ValueError` if some cells have a decimal comma and others a decimal point. Losses are
    below a thousand, so if no other cell implies a mark, 2,859 in a column of `losses` implies a
    comma.
    """
    comma = ""
    point = ""
    texts = [cell for _, _, cells in columns for cell in cells if isinstance(cell, str)]
    # Only such cells can imply a decimal comma, and most tables have none.
    if not any("," in text or text.count(".") > 1 for text in texts):
        return False
    for name, rows, cells in columns:
        for row, cell in zip(rows, cells, strict=True):
            parsed = NUMBER.match(cell.strip()) if isinstance(cell, str) else None
            if not parsed:
                continue
            mark, is_certain = _decimal_mark(parsed["digits"].strip(), bool(parsed["power"]))
            location = f"column {name!r}, row {row}: {cell!r}"
            if mark == "," and (is_certain or not comma):
                comma = location
            elif mark == "." and (is_certain or not point):
                point = location
    if comma and point:
        raise ValueError(
            f"the decimal mark is a comma in {comma} and a point in {point}: use one of them"
        )
    in_losses = (cell for name, _, cells in columns if name in losses for cell in cells)
    return bool(comma) or (not point and any("," in str(cell) for cell in in_losses))


def require_unambiguous(column: NumberedCells, mark: str, remedy: str = "") -> None:
    """Raise `ValueError` if the mark in a column may be a decimal or a thousands separator.

    The mark is ambiguous if three digits follow it in every cell that has it, as in 1.000 and
    26.500. By default the message proposes to pass `decimal`.
    """
    name, rows, cells = column
    example = None
    for row, cell in zip(rows, cells, strict=True):
        if not isinstance(cell, str) or mark not in cell:
            continue
        parsed = NUMBER.match(cell.strip())
        if not parsed or _decimal_mark(parsed["digits"].strip(), bool(parsed["power"]))[0]:
            return
        example = example or (row, cell, parsed["digits"].strip())
    if example:
        row, cell, digits = example
        decimal = digits.replace(mark, ".")
        thousands = digits.replace(mark, "")
        other = "," if mark == "." else "."
        remedy = remedy or (
            f"pass decimal={mark!r} for the first reading, or decimal={other!r} for the second"
        )
        raise ValueError(
            f"column {name!r}, row {row}: {cell!r} may be {float(decimal):g} or {thousands};"
            f" {remedy}"
        )


def shows_decimals(columns: Iterable[NumberedCells], losses: Container[str]) -> bool:
    """Return True if any cell, or any loss, has an unmistakable decimal mark."""
    for name, _, cells in columns:
        for cell in cells:
            parsed = NUMBER.match(cell.strip()) if isinstance(cell, str) else None
            if not parsed:
                continue
            digits = parsed["digits"].strip()
            mark, is_certain = _decimal_mark(digits, bool(parsed["power"]))
            if (mark and is_certain) or (name in losses and ("." in digits or "," in digits)):
                return True
    return False


def _decimal_mark(digits: str, has_power: bool) -> tuple[str, bool]:
    """Return the decimal mark that a number implies ("" if it implies none).

    The second value is False if the mark is only inferred because the other mark separates
    thousands.
    """
    if "," in digits and "." in digits:
        return ("," if digits.rfind(",") > digits.rfind(".") else "."), True
    for mark, other in ((",", "."), (".", ",")):
        if digits.count(mark) == 1:
            is_grouped = re.fullmatch(rf"[-+]?[1-9]\d{{0,2}}(?:\{mark}\d{{3}})+", digits)
            return (mark if has_power or not is_grouped else ""), True
        if digits.count(mark) > 1:
            return other, False
    return "", True


def parse_number(cell: Any, comma: bool, thousands: bool = True, unit: float = 1.0) -> float:
    """Return a cell as a float; nan if it is not a number.

    A suffix such as B multiplies the number; a number without a suffix is multiplied by `unit`.
    `comma` is True if the decimal mark is a comma. If `thousands` is False, a single mark before
    three digits is a decimal mark even if it contradicts `comma`, as in a loss of 2,859.
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
    suffix_unit = _suffix_unit(parsed["unit"])
    digits = SEPARATORS.sub("", parsed["digits"].strip())
    mark, other = (",", ".") if comma else (".", ",")
    if other in digits:
        if not thousands and re.fullmatch(rf"[-+]?\d{{1,2}}\{other}\d+", digits):
            digits = digits.replace(other, mark)
        elif re.fullmatch(rf"[-+]?\d{{1,3}}(?:\{other}\d{{3}})+(?:\{mark}\d*)?", digits):
            digits = digits.replace(other, "")
    digits = digits.replace(mark, ".")
    if not DIGITS.fullmatch(digits) or math.isnan(suffix_unit):
        return math.nan
    return float(f"{digits}e{parsed['power'] or 0}") * (suffix_unit or unit)


def _suffix_unit(text: str | None) -> float:
    """Return the factor of a suffix; nan if it is not a unit, 0 if it is empty."""
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
    cells: Sequence[Any], comma: bool, thousands: bool = True, unit: float = 1.0
) -> NDArray[np.float64]:
    """Return all cells of a column as floats: see `parse_number`."""
    if not comma:
        try:
            # For plain numbers, `float` gives the result of `parse_number` faster.
            return np.array([float(cell) for cell in cells]) * unit
        except (TypeError, ValueError):
            pass  # At least one cell has a unit, separators or no value.
    return np.array([parse_number(cell, comma, thousands, unit) for cell in cells], np.float64)


def blank_cells(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return flags of the cells of a column that have no value."""
    if column.dtype.kind == "f":
        return np.isnan(column)
    return np.fromiter(map(is_blank, column.tolist()), bool, len(column))


def list_some(items: Iterable[object]) -> str:
    """Return the first eight items and the number of further items as text."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more

"""The numbers of the chosen columns, and the reasons for choosing them over other columns."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scaling.tables.cells import (
    NumberedCells,
    list_some,
    parse_numbers,
    require_unambiguous,
    shows_decimals,
    uses_decimal_comma,
)
from scaling.tables.derived import TIMES
from scaling.tables.names import Column, Match, ambiguity
from scaling.tables.scales import SMALLEST_MEDIAN
from scaling.tables.table import Reading
from scaling.units import Array

#: Largest relative difference that rounding may cause between columns of the same numbers.
ROUNDING = 0.01


def parse_columns(
    reading: Reading, columns: Mapping[str, Column]
) -> tuple[dict[str, Array], list[str]]:
    """Return columns in parameters, tokens, FLOPs and nats, and notes on how cells were read."""
    rows = reading.rows
    factors = {k: c.name.split(TIMES) if TIMES in c.name else [c.name] for k, c in columns.items()}
    for k, column in columns.items():
        if column.name in reading.table.columns:
            factors[k] = [column.name]
    cells = {f: (f, rows, reading.table.cells(f)) for names in factors.values() for f in names}
    losses = {columns["loss"].name} if "loss" in columns else set()
    comma = reading.decimal == ","
    if reading.decimal is None:
        comma = uses_decimal_comma(list(cells.values()), losses)
        _require_unambiguous(reading, columns, factors, cells, comma)
    choices = ["a comma in a number starts its decimals"] if comma else []
    values = {}
    for k, column in columns.items():
        unit = reading.units.get(k, column.unit)
        numbers = np.full(len(rows), 1.0 if len(factors[k]) == 1 else unit)
        for name in factors[k]:
            of_factor = unit if len(factors[k]) == 1 else 1.0
            numbers = numbers * parse_numbers(cells[name][2], comma, k != "loss", of_factor)
            invalid = ~(np.isfinite(numbers) & (numbers > 0))
            if invalid.any():
                bad = [f"row {rows[i]}: {cells[name][2][i]!r}" for i in np.flatnonzero(invalid)]
                raise ValueError(
                    f"column {name!r} must be positive and finite, but {list_some(bad)}"
                )
        values[k] = numbers
        if "perplexity" in column.description:
            values[k] = np.log(numbers)
            if not (values[k] > 0).all():
                raise ValueError(f"column {column.name!r}: a perplexity is above 1")
    return values, choices


def _require_unambiguous(
    reading: Reading,
    columns: Mapping[str, Column],
    factors: Mapping[str, Sequence[str]],
    cells: Mapping[str, NumberedCells],
    comma: bool,
) -> None:
    """Raise `ValueError` for numbers whose mark may be a decimal or a thousands separator.

    Counts such as steps have no decimals, so the marks of other columns do not resolve them.
    Numbers without a unit are not checked, because one of the two readings is refused for its
    scale.
    """
    counts = [name for names in factors.values() if len(names) > 1 for name in names]
    with_unit = [c.name for k, c in columns.items() if k != "loss" and c.unit != 1]
    for name in counts:
        require_unambiguous(cells[name], "," if comma else ".")
    losses = {columns["loss"].name} if "loss" in columns else set()
    if with_unit and not shows_decimals(cells.values(), losses):
        for name in with_unit:
            require_unambiguous(cells[name], ".")
            require_unambiguous(cells[name], ",")


def compare_columns(reading: Reading, matched: Match, tolerance: float) -> list[str]:
    """Return the reason why each column was read rather than another candidate.

    Raise `ValueError` with both readings if columns that should contain the same numbers differ, if
    active parameters exceed all parameters, or if parameters without embeddings exceed parameters
    with them.
    """
    choices = []
    for ours, column in matched.chosen.items():
        for rival in matched.rivals.get(ours, []):
            choices.append(_compare_rival(reading, ours, column, rival, tolerance))
        for other in matched.alternatives.get(ours, []):
            choices.append(_compare_alternative(reading, ours, column, other))
    return choices


def _compare_rival(
    reading: Reading, ours: str, column: Column, rival: Column, tolerance: float
) -> str:
    """Return the reason why a column is read rather than one that should be equal.

    Raise `ValueError` if the two differ.
    """
    theirs = _parse_or_none(reading, ours, rival)
    if theirs is None:
        return f"{ours} by {column.name!r}: {rival.name!r} holds no such numbers"
    if rival.is_letter and np.median(theirs) < SMALLEST_MEDIAN[ours]:
        return f"{ours} by {column.name!r}: {rival.name!r} is too small to be that"
    values = reading.values[ours]
    allowed = tolerance if ours == "compute" else ROUNDING
    difference = np.abs(np.log(theirs / values))
    if (difference > math.log1p(allowed)).any():
        i = int(np.argmax(difference))
        raise ValueError(
            f"{ambiguity(ours, [column.name, rival.name])}: in row {reading.rows[i]} they are"
            f" {values[i]:.5g} and {theirs[i]:.5g}"
        )
    return f"{ours} by {column.name!r}, with which {rival.name!r} agrees"


def _compare_alternative(reading: Reading, ours: str, column: Column, other: Column) -> str:
    """Return the reason why another kind is not read; raise `ValueError` for a contradiction."""
    reason = f"{ours} by {column.name!r}, not {other.name!r}"
    if ours != "parameters":
        return reason
    is_active = "active" in column.kinds and "active" not in other.kinds
    # Active parameters with embeddings may be more or fewer than all parameters without them.
    is_ordered = (
        not is_active or "non-embedding" in column.kinds or "non-embedding" not in other.kinds
    )
    theirs = _parse_or_none(reading, ours, other)
    if theirs is not None and is_ordered:
        values = reading.values[ours]
        wrong = theirs < values if is_active else theirs > values
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"{ambiguity(ours, [column.name, other.name])}: in row {reading.rows[i]} they are"
                f" {values[i]:.5g} and {theirs[i]:.5g}, which is the wrong order for what their"
                " names say"
            )
    if is_active:
        return f"{reason}: only active parameters compute, C = 6 N D"
    return f"{reason}: with embeddings; pass columns={{{ours!r}: {other.name!r}}} for without"


def _parse_or_none(reading: Reading, ours: str, column: Column) -> Array | None:
    """Return the numbers of a column; None if a cell is not positive and finite."""
    try:
        return parse_columns(reading, {ours: column})[0][ours]
    except ValueError:
        return None

"""The numbers of the chosen columns, and the reasons for choosing them over other columns."""

import math
from collections.abc import Mapping

import numpy as np

from scaling.tables.cells import list_some, parse_numbers, require_unambiguous
from scaling.tables.derived import TIMES
from scaling.tables.names import Column, Match, ambiguity
from scaling.tables.scales import SMALLEST_MEDIAN
from scaling.tables.table import Reading
from scaling.units import Array

#: Largest relative difference between columns of compute, or between compute and 6 N D, that is not
#: reported.
COMPUTE_TOLERANCE = 0.1

#: Largest relative difference that rounding may cause between columns of the same numbers.
ROUNDING = 0.01


def parse_columns(reading: Reading, columns: Mapping[str, Column]) -> dict[str, Array]:
    """Return the numbers of columns, in parameters, tokens, FLOPs and nats.

    Losses in bits per byte or per character are not converted. Raise `ValueError` if a number is
    ambiguous, or is not positive and finite, or if a perplexity is at most 1.
    """
    values = {}
    for k, column in columns.items():
        unit = reading.units.get(k, column.unit)
        if column.name in reading.table.columns:
            if k != "loss" and column.unit != 1 and not _shows_decimal_points(reading):
                require_unambiguous(
                    column.name, reading.rows, reading.table.cells(column.name), ".,"
                )
            numbers = _parse_positive(reading, column.name, unit, k != "loss")
        else:
            numbers = np.full(len(reading.rows), unit)
            for name in column.name.split(TIMES):
                # Numbers of steps and batches have no decimals.
                require_unambiguous(name, reading.rows, reading.table.cells(name), ".")
                numbers = numbers * _parse_positive(reading, name, 1.0, True)
        values[k] = numbers
        if "perplexity" in column.description:
            values[k] = np.log(numbers)
            if not (values[k] > 0).all():
                raise ValueError(f"column {column.name!r}: a perplexity is above 1")
    return values


def _shows_decimal_points(reading: Reading) -> bool:
    losses = reading.table.cells(reading.columns["loss"].name)
    return any(isinstance(cell, str) and "." in cell for cell in losses)


def _parse_positive(reading: Reading, name: str, unit: float, is_count: bool) -> Array:
    """Return the numbers of a column; raise `ValueError` unless all are positive and finite."""
    cells = reading.table.cells(name)
    numbers = parse_numbers(cells, unit, is_count)
    invalid = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0)))
    if len(invalid):
        unparsed = [i for i in invalid if np.isnan(numbers[i])]
        wanted = "hold numbers" if unparsed else "be positive and finite"
        bad = [f"row {reading.rows[i]}: {cells[i]!r}" for i in unparsed or invalid]
        remedy = ""
        if any("," in text for text in bad):
            remedy = "; decimals start with a point, and commas separate only thousands of counts"
        raise ValueError(f"column {name!r} must {wanted}, but {list_some(bad)}{remedy}")
    return numbers


def compare_columns(reading: Reading, matched: Match) -> list[str]:
    """Return one sentence per column that could have been read instead of the chosen one.

    A rival has the same meaning as the chosen column, so it must contain the same numbers. An
    alternative has another meaning, such as total instead of active parameters, and must not
    contradict the chosen column: active parameters are at most the total, and parameters without
    embeddings at most those with them. Raise `ValueError` with both columns otherwise.
    """
    choices = []
    for quantity, column in matched.chosen.items():
        for rival in matched.rivals.get(quantity, []):
            choices.append(_compare_rival(reading, quantity, column, rival))
        for other in matched.alternatives.get(quantity, []):
            choices.append(_compare_alternative(reading, quantity, column, other))
    return choices


def _compare_rival(reading: Reading, quantity: str, column: Column, rival: Column) -> str:
    """Return the reason why a column is read rather than a rival that should be equal.

    Raise `ValueError` if the rival has plausible numbers that differ.
    """
    other_values = _parse_plausible(reading, quantity, rival)
    if np.isnan(other_values).all():
        return f"{quantity} by {column.name!r}: {rival.name!r} holds no such numbers"
    if rival.is_letter and np.nanmedian(other_values) < SMALLEST_MEDIAN[quantity]:
        return f"{quantity} by {column.name!r}: {rival.name!r} is too small to be that"
    values = reading.values[quantity]
    allowed = COMPUTE_TOLERANCE if quantity == "compute" else ROUNDING
    difference = np.abs(np.log(other_values / values))
    if (difference > math.log1p(allowed)).any():
        i = int(np.nanargmax(difference))
        raise ValueError(
            f"{ambiguity(quantity, [column.name, rival.name])}: in row {reading.rows[i]} they are"
            f" {values[i]:.5g} and {other_values[i]:.5g}"
        )
    return f"{quantity} by {column.name!r}, with which {rival.name!r} agrees"


def _compare_alternative(reading: Reading, quantity: str, column: Column, other: Column) -> str:
    """Return the reason why a column of another kind is not read.

    Raise `ValueError` if the order of two counts of parameters contradicts their names.
    """
    reason = f"{quantity} by {column.name!r}, not {other.name!r}"
    if quantity != "parameters":
        return reason
    is_active = "active" in column.kinds and "active" not in other.kinds
    # Active parameters with embeddings may be more or fewer than all parameters without them.
    is_ordered = (
        not is_active or "non-embedding" in column.kinds or "non-embedding" not in other.kinds
    )
    other_values = _parse_plausible(reading, quantity, other)
    if is_ordered:
        values = reading.values[quantity]
        wrong = other_values < values if is_active else other_values > values
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"{ambiguity(quantity, [column.name, other.name])}: in row {reading.rows[i]} they"
                f" are {values[i]:.5g} and {other_values[i]:.5g}, which is the wrong order for what"
                " their names say"
            )
    if is_active:
        return f"{reason}: only active parameters compute, C = 6 N D"
    return f"{reason}: with embeddings; pass columns={{{quantity!r}: {other.name!r}}} for without"


def _parse_plausible(reading: Reading, quantity: str, column: Column) -> Array:
    """Return the numbers of a column; nan for cells that are not positive and finite."""
    unit = reading.units.get(quantity, column.unit)
    numbers = parse_numbers(reading.table.cells(column.name), unit)
    return np.where((numbers > 0) & np.isfinite(numbers), numbers, np.nan)

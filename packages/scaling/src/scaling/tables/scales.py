"""Checks of the scale of numbers, and computation of the missing column from C = 6 N D."""

from collections.abc import Container, Sequence
from typing import NoReturn

import numpy as np

from scaling.tables.table import Reading
from scaling.units import FEWEST, FLOPS_PER_PARAMETER_TOKEN

#: Losses above this are suspicious: guessing uniformly among a million tokens costs 13.8 nats.
LARGEST_LOSS = 14.0

#: Losses below this are suspicious: the best models of text lose more per byte.
SMALLEST_LOSS = 0.1

#: Accepted range of the median tokens per parameter. Published tables have 4 to 40, so a unit that
#: is wrong by a factor of a thousand leaves the range.
TOKENS_PER_PARAMETER = (0.1, 2000.0)

#: Rows are taken to be in another unit if their tokens per parameter differ from those of all other
#: rows by more than this factor. Published tables have gaps of at most a factor of five.
SCALE_GAP = 100.0

#: Units that messages propose for numbers that are too small, and the name of each. The columns
#: that most often have another scale are first.
USUAL_UNITS = {
    "compute": ("1e18", "exaFLOPs"),
    "tokens": ("1e9", "billions"),
    "parameters": ("1e6", "millions"),
}

#: Smallest plausible median of a column. A smaller one is probably in thousands or millions.
SMALLEST_MEDIAN = {"parameters": 1e5, "tokens": 1e6, "compute": 1e12}

#: Smallest number that is implausible in a column whose name states a unit, such as params (M). A
#: full count in such a column is multiplied by the unit again.
IMPLAUSIBLE = {"parameters": 1e14, "tokens": 1e15, "compute": 1e30}

#: Largest factor between C and 6 N D. Attention, embeddings and recomputation cause smaller
#: factors.
LARGEST_COMPUTE_RATIO = 10.0


def complete_quantities(reading: Reading) -> None:
    """Compute missing parameters or tokens from C = 6 N D, and check the scale of all columns.

    Raises `ValueError` if numbers seem to be in another unit.
    """
    values = reading.values
    with_unit = _list_columns_with_unit(reading)
    for k, other in (("parameters", "tokens"), ("tokens", "parameters")):
        if k not in values:
            values[k] = values["compute"] / (FLOPS_PER_PARAMETER_TOKEN * values[other])
    _require_smallest(reading)
    _require_largest(reading)
    _require_ratio(reading, with_unit)
    _require_ratio_of_rows(reading)
    _require_compute(reading)
    _require_loss(reading)


def _list_columns_with_unit(reading: Reading) -> set[str]:
    """Return the columns whose unit is stated by their name, by their cells or by `units`."""
    known = set(reading.units)
    for k, column in reading.columns.items():
        cells = reading.table.columns.get(column.name, np.zeros(1))
        has_suffixes = all(isinstance(c, str) and c.strip()[-1:].isalpha() for c in cells)
        if column.unit != 1 or has_suffixes:
            known.add(k)
    return known


def _require_smallest(reading: Reading) -> None:
    """Raise `ValueError` below `FEWEST` parameters or tokens, unless their unit is in `units`."""
    for k in ("parameters", "tokens"):
        # A value that was derived from compute is too small if the compute has a wrong scale.
        origin = k if k in reading.columns else "compute"
        values = reading.values[k]
        if origin not in reading.units and values.min() < FEWEST:
            i = int(np.argmin(values))
            leaves = f", which leaves {values[i]:.3g} {k}" if origin != k else ""
            _refuse(reading, (origin,), i, f"{leaves}: expected at least {FEWEST:g} {k}")


def _require_largest(reading: Reading) -> None:
    """Raise `ValueError` for a number that looks like a full count in a column with a unit."""
    for k, largest in IMPLAUSIBLE.items():
        column = reading.columns.get(k)
        if column is None or column.unit == 1 or k in reading.units:
            continue
        i = int(np.argmax(reading.values[k]))
        value = reading.values[k][i]
        if value >= largest:
            raise ValueError(
                f"column {column.name!r} is in units of {column.unit:g}, so its cell in row"
                f" {reading.rows[i]} means {value:.3g} {k}, but runs have less than {largest:.0e}:"
                f" write all cells in this unit, pass units={{{k!r}: 1}} if all cells are full"
                " counts, or confirm the numbers with"
                f" units={{{k!r}: {column.unit:g}}}"
            )


def _require_ratio(reading: Reading, with_unit: Container[str]) -> None:
    """Raise `ValueError` if the median of a column or of tokens per parameter is implausible.

    Nothing is checked if the units of two columns are stated, or if N, D and C are all columns.
    """
    values = reading.values
    present = _list_counts(reading)
    # Two of three columns determine the third and its scale.
    if len(present) == 3 or sum(k in with_unit for k in USUAL_UNITS) >= 2:
        return
    ratio = values["tokens"] / values["parameters"]
    low, high = TOKENS_PER_PARAMETER
    if not low <= np.median(ratio) <= high:
        i = int(np.argsort(ratio)[len(ratio) // 2])
        problem = f": {ratio[i]:.2g} tokens per parameter are outside {low:g} to {high:g}"
        _refuse(reading, present, i, problem)
    for k in ("parameters", "tokens"):
        if k in present and np.median(values[k]) < SMALLEST_MEDIAN[k]:
            i = int(np.argsort(values[k])[len(ratio) // 2])
            problem = f": most runs are below {SMALLEST_MEDIAN[k]:.0e} {k}"
            _refuse(reading, (k, *(other for other in present if other != k)), i, problem)


def _require_ratio_of_rows(reading: Reading) -> None:
    """Raise `ValueError` if the tokens per parameter of a few rows are on another scale."""
    values = reading.values
    present = _list_counts(reading)
    if len(present) == 3 or {*present} <= {*reading.units}:
        return
    ratio = values["tokens"] / values["parameters"]
    order = np.argsort(ratio)
    gaps = np.flatnonzero(np.diff(np.log(ratio[order])) > np.log(SCALE_GAP)) + 1
    parts = np.split(order, gaps)
    most = ratio[max(parts, key=len)]
    low, high = TOKENS_PER_PARAMETER
    for part in parts:
        i = int(part[0])
        # A small table of random sizes and tokens also has such gaps, but they rarely separate so
        # few rows.
        if len(part) <= max(1, len(ratio) / 10) and not low <= ratio[i] <= high:
            problem = (
                f": {ratio[i]:.2g} tokens per parameter, while most rows have {most.min():.2g} to"
                f" {most.max():.2g}"
            )
            _refuse(reading, present, i, problem)


def _require_compute(reading: Reading) -> None:
    """Raise `ValueError` if the compute differs from 6 N D by more than a factor of ten."""
    values = reading.values
    if "compute" not in values or "compute" in reading.units:
        return
    expected = FLOPS_PER_PARAMETER_TOKEN * values["parameters"] * values["tokens"]
    ratio = values["compute"] / expected
    i = int(np.argmax(np.abs(np.log(ratio))))
    if not 1 / LARGEST_COMPUTE_RATIO < ratio[i] < LARGEST_COMPUTE_RATIO:
        problem = f": the compute is {ratio[i]:.3g} times 6 N D"
        _refuse(reading, ("compute", "parameters", "tokens"), i, problem)


def _require_loss(reading: Reading) -> None:
    """Raise `ValueError` if most losses are impossible for models of text, or look like counts.

    Losses with a unit in `units` are not checked.
    """
    loss = reading.values["loss"]
    if "loss" in reading.units:
        return
    name = reading.columns["loss"].name
    if len(name) == 1 and (loss == np.round(loss)).all():
        problem = "whole numbers may count layers"
    elif np.median(loss) > LARGEST_LOSS:
        problem = f"most rows are above {LARGEST_LOSS:g} nats, which is worse than guessing"
    elif np.median(loss) < SMALLEST_LOSS:
        problem = f"most rows are below {SMALLEST_LOSS:g} nats, less than any model of text has"
    else:
        return
    raise ValueError(
        f"column {name!r} is {loss[0]:.4g} in row {reading.rows[0]}: {problem}; name another column"
        " with columns={'loss': '…'}, name a perplexity so, pass units={'loss': 0.01} for"
        " hundredths, or confirm nats with units={'loss': 1}"
    )


def _list_counts(reading: Reading) -> list[str]:
    """Return which of parameters, tokens and compute are columns of the table."""
    return [k for k in USUAL_UNITS if k in reading.columns]


def _refuse(reading: Reading, quantities: Sequence[str], i: int, problem: str) -> NoReturn:
    """Raise `ValueError` about cells of row i, the first of which is on the wrong scale."""
    present = [k for k in quantities if k in reading.columns]
    names = {k: reading.columns[k].name for k in present}
    cells = [f"column {names[k]!r} is {reading.values[k][i]:.5g}" for k in present]
    unit, unit_name = USUAL_UNITS[present[0]]
    units = {k: reading.units.get(k, reading.columns[k].unit) for k in present}
    confirmed = ", ".join(f"{k!r}: {unit:g}" for k, unit in units.items())
    raise ValueError(
        f"{' and '.join(cells)} in row {reading.rows[i]}{problem}; correct the cell, or pass"
        f" units={{{present[0]!r}: {unit}}} if the numbers are {unit_name}, for example, or confirm"
        f" them with units={{{confirmed}}}, or leave out a column of something else, such as FLOPs"
        f" per second, with ignore=[{names[present[0]]!r}]"
    )

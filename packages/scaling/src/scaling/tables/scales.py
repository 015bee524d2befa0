"""Checks of the scale of numbers, and computation of the missing column from C = 6 N D."""

from collections.abc import Container

import numpy as np

from scaling.tables.table import Reading
from scaling.units import COLUMNS, FEWEST, FLOPS_PER_PARAMETER_TOKEN

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

#: Units that messages propose for numbers that are too small, and the name of each.
USUAL_UNITS = {
    "parameters": ("1e6", "millions"),
    "tokens": ("1e9", "billions"),
    "compute": ("1e18", "exaFLOPs"),
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
        if origin in reading.units or values.min() >= FEWEST:
            continue
        i = int(np.argmin(values))
        name = reading.columns[origin].name
        cell = f"column {name!r} is {reading.values[origin][i]:.5g} in row {reading.rows[i]}"
        if origin != k:
            cell += f", which leaves {values[i]:.3g} {k}"
        unit, unit_name = USUAL_UNITS[origin]
        raise ValueError(
            f"{cell}: expected at least {FEWEST:g} {k}; correct the cell, pass"
            f" units={{{origin!r}: {unit}}} if the column counts {unit_name}, for"
            f" example, or leave out a column of layers or widths with ignore=[{name!r}]"
        )


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
                f" {reading.rows[i]} is {value:.3g}, while runs have less than {largest:.0e} {k}:"
                " write all cells in this unit, or confirm the numbers with"
                f" units={{{k!r}: {column.unit:g}}}"
            )


def _require_ratio(reading: Reading, with_unit: Container[str]) -> None:
    """Raise `ValueError` if the median of a column or of tokens per parameter is implausible.

    Nothing is checked if the units of two columns are stated, or if N, D and C are all columns.
    """
    values = reading.values
    chosen = reading.columns
    # Two of three columns determine the third and its scale.
    has_units = sum(k in with_unit for k in ("parameters", "tokens", "compute")) >= 2
    if has_units or all(k in chosen for k in ("parameters", "tokens", "compute")):
        return
    ratio = values["tokens"] / values["parameters"]
    low, high = TOKENS_PER_PARAMETER
    if not low <= np.median(ratio) <= high:
        i = int(np.argsort(ratio)[len(ratio) // 2])
        present = [k for k in COLUMNS if k in chosen][:2]
        first, second = (f"{values[k][i]:.4g}" for k in present)
        confirmed = ", ".join(f"{k!r}: 1" for k in present if k != "loss")
        scaled = "tokens" if "tokens" in chosen else "compute"
        or_ignore = ""
        if "compute" in chosen:
            or_ignore = f", or leave out FLOPs per second with ignore=[{chosen['compute'].name!r}]"
        raise ValueError(
            f"columns {chosen[present[0]].name!r} and {chosen[present[1]].name!r} are {first} and"
            f" {second} in row {reading.rows[i]}, {ratio[i]:.2g} tokens per parameter, outside"
            f" {low:g} to {high:g}: they are not on one scale; pass units={{{scaled!r}: 1e3}} or"
            f" 1e6 or 1e9, for example, or confirm the numbers with units={{{confirmed}}}"
            f"{or_ignore}"
        )
    for k in ("parameters", "tokens"):
        smallest = SMALLEST_MEDIAN[k]
        if k in chosen and np.median(values[k]) < smallest:
            raise ValueError(
                f"column {chosen[k].name!r} is {np.median(values[k]):.4g} in the median, while runs"
                f" have {smallest:.0e} {k} or more: is it in thousands or millions? Pass"
                f" units={{{k!r}: 1e6}}, for example, or confirm both columns with units of 1"
            )


def _require_ratio_of_rows(reading: Reading) -> None:
    """Raise `ValueError` if the tokens per parameter of a few rows are on another scale."""
    values = reading.values
    present = [k for k in COLUMNS if k in reading.columns and k != "loss"]
    if len(present) == 3 or {*present} <= {*reading.units}:
        return
    ratio = values["tokens"] / values["parameters"]
    order = np.argsort(ratio)
    gaps = np.flatnonzero(np.diff(np.log(ratio[order])) > np.log(SCALE_GAP)) + 1
    parts = np.split(order, gaps)
    largest_part = max(parts, key=len)
    low, high = TOKENS_PER_PARAMETER
    for part in parts:
        i = int(part[0])
        # A small table of random sizes and tokens also has such gaps, but they rarely separate so
        # few rows.
        if len(part) > max(1, len(ratio) / 10) or low <= ratio[i] <= high:
            continue
        first, second = (f"{reading.columns[k].name!r} is {values[k][i]:.4g}" for k in present)
        confirmed = ", ".join(f"{k!r}: 1" for k in present)
        raise ValueError(
            f"in row {reading.rows[i]} {first} and {second}, which makes {ratio[i]:.2g} tokens per"
            f" parameter, while most rows have {ratio[largest_part].min():.2g} to"
            f" {ratio[largest_part].max():.2g}: correct the unit of the cell, or confirm the"
            f" numbers with units={{{confirmed}}}"
        )


def _require_compute(reading: Reading) -> None:
    """Raise `ValueError` if the compute differs from 6 N D by more than a factor of ten."""
    values = reading.values
    if "compute" not in values or "compute" in reading.units:
        return
    n = values["parameters"]
    d = values["tokens"]
    ratio = values["compute"] / (FLOPS_PER_PARAMETER_TOKEN * n * d)
    i = int(np.argmax(np.abs(np.log(ratio))))
    if 1 / LARGEST_COMPUTE_RATIO < ratio[i] < LARGEST_COMPUTE_RATIO:
        return
    names = {k: column.name for k, column in reading.columns.items()}
    raise ValueError(
        f"column {names['compute']!r} is {values['compute'][i]:.4g} in row {reading.rows[i]},"
        f" {ratio[i]:.3g} times 6 N D of {names['parameters']!r} = {n[i]:.4g} and"
        f" {names['tokens']!r} = {d[i]:.4g}: a unit is wrong; correct the cell, pass"
        f" units={{'compute': {1 / ratio[i]:.0e}}}, or leave out FLOPs per second with"
        f" ignore=[{names['compute']!r}]"
    )


def _require_loss(reading: Reading) -> None:
    """Raise `ValueError` if most losses are impossible for models of text, or look like counts.

    Losses with a unit in `units` are not checked.
    """
    loss = reading.values["loss"]
    column = reading.columns["loss"].name
    if "loss" in reading.units:
        return
    if len(column) == 1 and (loss == np.round(loss)).all():
        raise ValueError(
            f"column {column!r} has only whole numbers, such as {loss[0]:g} in row"
            f" {reading.rows[0]}, so it may count layers: name the loss with columns={{'loss':"
            " '…'}, or confirm it with units={'loss': 1}"
        )
    if np.median(loss) > LARGEST_LOSS:
        raise ValueError(
            f"column {column!r} is {loss[0]:.4g} in row {reading.rows[0]},"
            f" and above {LARGEST_LOSS:g} nats in most rows: worse than guessing; for hundredths"
            " pass units={'loss': 0.01}, name a perplexity so, and confirm nats with {'loss': 1}"
        )
    if np.median(loss) < SMALLEST_LOSS:
        raise ValueError(
            f"column {column!r} is {loss[0]:.4g} in row {reading.rows[0]},"
            f" and below {SMALLEST_LOSS:g} nats in most rows, less than the loss of any model of"
            " text: name another column with columns={'loss': '…'}, or confirm it with"
            " units={'loss': 1}"
        )

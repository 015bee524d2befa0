"""Training runs: parameters, tokens, compute and final loss, loaded from tables of any format.

Two of parameters, tokens and compute are enough, because the third follows from C = 6 N D. Values
that a fit cannot use, such as columns on a wrong scale, are refused with their row and column.
"""

import math
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaling.equality import ComparesArrays
from scaling.tables.cells import is_blank, list_some, parse_numbers, uses_decimal_comma
from scaling.tables.derived import add_token_product
from scaling.tables.names import (
    SWEEP_NAMES,
    WORDS,
    Column,
    Match,
    ambiguity,
    match_columns,
    split_words,
)
from scaling.tables.source import NumberedRecords, read_records
from scaling.tables.states import keep_finished

Array = NDArray[np.float64]

#: Forward and backward pass of a dense model: C = 6 N D (Kaplan et al. 2020, section 2.1).
FLOPS_PER_PARAMETER_TOKEN = 6.0

#: Losses above this are suspicious: guessing uniformly among a million tokens costs 13.8 nats.
LARGEST_LOSS = 20.0

#: No model has fewer parameters or training tokens, so smaller numbers must be in larger units.
FEWEST = 1000.0

#: Range of the median of tokens per parameter. Published tables have 4 to 40, and a unit that is
#: wrong by a thousand leaves this range for any of them.
TOKENS_PER_PARAMETER = (0.1, 2000.0)

#: Usual ratio of tokens to parameters, with which the unit of a column is guessed in a message.
USUAL_TOKENS_PER_PARAMETER = 20

#: Smallest plausible median of a column. Columns in millions have a tenth of that or less.
SMALLEST_MEDIAN = {"parameters": 1e5, "tokens": 1e6, "compute": 1e12}

#: Largest relative difference by rounding between columns of the same numbers.
ROUNDING = 0.01

#: Largest factor between C and 6 N D. Attention, embeddings and recomputation explain less.
LARGEST_COMPUTE_RATIO = 10.0

COLUMNS = ("parameters", "tokens", "compute", "loss")

#: Names of columns that identify a run, without case and punctuation.
RUN_NAMES = ["run", "runid", "runname", "uid", "id", "trialid", "jobid", "expname", "expid"]


class ScalingWarning(UserWarning):
    """A warning that an answer is less certain than it looks, because of the data or the method."""


@dataclass(frozen=True, eq=False)
class Runs(ComparesArrays):
    """A table of finished runs, each column a float64 vector of the same length.

    `load_runs` reads runs from files, records or columns, and checks them.
    """

    parameters: Array
    tokens: Array
    compute: Array
    loss: Array
    #: The line or the position from 1 of each run in its source.
    rows: tuple[int, ...]
    #: A text on the source, unit and range of each column, excluded rows and unused columns.
    explanation: str = ""

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, which: slice | NDArray[Any] | Sequence[int]) -> "Runs":
        """Return the runs that a slice, a mask or a list of positions selects."""
        index = np.arange(len(self))[which]
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        rows = tuple(self.rows[i] for i in index)
        return Runs(**columns, rows=rows, explanation=self.explanation)

    def without_highest(self, count: int) -> "Runs":
        """Return all runs but the `count` runs of highest loss, the likeliest outliers."""
        if not 0 <= count <= len(self):
            raise ValueError(f"expected 0 <= count <= {len(self)} runs, got count = {count}")
        return self[np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count])]

    def budgets(self, tolerance: float = 0.05) -> "list[Runs]":
        """Return the runs grouped by compute, in ascending order.

        A gap wider than `tolerance` starts a group. Runs that are spread over decades have no such
        gaps, so a group that spans more than a factor of two is divided into groups of that width.
        """
        order = np.argsort(self.compute, kind="stable")
        log_compute = np.log(self.compute[order])
        width = math.log1p(tolerance)
        groups = []
        for group in np.split(order, np.flatnonzero(np.diff(log_compute) > width) + 1):
            inside = np.log(self.compute[group])
            starts = [0]
            for i in range(len(group)):
                if np.ptp(inside) > math.log(2) and inside[i] > inside[starts[-1]] + width:
                    starts.append(i)
            groups += np.split(group, starts[1:])
        return [self[group] for group in groups]


@dataclass
class _Reading:
    """The state of reading a table: its records, the chosen columns and their values."""

    name: str
    table: NumberedRecords
    #: Names of all columns of the table.
    present: list[str]
    #: The chosen columns by our names.
    columns: dict[str, Column]
    #: The user's unit by our names.
    units: Mapping[str, float]
    values: dict[str, Array] = field(default_factory=dict)
    #: Sentences about choices, for `Runs.explanation`.
    choices: list[str] = field(default_factory=list)
    #: Sentences about rows that were left out, also issued as warnings.
    exclusions: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return [row for row, _ in self.table]


def load_runs(
    source: str | Path | Mapping[str, ArrayLike] | Iterable[Mapping[str, Any]] | Any,
    *,
    delimiter: str | None = None,
    columns: Mapping[str, str] | None = None,
    units: Mapping[str, float] | None = None,
    where: Mapping[str, Any] | None = None,
    history: str | bool | None = None,
    tolerance: float = 0.1,
) -> Runs:
    """Load runs from CSV, JSON or JSONL, a DataFrame, a mapping of columns or records.

    The table needs a loss and two of parameters, tokens and compute. Cells may be 7B, 1.4T,
    49,893,420 or 3,2157. Exports of wandb and levanter are read with their nested `config` and
    `summary`. `Runs.explanation` states how the table was read.

    Args:
        source: The table.
        delimiter: The delimiter of a CSV; by default it is detected.
        columns: Names of columns that do not have a usual name (`N`, `params_B`, `train_tokens`,
            `Training FLOP`, `eval/loss`, …), such as `{"loss": "eval/ce"}`. Tokens may be a
            product, as in `{"tokens": "steps * batch_size * seq_len"}`.
        units: Factors of cells without a unit, such as `{"parameters": 1e6}`.
        where: Values of columns by which rows are selected, such as `{"dataset": "c4"}`.
        history: The column that names the run of each row, of which the last row is kept; False
            if every row is a run. By default a column of run names is recognized.
        tolerance: Relative difference between compute and 6 N D that is not reported.

    Left out, with a warning and a count, are rows without a loss, runs that did not finish (by a
    column such as `state`, `status`, `failed` or `exit_code`), and all but the last row of each run
    of a history.

    Raises:
        ValueError: A value is missing, not a number, not positive or not finite, a column is on the
            wrong scale, a state is unknown, or two columns that could be meant differ. The message
            names the row and the column.

    A `ScalingWarning` also reports a compute that differs from 6 N D, a loss above 20 nats, and
    repeated rows.
    """
    name = str(source) if isinstance(source, str | Path) else "the table"
    table = read_records(source, delimiter)
    total = len(table)
    table = _select_rows(table, where or {}, name)
    exclusions: list[str] = []
    table = keep_finished(table, where or {}, exclusions)
    if not table:
        raise ValueError("; ".join([f"{name} holds no runs", *exclusions]))
    present = list(dict.fromkeys(column for _, record in table for column in record))
    columns = dict(columns or {})
    if product := add_token_product(table, present, columns):
        present.append(product)
        columns["tokens"] = product
    matched = match_columns(present, columns, name)
    reading = _Reading(name, table, present, matched.chosen, units or {}, exclusions=exclusions)
    dataset_warnings = _several_datasets(reading)
    _drop_rows_without_loss(reading)
    reading.values, reading.choices = _parse_columns(reading.table, reading.columns, reading.units)
    reading.choices += _compare_columns(reading, matched, tolerance)
    _keep_last_rows(reading, history)
    _keep_best_settings(reading)
    _drop_small_letters(reading)
    _complete(reading)
    expected = FLOPS_PER_PARAMETER_TOKEN * reading.values["parameters"] * reading.values["tokens"]
    values = {"compute": expected, **reading.values}
    reading.exclusions += dataset_warnings
    for message in reading.exclusions:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    runs = Runs(
        parameters=values["parameters"],
        tokens=values["tokens"],
        compute=values["compute"],
        loss=values["loss"],
        rows=tuple(reading.rows),
    )
    for message in _suspicions(runs, runs.compute / expected, reading.columns, tolerance):
        warnings.warn(message, ScalingWarning, stacklevel=2)
    lines = [f"{len(runs)} of {total} rows of {name}", *_explain(runs, reading)]
    lines += [f"  chosen: {choice}" for choice in reading.choices]
    return replace(runs, explanation="\n".join([*lines, *reading.exclusions]))


def _select_rows(table: NumberedRecords, where: Mapping[str, Any], name: str) -> NumberedRecords:
    """Return the rows whose cells have the values of `where`; raise `ValueError` if none has."""
    for column, wanted in where.items():
        seen = dict.fromkeys(str(record[column]) for _, record in table if column in record)
        table = [(row, r) for row, r in table if str(r.get(column)) == str(wanted)]
        if not table:
            reason = f"it is {list_some(seen)}" if seen else "there is no such column"
            raise ValueError(f"{name}: {column!r} is nowhere {wanted!r}; {reason}")
    return table


def _drop_rows_without_loss(reading: _Reading) -> None:
    """Leave out the rows whose loss is blank."""
    column = reading.columns["loss"].name
    measured = [(row, r) for row, r in reading.table if not is_blank(r.get(column))]
    if not measured:
        raise ValueError(f"{reading.name} holds no runs with a loss in column {column!r}")
    kept_rows = {row for row, _ in measured}
    blank_rows = [row for row in reading.rows if row not in kept_rows]
    if blank_rows:
        reading.exclusions.append(
            f"column {column!r} is blank in {len(blank_rows)} rows ({list_some(blank_rows)}):"
            " left out"
        )
    reading.table = measured


def _parse_columns(
    table: NumberedRecords, columns: Mapping[str, Column], units: Mapping[str, float]
) -> tuple[dict[str, Array], list[str]]:
    """Return columns in parameters, tokens, FLOPs and nats, and how their cells were read."""
    cells = {k: [(row, r.get(c.name)) for row, r in table] for k, c in columns.items()}
    comma = uses_decimal_comma((columns[k].name, column) for k, column in cells.items())
    choices = ["a comma in a number starts its decimals"] if comma else []
    values = {}
    for k, column in columns.items():
        unit = units.get(k, column.unit)
        numbers = parse_numbers([cell for _, cell in cells[k]], comma, k != "loss", unit)
        invalid = ~(np.isfinite(numbers) & (numbers > 0))
        if invalid.any():
            bad = [f"row {cells[k][i][0]}: {cells[k][i][1]!r}" for i in np.flatnonzero(invalid)]
            raise ValueError(
                f"column {column.name!r} must be positive and finite, but {list_some(bad)}"
            )
        values[k] = numbers
        if "perplexity" in column.description:
            values[k] = np.log(numbers)
            if not (values[k] > 0).all():
                raise ValueError(f"column {column.name!r}: a perplexity is above 1")
    return values, choices


def _compare_columns(reading: _Reading, matched: Match, tolerance: float) -> list[str]:
    """Return why each column was read rather than another one that could have been.

    Raise `ValueError` with both readings if columns that should contain the same numbers differ, if
    active parameters exceed all parameters, or if those without embeddings exceed those with them.
    """
    choices = []
    for ours, column in matched.chosen.items():
        for rival in matched.rivals.get(ours, []):
            choices.append(_compare_rival(reading, ours, column, rival, tolerance))
        for other in matched.alternatives.get(ours, []):
            choices.append(_compare_alternative(reading, ours, column, other))
    return choices


def _compare_rival(
    reading: _Reading, ours: str, column: Column, rival: Column, tolerance: float
) -> str:
    """Return why a column is read rather than one that should contain the same numbers.

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


def _compare_alternative(reading: _Reading, ours: str, column: Column, other: Column) -> str:
    """Return why a column of another kind is not read; raise `ValueError` if it contradicts."""
    reason = f"{ours} by {column.name!r}, not {other.name!r}"
    if ours != "parameters":
        return reason
    is_active = "active" in column.kinds and "active" not in other.kinds
    # Active parameters with embeddings and all parameters without have no fixed order.
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


def _parse_or_none(reading: _Reading, ours: str, column: Column) -> Array | None:
    """Return the numbers of a column; None if a cell is not positive and finite."""
    try:
        return _parse_columns(reading.table, {ours: column}, reading.units)[0][ours]
    except ValueError:
        return None


def _keep_last_rows(reading: _Reading, history: str | bool | None) -> None:
    """Leave out all but the last row of each run, if the table is a history of runs."""
    ends = None if history is False else _history(reading, history)
    if ends is None:
        return
    column, last = ends
    reading.exclusions.append(
        f"column {column!r} names a run in several rows: the row with the most tokens is the end of"
        f" each run; {len(reading.table) - len(last)} earlier ones are left out"
    )
    reading.values = {k: v[last] for k, v in reading.values.items()}
    reading.table = [reading.table[i] for i in last]


def _history(reading: _Reading, named: str | bool | None) -> tuple[str, list[int]] | None:
    """Return the column that identifies the runs of a history, and the index of each run's end.

    Return None if the table is not a history. Raise `ValueError` if it may be one, because it has
    a column of the current step and no column of names that differs in every row.
    """
    values = reading.values
    progress = values["tokens"] if "tokens" in values else values["compute"]
    size = values.get("parameters", np.ones_like(progress))
    names = {"".join(c for c in name.lower() if c.isalnum()): name for name in reading.present}
    candidates = [names[c] for c in RUN_NAMES if c in names]
    steps = [names[c] for c in ("step", "globalstep", "trainerglobalstep") if c in names]
    if steps:
        candidates += [names[c] for c in ("name", "experiment") if c in names]
    if isinstance(named, str):
        if named not in reading.present:
            raise ValueError(f"history={named!r} is not a column; they are {reading.present}")
        candidates = [named]
    has_names = False
    for column in candidates:
        groups: dict[str, list[int]] = {}
        for i, (_, record) in enumerate(reading.table):
            groups.setdefault(str(record.get(column)), []).append(i)
        # Rows of one size with different tokens are the same training at different times.
        has_names = has_names or len(groups) == len(reading.table)
        is_history = len(groups) < len(reading.table) and all(
            np.ptp(size[g]) == 0 and len(np.unique(progress[g])) == len(g) for g in groups.values()
        )
        if is_history:
            return column, sorted(max(g, key=lambda i: progress[i]) for g in groups.values())
    if isinstance(named, str) and not has_names:
        raise ValueError(
            f"history={named!r}: the rows of a run must have one size and different tokens"
        )
    if steps and not has_names and _steps_recur(reading, steps[0], size, progress):
        raise ValueError(
            f"column {steps[0]!r} rises with the tokens of each size: the rows may be a history of"
            " fewer runs, or a run each; name the column of runs with history='…', or pass"
            " history=False if every row is the end of a run"
        )
    return None


def _steps_recur(reading: _Reading, column: str, size: Array, progress: Array) -> bool:
    """Return True if at least half of all rows share their size with an earlier step."""
    steps = parse_numbers([record.get(column) for _, record in reading.table], False)
    order = np.lexsort((steps, size))
    rises = (np.diff(steps[order]) > 0) & (np.diff(progress[order]) > 0)
    later = int((rises & (np.diff(size[order]) == 0)).sum())
    return len(reading.table) >= 4 and later >= len(reading.table) / 2


def _keep_best_settings(reading: _Reading) -> None:
    """Leave out all but the best setting of each N and D, if the table is a sweep of settings.

    The settings are learning rates and batch sizes. Repetitions of the best setting, such as seeds,
    are all kept, because the least loss of several repetitions is biased.
    """
    # A column `eta` is usually the time that remains, and `b` may be anything.
    sweeps = {*SWEEP_NAMES["rate"], *SWEEP_NAMES["batch_size"]} - {"eta", "b"}
    used = {column.name for column in reading.columns.values()}
    names = []
    sets = []
    for name in reading.present:
        words = split_words(name)
        if name not in used and any("".join(words[i:]) in sweeps for i in range(len(words))):
            names.append(name)
        elif words and words[-1] in WORDS["sets"]:
            sets.append(name)
    groups: dict[tuple[Any, ...], dict[tuple[str, ...], list[int]]] = {}
    two = [reading.values[k] for k in ("parameters", "tokens", "compute") if k in reading.values]
    for i, (_, record) in enumerate(reading.table if names else []):
        design = (*(float(v[i]) for v in two), *(str(record.get(name)) for name in sets))
        setting = tuple(str(record.get(name)) for name in names)
        groups.setdefault(design, {}).setdefault(setting, []).append(i)
    loss = reading.values["loss"]
    best = [min(g.values(), key=lambda rows: float(loss[rows].mean())) for g in groups.values()]
    keep = sorted(i for rows in best for i in rows)
    if not keep or len(keep) == len(reading.table):
        return
    reading.exclusions.append(
        f"columns {names} differ between runs of one size and tokens: the setting of least mean"
        f" loss is read, and {len(reading.table) - len(keep)} runs of other settings are left out"
    )
    reading.values = {k: v[keep] for k, v in reading.values.items()}
    reading.table = [reading.table[i] for i in keep]


def _drop_small_letters(reading: _Reading) -> None:
    """Ignore columns n and d of layers and widths if the other columns are enough."""
    for k in ("parameters", "tokens"):
        is_redundant_letter = (
            k in reading.values
            and len(reading.values) == len(COLUMNS)
            and len(reading.columns[k].name) == 1
        )
        if is_redundant_letter and reading.values[k].min() < FEWEST:
            reading.choices.append(
                f"column {reading.columns[k].name!r} is too small for {k}: they follow from the"
                " compute"
            )
            del reading.values[k]
            del reading.columns[k]


def _complete(reading: _Reading) -> None:
    """Compute missing parameters or tokens from C = 6 N D, and check the scale of all columns."""
    values = reading.values
    with_unit = _columns_with_unit(reading)
    for k, other in (("parameters", "tokens"), ("tokens", "parameters")):
        if k not in values:
            values[k] = values["compute"] / (FLOPS_PER_PARAMETER_TOKEN * values[other])
    _check_smallest(reading)
    _check_ratio(reading, with_unit)
    _check_compute(reading)
    _check_loss(reading)


def _columns_with_unit(reading: _Reading) -> set[str]:
    """Return the columns whose unit is stated by their name, by their cells or by `units`."""
    known = set(reading.units)
    for k, column in reading.columns.items():
        cells = [record.get(column.name) for _, record in reading.table]
        has_suffixes = all(isinstance(c, str) and c.strip()[-1:].isalpha() for c in cells)
        names_unit = "unit" in column.description or column.description.startswith("in ")
        if names_unit or ", in " in column.description or has_suffixes:
            known.add(k)
    return known


def _check_smallest(reading: _Reading) -> None:
    """Raise `ValueError` if parameters or tokens are too small, and so in thousands or more."""
    values = reading.values
    # A column that was computed shows a wrong scale of the compute.
    origins = {k: k if k in reading.columns else "compute" for k in ("parameters", "tokens")}
    small = [
        k
        for k, origin in origins.items()
        if origin not in reading.units and values[k].min() < FEWEST
    ]
    if not small:
        return
    cells = []
    powers = {}
    for k in small:
        i = int(np.argmin(values[k]))
        origin = origins[k]
        name = reading.columns[origin].name
        cell = f"column {name!r} is {values[origin][i]:.5g} in row {reading.rows[i]}"
        if origin != k:
            cell += f", which leaves {values[k][i]:.3g} {k}"
        cells.append(cell)
        powers[origin] = f"1e{_likely_power(k, values, small)}"
    if all(np.median(values[k]) >= FEWEST for k in small):
        remedy = "other rows are on another scale: correct the cell"
    else:
        units = ", ".join(f"{k!r}: {power}" for k, power in powers.items())
        remedy = f"they count thousands, millions or billions: pass units={{{units}}}, for example"
    raise ValueError(
        f"{' and '.join(cells)}: fewer than {FEWEST:g} {' and '.join(small)} are not a run;"
        f" {remedy}"
    )


def _check_ratio(reading: _Reading, with_unit: Container[str]) -> None:
    """Raise `ValueError` if tokens per parameter, or a column, are implausible in the median."""
    values = reading.values
    chosen = reading.columns
    # Two of three columns determine the third, with its scale.
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
        raise ValueError(
            f"columns {chosen[present[0]].name!r} and {chosen[present[1]].name!r} are {first} and"
            f" {second} in row {reading.rows[i]}, {ratio[i]:.2g} tokens per parameter, outside"
            f" {low:g} to {high:g}: they are not on one scale; pass units={{'tokens': 1e3}} or 1e6"
            f" or 1e9, for example, or confirm the numbers with units={{{confirmed}}}"
        )
    for k in ("parameters", "tokens"):
        smallest = SMALLEST_MEDIAN[k]
        if k in chosen and np.median(values[k]) < smallest:
            raise ValueError(
                f"column {chosen[k].name!r} is {np.median(values[k]):.4g} in the median, while runs"
                f" have {smallest:.0e} {k} or more: is it in thousands or millions? Pass"
                f" units={{{k!r}: 1e6}}, for example, or confirm both columns with units of 1"
            )


def _check_compute(reading: _Reading) -> None:
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
        f" {names['tokens']!r} = {d[i]:.4g}: a unit is wrong; correct the cell, or pass"
        f" units={{'compute': {1 / ratio[i]:.0e}}}"
    )


def _check_loss(reading: _Reading) -> None:
    """Raise `ValueError` if most losses are worse than guessing."""
    loss = reading.values["loss"]
    if "loss" not in reading.units and np.median(loss) > LARGEST_LOSS:
        raise ValueError(
            f"column {reading.columns['loss'].name!r} is {loss[0]:.4g} in row {reading.rows[0]},"
            f" and above {LARGEST_LOSS:g} nats in most rows: worse than guessing; for hundredths"
            " pass units={'loss': 0.01}, name a perplexity so, and confirm nats with {'loss': 1}"
        )


def _likely_power(name: str, values: Mapping[str, Array], small: Sequence[str]) -> int:
    """Return the power of ten of the unit with which there are about 20 tokens per parameter."""
    if name == "parameters":
        other = "tokens"
        default = 6
    else:
        other = "parameters"
        default = 9
    if other in small:
        return default
    if name == "tokens":
        usual = values[other] * USUAL_TOKENS_PER_PARAMETER
    else:
        usual = values[other] / USUAL_TOKENS_PER_PARAMETER
    power = 3 * round(float(np.median(np.log10(usual / values[name]))) / 3)
    return power if power > 0 else default


def _several_datasets(reading: _Reading) -> list[str]:
    """Return a warning if the rows are of several data sets, whose losses follow different laws."""
    for name in reading.present:
        if name.lower().rsplit(".")[-1] in WORDS["sets"]:
            seen = dict.fromkeys(str(record.get(name)) for _, record in reading.table)
            if 1 < len(seen) <= len(reading.table) / 4:
                return [
                    f"column {name!r} names {len(seen)} sets of runs ({list_some(seen)}), which are"
                    f" read as one: select one with where={{{name!r}: {next(iter(seen))!r}}}"
                ]
    return []


def _explain(runs: Runs, reading: _Reading) -> list[str]:
    """Return a line per column on its source, range and unit, and one on unused columns."""
    lines = []
    for k in COLUMNS:
        values = getattr(runs, k)
        column = reading.columns.get(k)
        if column:
            origin = repr(column.name)
            description = column.description
        else:
            origin = "6 N D" if k == "compute" else "C / 6 of the other"
            description = ""
        if k == "parameters" and column and not description:
            description = "taken as given: total or non-embedding, the name does not say"
        if k == "loss" and "bits" not in description:
            description = f"nats, of {description}" if description else "nats"
        line = f"  {k:<11}{origin:<24}{values.min():.4g} to {values.max():.4g}"
        lines.append(f"{line}  ({description})" if description else line)
    used = {column.name for column in reading.columns.values()}
    if unused := [name for name in reading.present if name and name not in used]:
        lines.append(f"  not used: {list_some(unused)}")
    return lines


def _suspicions(
    runs: Runs, compute_ratio: Array, columns: Mapping[str, Column], tolerance: float
) -> list[str]:
    """Return the warnings about values that are possible but unlikely.

    `compute_ratio` is C / (6 N D) of each run.
    """
    rows = np.array(runs.rows)
    messages = []
    off = np.abs(compute_ratio - 1) > tolerance
    if off.any():
        worst = compute_ratio[np.argmax(np.abs(np.log(compute_ratio)))]
        messages.append(
            f"column {columns['compute'].name!r} is not 6 N D within {tolerance:.0%} in rows"
            f" {list_some(rows[off])} (worst: {worst:.3g} times); a parametric fit uses N and D, an"
            " IsoFLOP fit takes budgets from this column"
        )
    high = runs.loss > LARGEST_LOSS
    if high.any():
        messages.append(
            f"column {columns['loss'].name!r} is above {LARGEST_LOSS:g} nats in rows"
            f" {list_some(rows[high])}: worse than guessing; is it a perplexity, or diverged?"
        )
    table = np.stack([runs.parameters, runs.tokens, runs.loss], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    repeated = np.arange(len(runs)) != first[inverse.reshape(-1)]
    if repeated.any():
        messages.append(
            f"rows {list_some(rows[repeated])} repeat earlier ones in"
            f" {sorted(c.name for c in columns.values())}: if they are counted twice, every"
            " interval is too narrow; drop them unless they are separate runs"
        )
    return messages

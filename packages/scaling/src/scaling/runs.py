"""Training runs: parameters, tokens, compute and final loss, loaded from tables of any format.

Two of parameters, tokens and compute are enough, because the third follows from C = 6 N D. Values
that a fit cannot use, such as columns on a wrong scale, are refused with their row and column.
"""

import math
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaling.equality import ComparesArrays
from scaling.tables.cells import (
    NumberedCells,
    blank_cells,
    list_some,
    parse_numbers,
    require_unambiguous,
    shows_decimals,
    uses_decimal_comma,
)
from scaling.tables.derived import TIMES, token_factors
from scaling.tables.names import (
    SWEEP_NAMES,
    WORDS,
    Column,
    Match,
    ambiguity,
    match_columns,
    split_words,
)
from scaling.tables.source import Table, read_table
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

#: Columns that show that N or D may be counted in two ways: the quantity, and how to name it.
COUNTS = {
    "experts": ("parameters", "active_params", "may count all parameters or the active ones"),
    "epochs": ("tokens", "train_tokens", "may count the data set or the tokens of all epochs"),
}

#: Rows of one size are the checkpoints of a training, rather than trainings of several lengths, if
#: there are this many at even distances in tokens, or this many at any distance.
EVEN_CHECKPOINTS = 4
ANY_CHECKPOINTS = 20

#: Relative differences up to which sizes, tokens and compute of two runs count as equal.
SAME_SIZE = 0.01
SAME_TOKENS = 0.05


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
        rows = tuple(np.array(self.rows)[index].tolist())
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
        codes = cluster(self.compute, tolerance)
        groups = [np.flatnonzero(codes == code) for code in range(codes.max(initial=-1) + 1)]
        return [self[group[np.argsort(self.compute[group], kind="stable")]] for group in groups]


def cluster(values: Array, tolerance: float, longest: float = 2.0) -> NDArray[np.intp]:
    """Return the index of the group of each value: see `Runs.budgets`.

    `longest` is the largest ratio of two values of a group that is wider than `tolerance`.
    """
    order = np.argsort(values, kind="stable")
    logs = np.log(values[order])
    width = math.log1p(tolerance)
    is_start = np.diff(logs, prepend=-np.inf) > width
    for group in np.split(np.arange(len(logs)), np.flatnonzero(is_start[1:]) + 1):
        if len(group) and logs[group[-1]] - logs[group[0]] > math.log(longest):
            start = logs[group[0]]
            for i in group:
                if logs[i] > start + width:
                    start = logs[i]
                    is_start[i] = True
    codes = np.empty(len(values), np.intp)
    codes[order] = np.cumsum(is_start) - 1
    return codes


def below_cuts(axis: Array, fractions: Sequence[float]) -> list[NDArray[np.bool_]]:
    """Return masks of the runs up to each quantile of an axis such as compute.

    Runs within 1 % of a cut are below it, because budgets are often equal only up to rounding.
    Equal masks are returned once, and a mask of all runs is left out.
    """
    masks: dict[int, NDArray[np.bool_]] = {}
    for cut in np.quantile(axis, fractions, method="lower"):
        below = axis <= cut * 1.01
        masks[int(below.sum())] = below
    masks.pop(len(axis), None)
    return list(masks.values())


@dataclass
class _Reading:
    """The state of reading a table: its rows, the chosen columns and their values."""

    name: str
    table: Table
    #: The chosen columns by our names.
    columns: dict[str, Column]
    #: The user's unit by our names.
    units: Mapping[str, float]
    #: The user's decimal mark.
    decimal: str | None
    values: dict[str, Array] = field(default_factory=dict)
    #: Sentences about choices, for `Runs.explanation`.
    choices: list[str] = field(default_factory=list)
    #: Sentences about rows that were left out, also issued as warnings.
    exclusions: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        rows: list[int] = self.table.rows.tolist()
        return rows

    def select(self, which: NDArray[Any]) -> None:
        """Leave out the other rows."""
        self.table = self.table.select(which)
        self.values = {k: v[which] for k, v in self.values.items()}


def load_runs(
    source: str | Path | Mapping[str, ArrayLike] | Iterable[Mapping[str, Any]] | Any,
    *,
    delimiter: str | None = None,
    columns: Mapping[str, str] | None = None,
    units: Mapping[str, float] | None = None,
    where: Mapping[str, Any] | None = None,
    history: str | bool | None = None,
    decimal: Literal[".", ","] | None = None,
    tolerance: float = 0.1,
) -> Runs:
    """Load runs from CSV, JSON or JSONL, a data frame, a mapping of columns or records.

    The table needs a loss and two of parameters, tokens and compute. Cells may be 7B, 1.4T,
    49,893,420 or 3,2157. Data frames are those of pandas, polars and pyarrow. Exports of wandb,
    levanter, MLflow and TensorBoard (by tbparse) are read with their nested or long columns.
    `Runs.explanation` has a line on each choice that was made.

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
        decimal: The mark before the decimals of a number; by default it is detected.
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
    table = read_table(source, delimiter)
    total = len(table)
    table = table.where(where or {}, name)
    exclusions: list[str] = []
    table = keep_finished(table, where or {}, exclusions)
    if not len(table):
        raise ValueError("; ".join([f"{name} holds no runs", *exclusions]))
    columns = dict(columns or {})
    present = list(table.columns)
    if factors := token_factors(present, columns):
        columns["tokens"] = TIMES.join(factors)
        present.append(columns["tokens"])
    matched = match_columns(present, columns, name)
    reading = _Reading(name, table, matched.chosen, units or {}, decimal, exclusions=exclusions)
    _require_whole_counts(reading, columns)
    dataset_warnings = _several_datasets(reading)
    _drop_rows_without_loss(reading)
    reading.values, reading.choices = _parse_columns(reading, reading.columns)
    reading.choices = [*table.choices, *reading.choices]
    reading.choices += [f"rows where {k!r} is {v!r}" for k, v in (where or {}).items()]
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


def _require_whole_counts(reading: _Reading, named: Container[str]) -> None:
    """Raise `ValueError` if N may count experts that do not compute, or D the data of one epoch."""
    for name in reading.table.columns:
        ours, wanted, reason = COUNTS.get("".join(split_words(name)[-1:]), ("", "", ""))
        column = reading.columns.get(ours)
        if column is None or ours in named or "compute" in reading.columns:
            continue
        # Trained tokens already count every epoch, unlike the tokens of a data set.
        is_whole = "active" in column.kinds or (ours == "tokens" and "data" not in column.name)
        if not is_whole and (parse_numbers(reading.table.cells(name), False) > 1).any():
            raise ValueError(
                f"column {column.name!r} {reason} ({name!r} is above 1): add a column {wanted!r},"
                f" or confirm with columns={{{ours!r}: {column.name!r}}}"
            )


def _drop_rows_without_loss(reading: _Reading) -> None:
    """Leave out the rows whose loss is blank."""
    column = reading.columns["loss"].name
    blank = blank_cells(reading.table.columns[column])
    if blank.all():
        raise ValueError(f"{reading.name} holds no runs with a loss in column {column!r}")
    if blank.any():
        reading.exclusions.append(
            f"column {column!r} is blank in {blank.sum()} rows"
            f" ({list_some(reading.table.rows[blank])}): left out"
        )
        reading.table = reading.table.select(~blank)


def _parse_columns(
    reading: _Reading, columns: Mapping[str, Column]
) -> tuple[dict[str, Array], list[str]]:
    """Return columns in parameters, tokens, FLOPs and nats, and how their cells were read."""
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
    reading: _Reading,
    columns: Mapping[str, Column],
    factors: Mapping[str, Sequence[str]],
    cells: Mapping[str, NumberedCells],
    comma: bool,
) -> None:
    """Raise `ValueError` for numbers whose mark may separate thousands or start decimals.

    Counts, such as steps, have no decimals, so the marks of other columns say nothing about them.
    Numbers without a unit are not checked, because one of their readings is refused by its scale.
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
        return _parse_columns(reading, {ours: column})[0][ours]
    except ValueError:
        return None


def _keep_last_rows(reading: _Reading, history: str | bool | None) -> None:
    """Leave out all but the last row of each run, if the table is a history of runs."""
    if history is False:
        reading.choices.append("every row is a run, by history=False")
        return
    if isinstance(history, str) and history not in reading.table.columns:
        present = list(reading.table.columns)
        raise ValueError(f"history={history!r} is not a column; they are {present}")
    ends = _history(reading, history)
    if ends is None:
        return
    column, last = ends
    reading.exclusions.append(
        f"column {column!r} names a run in several rows: the row with the most tokens is the end of"
        f" each run; {len(reading.table) - len(last)} earlier ones are left out"
    )
    reading.select(last)


def _history(reading: _Reading, named: str | bool | None) -> tuple[str, NDArray[np.intp]] | None:
    """Return the column that identifies the runs of a history, and the index of each run's end.

    Return None if the table is not a history. Raise `ValueError` if it may be one, because its rows
    look like the checkpoints of trainings, and it has no column of names that differs in every row.
    """
    values = reading.values
    progress = values["tokens"] if "tokens" in values else values["compute"]
    if "parameters" in values:
        size = values["parameters"]
    else:
        # Sizes that follow from compute and tokens are equal up to rounding.
        size = np.exp(np.round(np.log(values["compute"] / values["tokens"]), 4))
    names = {
        "".join(c for c in name.lower() if c.isalnum()): name for name in reading.table.columns
    }
    rising = [names[c] for c in WORDS["progress_columns"] if c in names]
    candidates = [names[c] for c in WORDS["run_columns"] if c in names]
    if rising:
        candidates += [names[c] for c in ("name", "experiment") if c in names]
    if isinstance(named, str):
        candidates = [named]
    has_names = False
    for column in candidates:
        codes = reading.table.codes([column])
        has_names = has_names or codes.max() + 1 == len(codes)
        order = np.lexsort((progress, codes))
        is_same_run = np.diff(codes[order]) == 0
        # Rows of one size with different tokens are the same training at different times.
        is_later = (np.diff(size[order]) == 0) & (np.diff(progress[order]) > 0)
        if is_same_run.any() and is_later[is_same_run].all():
            return column, np.sort(order[np.append(~is_same_run, True)])
    if isinstance(named, str) and not has_names:
        raise ValueError(
            f"history={named!r}: the rows of a run must have one size and different tokens"
        )
    if not has_names:
        _refuse_checkpoints(reading, rising, size, progress)
    return None


def _refuse_checkpoints(
    reading: _Reading, rising: Sequence[str], size: Array, progress: Array
) -> None:
    """Raise `ValueError` if the rows look like the checkpoints of trainings."""
    evidence = [f"column {name!r}" for name in rising if _rises(reading, name, size, progress)]
    if not evidence and _has_checkpoints(size, progress):
        evidence = ["the number of rows"]
    if evidence:
        raise ValueError(
            f"{evidence[0]} rises with the tokens of each size: the rows may be a history of fewer"
            " runs, or a run each; name the column of runs with history='…', or pass history=False"
            " if every row is the end of a run"
        )


def _rises(reading: _Reading, column: str, size: Array, progress: Array) -> bool:
    """Return True if at least half of all rows share their size with a lower value of a column."""
    steps = parse_numbers(reading.table.cells(column), False)
    order = np.lexsort((steps, size))
    rises = (np.diff(steps[order]) > 0) & (np.diff(progress[order]) > 0)
    later = int((rises & (np.diff(size[order]) == 0)).sum())
    return len(steps) >= 4 and later >= len(steps) / 2


def _has_checkpoints(size: Array, progress: Array) -> bool:
    """Return True if most rows share their size with many tokens, or with evenly spaced tokens.

    Trainings to several lengths usually have few of them, at even distances in the logarithm.
    """
    rows_like_checkpoints = 0
    order = np.argsort(size, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(size[order])) + 1):
        tokens = np.unique(progress[group])
        if len(tokens) < EVEN_CHECKPOINTS:
            continue
        steps = np.diff(tokens)
        is_even = np.abs(steps / np.median(steps) - 1) < 0.02
        if is_even.mean() >= 0.75 or len(tokens) >= ANY_CHECKPOINTS:
            rows_like_checkpoints += len(group)
    return rows_like_checkpoints >= len(size) / 2


def _keep_best_settings(reading: _Reading) -> None:
    """Leave out all but the best setting of each N and D, if the table is a sweep of settings.

    The settings are learning rates, batch sizes and similar. Repetitions of the best setting, such
    as seeds, are all kept, because the least loss of several repetitions is biased.
    """
    # A column `eta` is usually the time that remains, and `b` may be anything.
    sweeps = {*SWEEP_NAMES["rate"], *SWEEP_NAMES["batch_size"], *WORDS["settings"]}
    used = {column.name for column in reading.columns.values()}
    names = []
    sets = []
    for name in reading.table.columns:
        words = split_words(name)
        stems = {"".join(words[i:]) for i in range(len(words))}
        if name not in used and stems & (sweeps - {"eta", "b"}):
            names.append(name)
        elif words and words[-1] in WORDS["sets"]:
            sets.append(name)
    if not names:
        return
    tolerances = {"parameters": SAME_SIZE, "tokens": SAME_TOKENS, "compute": SAME_TOKENS}
    keys = []
    for k, tolerance in tolerances.items():
        if k in reading.values:
            keys.append(cluster(reading.values[k], tolerance, 1 + tolerance))
    keys += [reading.table.codes([name]) for name in sets]
    design = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    setting = reading.table.codes(names)
    pairs, of_row = np.unique(np.stack([design, setting]), axis=1, return_inverse=True)
    of_row = of_row.reshape(-1)
    mean = np.bincount(of_row, reading.values["loss"]) / np.bincount(of_row)
    by_mean = np.lexsort((mean, pairs[0]))
    best = by_mean[np.diff(pairs[0][by_mean], prepend=-1) > 0]
    keep = np.flatnonzero(np.isin(of_row, best))
    if len(keep) == len(design):
        return
    reading.exclusions.append(
        f"columns {names} differ between runs of one size and tokens: the setting of least mean"
        f" loss is read, and {len(design) - len(keep)} runs of other settings are left out"
    )
    reading.select(keep)


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
        cells = reading.table.columns.get(column.name, np.zeros(1))
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
    for name in reading.table.columns:
        if name.lower().rsplit(".")[-1] in WORDS["sets"]:
            seen = dict.fromkeys(map(str, reading.table.cells(name)))
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
    used = {f for c in reading.columns.values() for f in (c.name, *c.name.split(TIMES))}
    if unused := [name for name in reading.table.columns if name and name not in used]:
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
    table = np.stack([runs.parameters, runs.tokens, runs.loss])
    order = np.lexsort(table)
    repeated = np.zeros(len(runs), dtype=bool)
    repeated[order[1:]] = (np.diff(table[:, order]) == 0).all(0)
    if repeated.any():
        messages.append(
            f"rows {list_some(rows[repeated])} repeat earlier ones in"
            f" {sorted(c.name for c in columns.values())}: if they are counted twice, every"
            " interval is too narrow; drop them unless they are separate runs"
        )
    return messages

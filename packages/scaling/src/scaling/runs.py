"""Training runs: parameters, tokens, compute and final loss, loaded from tables of any format.

Two of parameters, tokens and compute are enough, because the third follows from C = 6 N D. A value
that a fit cannot use raises an error that names its row and column.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaling.equality import ComparesArrays
from scaling.tables.cells import list_some
from scaling.tables.columns import (
    COMPUTE_TOLERANCE,
    compare_columns,
    parse_columns,
    require_active_parameters,
    require_tokens_of_all_epochs,
    require_tokens_of_text,
)
from scaling.tables.grouping import cluster
from scaling.tables.history import keep_last_rows
from scaling.tables.matching import TIMES, find_token_factors, match_columns
from scaling.tables.names import Column
from scaling.tables.scales import LARGEST_LOSS, complete_quantities
from scaling.tables.selection import (
    drop_rows_without_loss,
    keep_best_settings,
    require_one_data_set,
)
from scaling.tables.source import read_table
from scaling.tables.states import (
    flag_complete_runs,
    keep_finished,
    require_no_marks,
    require_no_summaries,
)
from scaling.tables.table import Reading
from scaling.units import COLUMNS, FLOPS_PER_PARAMETER_TOKEN, Array

#: Minimum relative gap in compute between two budgets.
BUDGET_TOLERANCE = 0.05


class ScalingWarning(UserWarning):
    """A warning that a result is less certain than it looks, because of the data or the method."""


@dataclass(frozen=True, eq=False, repr=False)
class Runs(ComparesArrays):
    """A table of finished runs, in which each column is a float64 vector of the same length.

    `load_runs` reads runs from files, records or columns, and checks them. Raises `ValueError` if
    the columns differ in length.
    """

    parameters: Array
    tokens: Array
    compute: Array
    loss: Array
    #: The line of each run in its source, or its position counted from 1.
    rows: tuple[int, ...]
    #: Text on the source, unit and range of each column, excluded rows and unused columns.
    explanation: str = ""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in (*COLUMNS, "rows")}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"expected columns of one length, got {lengths}")

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, selection: int | slice | NDArray[Any] | Sequence[int]) -> "Runs":
        """Return the runs that a position, a slice, a mask or a list of positions selects."""
        index = np.atleast_1d(np.arange(len(self))[selection])
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        rows = tuple(np.array(self.rows)[index].tolist())
        return Runs(**columns, rows=rows, explanation=self.explanation)

    def without_highest(self, count: int) -> "Runs":
        """Return the runs without the `count` highest losses, which are the likeliest outliers.

        Raises `ValueError` unless 0 <= count < number of runs.
        """
        if not 0 <= count < len(self):
            raise ValueError(f"expected 0 <= count < {len(self)} runs, got count = {count}")
        lower = self[np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count])]
        if count:
            line = f"the {count} highest losses are left out: {len(lower)} runs"
            lower = replace(lower, explanation="\n".join(filter(None, [lower.explanation, line])))
        return lower

    def budgets(self, tolerance: float = BUDGET_TOLERANCE) -> "list[Runs]":
        """Return the runs grouped by compute, in ascending order.

        A relative gap wider than `tolerance` starts a new group. Runs spread evenly over decades
        may have no such gaps. Therefore a group that spans more than a factor of two is divided
        into groups that span at most `tolerance`. Raises `ValueError` if `tolerance` is negative.
        """
        if not tolerance >= 0:
            raise ValueError(f"expected tolerance >= 0, got tolerance = {tolerance}")
        codes = cluster(self.compute, tolerance)
        groups = [np.flatnonzero(codes == code) for code in range(codes.max(initial=-1) + 1)]
        return [self[group[np.argsort(self.compute[group], kind="stable")]] for group in groups]


def require_runs(runs: object) -> None:
    """Raise `TypeError` unless an argument is a table of runs."""
    if not isinstance(runs, Runs):
        raise TypeError(f"expected the result of load_runs, got {type(runs).__name__}")


def load_runs(
    source: str | Path | Mapping[str, ArrayLike] | Iterable[Mapping[str, Any]] | Any,
    *,
    columns: Mapping[str, str] | None = None,
    units: Mapping[str, float] | None = None,
    where: Mapping[str, Any] | None = None,
    history: str | Literal[False] | None = None,
    ignore: str | Sequence[str] = (),
) -> Runs:
    """Return the runs of a table: CSV, JSON or JSONL, a data frame, columns or records.

    The table needs a loss and two of parameters, tokens and compute. Cells may be 7B, 1.4T
    or 49,893,420. Data frames may be from pandas, polars or pyarrow. Exports of wandb, levanter,
    MLflow and TensorBoard (by tbparse) may have nested columns or one row per metric. Losses in
    bits per token and perplexities are converted to nats; losses in bits per byte or character are
    not. `Runs.explanation` describes each choice that was made.

    Args:
        source: The table: a path, a data frame, a mapping of names to columns, or an iterable of
            records.
        columns: Names of columns that are not recognized, such as `{"loss": "eval/ce"}`. Names such
            as `N`, `params_B`, `train_tokens`, `Training FLOP` and `eval/loss` are recognized.
            Tokens may be a product, as in `{"tokens": "steps * batch_size * seq_len"}`.
        units: Factors by which cells without a unit are multiplied, such as `{"parameters": 1e6}`.
            A factor of 1 confirms numbers on an unusual scale.
        where: Column values that select rows, such as `{"dataset": "c4"}`. A number also selects
            cells that write it differently, such as 3e-4 for 0.0003.
        history: The column of run names, if the table has several rows per run; the last row of
            each run is kept. False if every row is a run. By default, a column of run names is
            detected.
        ignore: One or more columns that are not read at all, for example because they only
            distinguish repetitions.

    These rows are left out, and a warning reports their number:

    - rows without a loss;
    - runs that did not finish, according to a column such as `state`, `status`, `failed` or
      `exit_code`, to a `step` more than 5 % below `max_steps`, or to their `progress`;
    - all but the last row of each run of a history;
    - at each N and D, all runs except those of the best setting, such as a learning rate.

    Raises:
        OSError: The file cannot be read.
        TypeError: The source is not a table.
        ValueError: A value is missing, not a number, not positive or not finite, or a column is on
            the wrong scale. Ambiguous tables also raise it: columns with the same meaning that
            differ, several data sets or optimizers, unknown states or settings, tokens that may be
            those of one epoch, and rows that may be checkpoints or summaries. The message names the
            column, the row if there is one, and the remedy.

    A `ScalingWarning` also reports compute that differs from 6 N D by more than 10 %, a loss above
    14 nats, and repeated rows.
    """
    if unknown := set(units or {}) - set(COLUMNS):
        raise ValueError(f"expected names among {list(COLUMNS)} in units=…, got {sorted(unknown)}")
    for column, unit in (units or {}).items():
        if not (isinstance(unit, Real) and 0 < unit < math.inf):
            raise ValueError(f"expected units[{column!r}] to be a positive number, got {unit!r}")
    name = str(source) if isinstance(source, str | Path) else "the table"
    table = read_table(source)
    total = len(table)
    table = table.select_where(where or {}, name).drop_columns(ignore, name)
    exclusions: list[str] = []
    started = table
    table = keep_finished(table, where or {}, exclusions)
    if not len(table):
        raise ValueError("; ".join([f"{name} contains no runs", *exclusions]))
    columns = dict(columns or {})
    present = list(table.columns)
    if factors := find_token_factors(present, columns):
        columns["tokens"] = TIMES.join(factors)
        present.append(columns["tokens"])
    matched = match_columns(present, columns, name)
    reading = Reading(name, table, matched.chosen, units or {}, exclusions=exclusions)
    require_active_parameters(reading, columns)
    require_tokens_of_text(reading)
    drop_rows_without_loss(reading)
    require_no_summaries(reading.table)
    require_no_marks(reading.table)
    reading.values = parse_columns(reading, reading.columns)
    reading.choices = [*table.choices, *reading.choices]
    reading.choices += [f"rows where {k!r} is {v!r}" for k, v in (where or {}).items()]
    reading.choices += compare_columns(reading, matched)
    is_history = keep_last_rows(reading, history)
    require_tokens_of_all_epochs(reading, columns, is_history)
    reading.select(flag_complete_runs(reading.table, reading.exclusions, reading.choices))
    require_one_data_set(reading)
    keep_best_settings(reading, reading.table if is_history else started)
    complete_quantities(reading)
    expected = FLOPS_PER_PARAMETER_TOKEN * reading.values["parameters"] * reading.values["tokens"]
    values = {"compute": expected, **reading.values}
    for message in reading.exclusions:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    runs = Runs(
        parameters=values["parameters"],
        tokens=values["tokens"],
        compute=values["compute"],
        loss=values["loss"],
        rows=tuple(reading.rows),
    )
    for message in _describe_unlikely_values(runs, runs.compute / expected, reading.columns):
        warnings.warn(message, ScalingWarning, stacklevel=2)
    lines = [f"{len(runs)} of {total} rows of {name}", *_explain(runs, reading)]
    lines += [f"  chosen: {choice}" for choice in reading.choices]
    return replace(runs, explanation="\n".join([*lines, *reading.exclusions]))


def _explain(runs: Runs, reading: Reading) -> list[str]:
    """Return one line per column on its source, range and unit, and one line on unused columns."""
    lines = []
    for quantity in COLUMNS:
        values = getattr(runs, quantity)
        column = reading.columns.get(quantity)
        if column:
            origin = repr(column.name)
            description = column.description
        else:
            formulas = {"compute": "6 N D", "parameters": "C / (6 D)", "tokens": "C / (6 N)"}
            origin = formulas[quantity]
            description = ""
        if quantity == "parameters" and column and not description:
            description = "the column name does not show whether this is total or non-embedding"
        if quantity == "loss" and "bits" not in description and "nats" not in description:
            description = f"nats, of {description}" if description else "nats"
        line = f"  {quantity:<11}{origin:<23} {values.min():.4g} to {values.max():.4g}"
        lines.append(f"{line}  ({description})" if description else line)
    used = {f for c in reading.columns.values() for f in (c.name, *c.name.split(TIMES))}
    if unused := [name for name in reading.table.columns if name and name not in used]:
        lines.append(f"  not used: {list_some(unused)}")
    return lines


def _describe_unlikely_values(
    runs: Runs, compute_ratio: Array, columns: Mapping[str, Column]
) -> list[str]:
    """Return a warning for each kind of value that is possible but unlikely.

    `compute_ratio` is C / (6 N D) of each run.
    """
    rows = np.array(runs.rows)
    messages = []
    off = np.abs(compute_ratio - 1) > COMPUTE_TOLERANCE
    if off.any():
        worst = compute_ratio[np.argmax(np.abs(np.log(compute_ratio)))]
        messages.append(
            f"column {columns['compute'].name!r} is not 6 N D within {COMPUTE_TOLERANCE:.0%} in"
            f" rows {list_some(rows[off])} (worst: {worst:.3g} times); a parametric fit uses N and"
            " D, an IsoFLOP fit takes budgets from this column"
        )
    high = runs.loss > LARGEST_LOSS
    if high.any():
        messages.append(
            f"column {columns['loss'].name!r} is above {LARGEST_LOSS:g} nats in rows"
            f" {list_some(rows[high])}, which is worse than guessing; check whether it is a"
            " perplexity, or whether the runs diverged"
        )
    # Few rows have the loss of another row, so sorting only these rows is fast.
    _, code, count = np.unique(runs.loss, return_inverse=True, return_counts=True)
    equal = np.flatnonzero(count[code] > 1)
    table = np.stack([runs.parameters, runs.tokens, runs.loss])[:, equal]
    order = np.lexsort(table)
    repeated = np.zeros(len(runs), dtype=bool)
    repeated[equal[order[1:]]] = (np.diff(table[:, order]) == 0).all(0)
    if repeated.any():
        messages.append(
            f"rows {list_some(rows[repeated])} repeat earlier ones in"
            f" {sorted(c.name for c in columns.values())}: if they are counted twice, every"
            " interval is too narrow; drop them unless they are separate runs"
        )
    return messages

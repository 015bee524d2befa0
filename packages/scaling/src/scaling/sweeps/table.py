"""Sweeps from tables of runs with a learning rate, a batch size and a final loss."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scaling.runs import ScalingWarning
from scaling.sweeps.sweep import Sweep, build_sweep
from scaling.tables.cells import flag_blank_cells, list_some, parse_numbers, require_unambiguous
from scaling.tables.columns import parse_positive
from scaling.tables.grouping import SAME_SETTING, SAME_SIZE, SAME_TOKENS, cluster, encode_settings
from scaling.tables.matching import format_ambiguity
from scaling.tables.names import (
    SWEEP_NAMES,
    WORDS,
    find_set_word,
    is_current_step,
    is_planned_steps,
    is_setting_name,
    recognize,
    split_words,
)
from scaling.tables.selection import ROWS_PER_SETTING
from scaling.tables.source import read_table
from scaling.tables.states import (
    flag_complete_runs,
    flag_diverged,
    is_progress_column,
    keep_finished,
    require_no_marks,
    require_no_summaries,
)
from scaling.tables.table import Table
from scaling.units import Array

#: Cells of a loss that mean that the run diverged.
DIVERGED = ("nan", "inf", "infinity", "diverged")

#: Names of columns that identify a single run rather than a group of repetitions.
RUN_IDS = ("run", "runid", "runuuid", "uid", "trialid")

# Note [Thresholds of divergence and of equal rates]
# In 600 sweeps like those of `test_diverged_runs_are_found_in_generated_sweeps`, a jump of 0.35
# finds 89 % of the diverged runs and marks 0.8 % of the other runs. A jump of 0.5 finds 59 % and
# marks 0.6 %. A jump of 0.2 finds no more and marks 1.5 %. At a jump of 0.5, a ratio of 3, not 4,
# marks 2.6 times as many of the other runs, and a ratio of 6 finds 54 % of the diverged runs. In
# 100 generated sweeps of three seeds, one of which has rates of three digits, values of `SAME_RATE`
# from 0.01 to 0.2 merge the rates of all seeds in every sweep. 0.003 does so in only 69.

#: A run may have diverged if its log loss exceeds the lowest by more than `DIVERGENCE_JUMP` and by
#: more than `DIVERGENCE_RATIO` times the rise at an equal distance on the other side of the best
#: rate. See Note [Thresholds of divergence and of equal rates].
DIVERGENCE_JUMP = 0.35
DIVERGENCE_RATIO = 4.0

#: Rates with at most this relative difference count as one rate. Noise exceeds the difference of
#: their losses, and grids have steps of more than 5 %. Merging may change a best rate by as much.
SAME_RATE = 0.01

#: The (row, loss) pairs of every run, by (batch size, rate).
RunsBySetting = dict[tuple[float, float], list[tuple[int, float]]]


def fit_sweep(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    ignore: str | Sequence[str] = (),
) -> Sweep:
    """Return the sweep of a table whose rows have a rate, a batch size and a final loss.

    Runs at one batch size and rate are repetitions; rates that differ by at most 1 % are equal. The
    k-th runs of all rates are one repetition. The order is that of a column such as `seed`, or
    otherwise that of the rows. Rows without a loss are left out, and so are runs that neither
    finished nor diverged.

    A rate at which any run diverged is left out at the batch size of this run, and a warning counts
    the diverged runs. A run has diverged if its loss is nan, inf or "diverged". A loss of nan is
    missing instead if a column of states reports that the run is not over, or was stopped from
    outside. A run at the best rate or above has also diverged if its loss is more than 42 % above
    the least loss, and if its rise in log loss is more than four times the rise below the best
    rate. Both rises are measured at an equal distance in log rate.

    Args:
        source: A CSV, JSON, DataFrame, mapping of columns or records, as for `load_runs`.
        columns: The names of the columns "rate", "batch_size" and "loss", if they are unusual.
        where: Values of columns by which rows are selected.
        ignore: The column or columns that are not read at all, such as the host of a repetition.

    Raises:
        ValueError: A cell is not valid, or the rows have several settings, such as two model sizes,
            each of which has a separate best rate. `where` selects one setting, and `fit_sweeps`
            fits all of them.
    """
    table, chosen, exclusions = _read(source, columns or {}, where or {}, ignore)
    _require_one_setting(table, chosen)
    return _fit(table, chosen, exclusions)


def fit_sweeps(
    source: Any,
    by: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    ignore: str | Sequence[str] = (),
) -> dict[tuple[str, ...], Sweep]:
    """Return one sweep per setting, where the columns `by` distinguish the settings.

    The keys are tuples of text: `by=["N", "D"]` gives keys such as `("1e8", "2e9")`. The other
    arguments and the errors are those of `fit_sweep`. Also raises `ValueError` if the table does
    not have a column in `by`.
    """
    names = (by,) if isinstance(by, str) else tuple(by)
    table, chosen, exclusions = _read(source, columns or {}, where or {}, ignore)
    missing = [name for name in names if name not in table.columns]
    if missing or not names:
        raise ValueError(
            f"expected by to name columns among {sorted(table.columns)}, got by = {by!r}"
        )
    codes = encode_settings(table, names)
    sweeps = {}
    for code in range(codes.max() + 1):
        group = table.select(codes == code)
        _require_one_setting(group, chosen)
        key = tuple(str(group.get_cells(name)[0]) for name in names)
        sweeps[key] = _fit(group, chosen, exclusions)
    return sweeps


def _read(
    source: Any,
    columns: Mapping[str, str],
    where: Mapping[str, Any],
    ignore: str | Sequence[str],
) -> tuple[Table, dict[str, str], list[str]]:
    """Return the runs of a table, the chosen columns, and sentences about runs that were left out.

    Runs that did not finish are left out unless they diverged: a diverged run has usually crashed.
    """
    table = read_table(source).select_where(where, "the table").drop_columns(ignore, "the table")
    chosen = _choose_columns(table, columns)
    exclusions: list[str] = []
    has_diverged = flag_diverged(table, chosen["loss"], DIVERGED)
    finished = keep_finished(table.select(~has_diverged), where, exclusions)
    selected = has_diverged | np.isin(table.rows, finished.rows)
    table = table.select(selected)
    if not len(table):
        raise ValueError("; ".join(["the table contains no runs", *exclusions]))
    require_no_summaries(table)
    require_no_marks(table)
    if len(finished):
        complete = finished.rows[flag_complete_runs(finished, exclusions, [])]
        has_diverged = has_diverged[selected]
        table = table.select(has_diverged | np.isin(table.rows, complete))
    for message in exclusions:
        warnings.warn(message, ScalingWarning, stacklevel=3)
    return table, chosen, exclusions


def _choose_columns(table: Table, named: Mapping[str, str]) -> dict[str, str]:
    if unknown := set(named) - set(SWEEP_NAMES):
        raise ValueError(
            f"expected names among {list(SWEEP_NAMES)} in columns=…, got {sorted(unknown)}"
        )
    present = list(table.columns)
    chosen = {}
    for quantity, usual_names in SWEEP_NAMES.items():
        if quantity in named:
            likely = [name for name in present if name == named[quantity]]
        else:
            likely = [name for name in present if _normalize(name) in usual_names]
        if len(likely) > 1:
            raise ValueError(format_ambiguity(quantity, likely))
        if not likely:
            raise ValueError(
                f"expected a column for the {quantity}, got {present}; pass"
                f" columns={{{quantity!r}: '…'}}"
            )
        chosen[quantity] = likely[0]
    return chosen


def _require_one_setting(table: Table, chosen: Mapping[str, str]) -> None:
    """Raise `ValueError` if rows are a history or have several sizes, lengths or other settings."""
    # A diverged run may have stopped early.
    with_loss = table.select(np.isfinite(parse_numbers(table.get_cells(chosen["loss"]))))
    for name in table.columns:
        if _normalize(name) in RUN_IDS and _has_repeated_runs(table, name, chosen):
            raise ValueError(
                f"column {name!r} names a run in several rows, so the rows are a history: keep the"
                " last row of each run, whose loss is the final one"
            )
        if _is_step_count(name) and len(with_loss) and _is_setting(name, with_loss, chosen):
            raise ValueError(
                f"column {name!r} differs between rows of one batch size, so the rows may be a"
                " history or runs of several lengths: keep the last row of each run, with the"
                " largest rate of the run, or confirm that every row is a training run of the same"
                f" length with ignore=[{name!r}]"
            )
    settings = {}
    for name in table.columns:
        is_read = name in chosen.values() or _is_step_count(name)
        is_repetition = _normalize(name) in WORDS["repetitions"]
        rows = with_loss if is_progress_column(name, table) else table
        if not (is_read or is_repetition) and len(rows) and _is_setting(name, rows, chosen):
            settings[name] = list(dict.fromkeys(map(str, rows.get_cells(name))))
    if not settings:
        return
    sizes = [n for n in settings if recognize(n, "parameters") or recognize(n, "tokens")]
    name = sizes[0] if sizes else next(iter(settings))
    values = settings[name]
    raise ValueError(
        f"column {name!r} takes {len(values)} values ({list_some(values)}), but a sweep is of one"
        f" setting, because each setting has its own best rate; pass where={{{name!r}:"
        f" {values[0]!r}}}, fit each setting with fit_sweeps(…, by={sizes or name!r}), or read all"
        f" as repetitions with ignore=[{name!r}]; all such columns: {list_some(settings)}"
    )


def _has_repeated_runs(table: Table, name: str, chosen: Mapping[str, str]) -> bool:
    """Return True if run names repeat and each name has a single rate and batch size.

    Numbers that restart at every rate or batch size identify repetitions instead.
    """
    runs = table.encode_columns([name])
    pairs = np.stack([runs, encode_settings(table, [chosen["batch_size"], chosen["rate"]])])
    count = int(runs.max()) + 1
    return count < len(runs) and np.unique(pairs, axis=1).shape[1] == count


def _is_setting(name: str, table: Table, chosen: Mapping[str, str]) -> bool:
    """Return True if a column distinguishes settings, such as sizes, rather than repetitions."""
    is_quantity = True  # A number of a quantity is a setting even if no two rows are equal.
    is_named = bool(find_set_word(name)) or is_setting_name(name)
    if recognize(name, "parameters"):
        codes = encode_settings(table, [name], SAME_SIZE)
        within = np.zeros(len(table), np.intp)
    elif recognize(name, "tokens") or recognize(name, "compute") or _is_step_count(name):
        # With a fixed number of steps, larger batches use more tokens, so compare within one size.
        codes = encode_settings(table, [name], SAME_TOKENS)
        within = encode_settings(table, [chosen["batch_size"]])
    elif is_named and np.isnan(parse_numbers(table.get_cells(name))).any():
        # Unlike a warmup, an optimizer or a data set is not chosen by the rate or the batch size.
        is_quantity = False
        codes = table.encode_columns([name])
        within = np.zeros(len(table), np.intp)
    else:
        is_quantity = False
        codes = table.encode_columns([name])
        within = encode_settings(table, [chosen["batch_size"], chosen["rate"]])
    pairs = np.unique(np.stack([within, codes]), axis=1)
    differs = pairs.shape[1] > within.max() + 1
    # Names, dates and measurements differ in almost every row; a setting has few values.
    return differs and (is_quantity or (codes.max() + 1) * ROWS_PER_SETTING <= len(table))


def _is_step_count(name: str) -> bool:
    """Return True if a name is that of the steps of a training run, done or planned."""
    is_known = "".join(split_words(name)) in WORDS["step_columns"]
    return is_known or is_current_step(name) or is_planned_steps(name)


def _fit(table: Table, chosen: Mapping[str, str], exclusions: Sequence[str]) -> Sweep:
    messages = [*exclusions]
    # A blank cell means that the loss is missing, but "nan" means that the run diverged.
    blank = flag_blank_cells(table.columns[chosen["loss"]])
    blank &= [str(cell).strip().lower() != "nan" for cell in table.get_cells(chosen["loss"])]
    if blank.all():
        raise ValueError(f"no row has a loss in column {chosen['loss']!r}")
    if blank.any():
        messages.append(
            f"column {chosen['loss']!r} is blank in {blank.sum()} rows"
            f" ({list_some(table.rows[blank])}): left out"
        )
        warnings.warn(messages[-1], ScalingWarning, stacklevel=3)
    runs = _read_runs(table.select(~blank), chosen)
    diverged = _mark_diverged(runs)
    if diverged:
        count = sum(map(len, runs.values()))
        messages.append(
            f"column {chosen['loss']!r} says that {len(diverged)} of {count} runs diverged (rows"
            f" {list_some(diverged)}): their rates are left out at these batch sizes"
        )
        warnings.warn(messages[-1], ScalingWarning, stacklevel=3)
    sizes = np.array(sorted({size for size, _ in runs}))
    rates = np.array(sorted({rate for _, rate in runs}))
    log_losses = np.full((len(sizes), max(map(len, runs.values())), len(rates)), np.nan)
    for (size, rate), losses in runs.items():
        i = int(np.searchsorted(sizes, size))
        j = int(np.searchsorted(rates, rate))
        log_losses[i, : len(losses), j] = np.log([loss for _, loss in losses])
    sweep = build_sweep("table", "table", rates, sizes, log_losses)
    read = ", ".join(f"{quantity} by {name!r}" for quantity, name in chosen.items())
    lines = filter(None, [read, *messages, sweep.explanation])
    return replace(sweep, explanation="\n".join(lines))


def _read_runs(table: Table, chosen: Mapping[str, str]) -> RunsBySetting:
    """Return (row, loss) pairs by (batch size, rate); the loss is inf if the run diverged."""
    rows = table.rows.tolist()
    require_unambiguous(chosen["batch_size"], rows, table.get_cells(chosen["batch_size"]), ".")
    cells = table.get_cells(chosen["loss"])
    numbers = parse_numbers(cells, is_count=False)
    numbers[[str(cell).strip().lower() in DIVERGED for cell in cells]] = math.inf
    for i in np.flatnonzero(~(numbers > 0)):
        raise ValueError(
            f"column {chosen['loss']!r} must be positive, but row {rows[i]}: {cells[i]!r}"
        )
    runs: RunsBySetting = {}
    sizes = _merge_close(parse_positive(table, chosen["batch_size"], 1.0, True), SAME_SETTING)
    rates = _merge_close(parse_positive(table, chosen["rate"], 1.0, False), SAME_RATE)
    # The k-th run of each rate is the k-th repetition, so the runs are in the order of their seeds.
    seeds = [name for name in table.columns if _normalize(name) in WORDS["repetitions"]]
    order = range(len(table))
    if seeds:
        order = np.argsort(encode_settings(table, seeds), kind="stable").tolist()
    for k in order:
        setting = (float(sizes[k]), float(rates[k]))
        runs.setdefault(setting, []).append((rows[k], float(numbers[k])))
    return runs


def _merge_close(values: Array, tolerance: float) -> Array:
    """Return values in which numbers within `tolerance` of each other are set to the smallest."""
    codes = cluster(values, tolerance, 1 + tolerance)
    least = np.full(len(values), np.inf)
    np.minimum.at(least, codes, values)
    merged: Array = least[codes]
    return merged


def _mark_diverged(runs: RunsBySetting) -> list[int]:
    """Set the losses of diverged runs to inf, and return the sorted rows of all diverged runs.

    Loss rises smoothly on both sides of the best rate. A run at or above the best rate diverged if
    two conditions hold. Its log loss exceeds the lowest by more than `DIVERGENCE_JUMP`. The rise is
    also more than `DIVERGENCE_RATIO` times the rise at an equal distance below the best rate.
    """
    for size in {size for size, _ in runs}:
        curve = {rate: losses for (batch_size, rate), losses in runs.items() if batch_size == size}
        least = {}
        for rate, pairs in curve.items():
            finite = [loss for _, loss in pairs if loss < math.inf]
            if finite:
                least[rate] = min(finite)
        if not least:
            continue
        best = min(least, key=lambda rate: least[rate])
        rises = {
            math.log(best / rate): math.log(loss / least[best])
            for rate, loss in least.items()
            if rate < best
        }
        for rate, pairs in curve.items():
            if rate < best:
                continue
            limit = max(
                DIVERGENCE_JUMP, DIVERGENCE_RATIO * _interpolate_rise(math.log(rate / best), rises)
            )
            marked = []
            for row, loss in pairs:
                has_diverged = math.log(loss / least[best]) > limit
                marked.append((row, math.inf if has_diverged else loss))
            runs[size, rate] = marked
    return sorted(row for losses in runs.values() for row, loss in losses if loss == math.inf)


def _interpolate_rise(distance: float, rises: Mapping[float, float]) -> float:
    """Return the rise of the log loss at a log-rate distance from the best rate.

    `rises` maps log-rate distances below the best rate to rises. Between these, the rise is
    interpolated linearly. Beyond the largest, it grows with the square of the distance. It is inf
    if `rises` is empty, because the best rate is then the lowest.
    """
    if not rises:
        return math.inf
    largest = max(rises)
    if distance > largest:
        return rises[largest] * (distance / largest) ** 2
    distances = sorted(rises)
    return float(np.interp(distance, [0.0, *distances], [0.0, *(rises[d] for d in distances)]))


def _normalize(name: str) -> str:
    """Return the last part of a path in lower case, without punctuation."""
    return "".join(c for c in name.rsplit(".")[-1].lower() if c.isalnum())

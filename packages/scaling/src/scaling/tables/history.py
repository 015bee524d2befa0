"""Histories: tables with several rows per training run, of which the last one is read."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import list_some, parse_numbers
from scaling.tables.columns import parse_columns
from scaling.tables.grouping import cluster
from scaling.tables.names import WORDS, is_rate_name, split_words
from scaling.tables.selection import list_setting_columns
from scaling.tables.table import Reading
from scaling.units import Array

#: Rows of one size may be checkpoints of training runs, rather than runs of several lengths, in two
#: cases. In the first case, at least `EVEN_CHECKPOINTS` of their token counts are evenly spaced. In
#: the second case, they have at least `ANY_CHECKPOINTS` token counts with any spacing.
EVEN_CHECKPOINTS = 4
ANY_CHECKPOINTS = 20

#: Largest error of an evenly spaced token count, as a fraction of the spacing. Rounding to three
#: digits changes a count by up to 0.5 %. For the fourth count, this is 2 % of the spacing.
EVEN_TOLERANCE = 0.02

#: A name that ends with the step, epoch or tokens of a checkpoint, such as run0-step100.
CHECKPOINT_NAME = re.compile(r".*(step|iter|iteration|ckpt|checkpoint|epoch|tokens?)[-_=:]?\d+$")

#: A run may continue after its last loss. Its final loss is missing if it continues to more than
#: this multiple of the tokens of the last loss. Evaluation losses are logged at only a few percent
#: of the steps.
MISSING_END = 1.25

#: Largest relative difference that rounding may cause between the sizes C / (6 D) of one run's
#: rows. A number of three digits has an error of up to 0.5 %. Without run names, rows are compared
#: more strictly, because a large table has many sizes that differ by only one percent.
SIZE_TOLERANCE = 0.02
STRICT_SIZE_TOLERANCE = 1e-4

#: A run may have been resumed if its first row is later than this multiple of the mean spacing of
#: its rows.
LATE_START = 1.5


def keep_last_rows(reading: Reading, history: object) -> bool:
    """Drop all but the last row of each run if the table is a history; return True if it is.

    Raises `ValueError` if `history` is invalid, or if it is unclear whether each row is a run.
    """
    if history is False:
        reading.choices.append("every row is a run, by history=False")
        return False
    if not (history is None or isinstance(history, str)):
        raise ValueError(
            "expected history to be the column of run names, or False if every row is a run, got"
            f" history = {history!r}"
        )
    if history is not None and history not in reading.table.columns:
        present = list(reading.table.columns)
        raise ValueError(f"history={history!r} is not a column; the columns are {present}")
    progress = reading.values["tokens" if "tokens" in reading.values else "compute"]
    size = _get_sizes(reading, SIZE_TOLERANCE)
    ends = _find_run_ends(reading, history, size, progress)
    if ends is None:
        return False
    column, last = ends
    resumed = _list_resumed_runs(reading, column, size, progress)
    _replace_rates_by_peaks(reading, column)
    reading.exclusions.append(
        f"column {column!r} names a run in several rows: the row with the most tokens is the end of"
        f" each run; {len(reading.table) - len(last)} earlier ones are left out"
    )
    if resumed:
        reading.exclusions.append(
            f"column {column!r}: {list_some(resumed)} start where another run of the same size"
            " stops, so they may be resumed trainings under a new name; each name counts as a run:"
            " leave out the earlier parts, which are not the end of a training"
        )
    reading.select(last)
    _report_missing_ends(reading, column)
    return True


def _get_sizes(reading: Reading, tolerance: float) -> Array:
    """Return the parameters of each row, or other numbers that distinguish the sizes."""
    values = reading.values
    if "parameters" in values:
        return values["parameters"]
    # Without parameters, rows of one size have the same ratio of compute to tokens, up to rounding.
    return cluster(values["compute"] / values["tokens"], tolerance).astype(np.float64)


def _list_resumed_runs(reading: Reading, column: str, size: Array, progress: Array) -> list[str]:
    """Return the names of runs that start where another run of the same size stops."""
    codes = reading.table.encode_columns([column])
    count = np.bincount(codes)
    first = np.full(len(count), np.inf)
    np.minimum.at(first, codes, progress)
    last = np.zeros(len(count))
    np.maximum.at(last, codes, progress)
    size_of_run = np.zeros(len(count))
    size_of_run[codes] = size
    largest_gap = LATE_START * (last - first) / np.maximum(count - 1, 1)
    names = dict.fromkeys(map(str, reading.table.get_cells(column)))
    resumed = []
    for i, name in enumerate(names):
        if count[i] > 1 and first[i] > largest_gap[i]:
            is_part = (size_of_run == size_of_run[i]) & (first < first[i]) & (last < last[i])
            if (is_part & (last >= first[i] - largest_gap[i])).any():
                resumed.append(name)
    return resumed


def _replace_rates_by_peaks(reading: Reading, column: str) -> None:
    """Replace the learning rates of each run by their maximum, the peak of its schedule.

    Runs with different peaks may have the same last rate, such as 0.
    """
    codes = reading.table.encode_columns([column])
    columns = dict(reading.table.columns)
    for name in reading.table.columns:
        if not is_rate_name(name):
            continue
        rates = parse_numbers(reading.table.get_cells(name))
        peaks = np.full(codes.max() + 1, -np.inf)
        np.fmax.at(peaks, codes, rates)
        if np.isfinite(peaks).all() and (peaks[codes] != rates).any():
            columns[name] = peaks[codes]
            reading.choices.append(f"{name!r} changes within runs: the largest of each run is read")
    reading.table = replace(reading.table, columns=columns)


def _report_missing_ends(reading: Reading, column: str) -> None:
    """Add a message about runs without a loss at the end, for example because they diverged."""
    progress = "tokens" if "tokens" in reading.values else "compute"
    if reading.without_loss is None:
        return
    rows = replace(reading, table=reading.without_loss)
    try:
        later = parse_columns(rows, {progress: reading.columns[progress]})[progress]
    except ValueError:
        return  # Rows without a loss may have no tokens either.
    trained: dict[str, float] = {}
    for name, value in zip(map(str, rows.table.get_cells(column)), later.tolist(), strict=True):
        trained[name] = max(value, trained.get(name, 0.0))
    ends = zip(reading.table.get_cells(column), reading.values[progress].tolist(), strict=True)
    early = [name for name, end in ends if trained.get(str(name), 0.0) > end * MISSING_END]
    if early:
        reading.exclusions.append(
            f"column {reading.columns['loss'].name!r} is blank or nan at the end of runs"
            f" {list_some(early)}: their last loss is not the final one; leave out the runs that"
            " diverged"
        )


def _find_run_ends(
    reading: Reading, named: str | None, size: Array, progress: Array
) -> tuple[str, NDArray[np.intp]] | None:
    """Return the column that identifies the runs of a history, and the index of each run's end.

    Return None if the table is not a history, and append the reason to `reading.choices`. Raises
    `ValueError` if the rows look like checkpoints of training runs and no column has a different
    name in every row. Also raises `ValueError` if a run repeats some of its token counts, or if the
    `named` column does not identify runs.
    """
    names = {
        "".join(c for c in name.lower() if c.isalnum()): name for name in reading.table.columns
    }
    rising = [names[c] for c in (*WORDS["step_columns"], *WORDS["time_columns"]) if c in names]
    checkpoints = [names[c] for c in WORDS["checkpoint_columns"] if c in names]
    candidates = [names[c] for c in WORDS["run_columns"] if c in names]
    if rising:
        candidates += [names[c] for c in ("name", "experiment") if c in names]
    if named is not None:
        candidates = [named]
    unique_names = ""
    repeated = ""
    for column in candidates:
        _require_one_text_per_run(reading, column)
        codes = reading.table.encode_columns([column])
        is_unique = codes.max() + 1 == len(codes)
        # A column `id` of numbers may be an index or the key of a database.
        is_index = (
            column.lower() in ("id", "uid") and str(reading.table.get_cells(column)[0]).isdigit()
        )
        if is_unique and not is_index and not _has_checkpoint_names(reading, column):
            unique_names = column
        order = np.lexsort((progress, codes))
        is_same_run = np.diff(codes[order]) == 0
        # Rows of one size with different tokens are one training run at different times.
        has_one_size = bool((np.diff(size[order]) == 0)[is_same_run].all())
        is_later = (np.diff(progress[order]) > 0)[is_same_run]
        if is_same_run.any() and has_one_size and is_later.all():
            return column, np.sort(order[np.append(~is_same_run, True)])
        if has_one_size and is_later.any():
            repeated = repeated or column
    if repeated and not unique_names:
        _raise_repeated_tokens(reading, repeated, progress)
    if named is not None and not unique_names:
        raise ValueError(
            f"history={named!r}: the rows of a run must have one size and different tokens; if the"
            " tokens are those of the whole training, pass only the last row of each run"
        )
    if unique_names:
        reason = f"column {unique_names!r} has a different name in every row"
    else:
        size = _get_sizes(reading, STRICT_SIZE_TOLERANCE)
        _require_no_checkpoints(reading, rising + checkpoints, size, progress)
        _require_different_tokens(reading, candidates, size, progress)
        reason = (
            "no column of run names, steps or times shows a history, and fewer than half of the"
            f" rows belong to sizes with {EVEN_CHECKPOINTS} evenly spaced token counts, or with"
            f" {ANY_CHECKPOINTS}; if the rows of a size are checkpoints of one training, pass a"
            " column of run names as history='…'"
        )
    reading.choices.append(f"every row is a run: {reason}")
    return None


def _require_different_tokens(
    reading: Reading, candidates: Sequence[str], size: Array, progress: Array
) -> None:
    """Raise `ValueError` if rows of one run name have one size and equal tokens.

    Such rows are accepted if the table has a column such as `seed`. They are also accepted if the
    rows of each name have different settings, unless the loss falls at every row within a name.
    """
    last_words = {"".join(split_words(name)[-1:]) for name in reading.table.columns}
    if last_words & {*WORDS["repetitions"]}:
        return
    for column in candidates:
        codes = reading.table.encode_columns([column])
        order = np.argsort(codes, kind="stable")
        is_same_run = np.diff(codes[order]) == 0
        differs = (np.diff(size[order]) != 0) | (np.diff(progress[order]) != 0)
        if not is_same_run.any() or differs[is_same_run].any():
            continue
        settings = list_setting_columns(reading)
        # A history may log a decaying rate, but its losses fall from row to row.
        falls = bool((np.diff(reading.values["loss"][order]) < 0)[is_same_run].all())
        if (
            falls
            or not settings
            or len({*reading.table.encode_columns([column, *settings])}) < len(codes)
        ):
            _raise_repeated_tokens(reading, column, progress)


def _require_one_text_per_run(reading: Reading, column: str) -> None:
    """Raise `ValueError` if two names differ only in a last word such as train or val."""
    parts = ("train", *WORDS["held_out"])
    part = re.compile(f"(.*[^a-z]|)(?:{'|'.join(parts)})")
    by_stem: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(str, reading.table.get_cells(column))):
        # Matching a million names takes seconds, so the ending is checked first.
        if name.lower().endswith(parts) and (match := part.fullmatch(name.lower())):
            by_stem.setdefault(match[1], []).append(name)
    for names in by_stem.values():
        if len(names) > 1:
            raise ValueError(
                f"column {column!r} names {names}, which may be losses of one run on several texts:"
                " select those of one with where=…, or pass history=False if every row is a run"
            )


def _raise_repeated_tokens(reading: Reading, column: str, progress: Array) -> NoReturn:
    """Raise `ValueError` with two rows of a run that have the same tokens."""
    codes = reading.table.encode_columns([column])
    order = np.lexsort((progress, codes))
    is_repeated = (np.diff(codes[order]) == 0) & (np.diff(progress[order]) == 0)
    first = order[int(np.argmax(is_repeated))]
    second = order[int(np.argmax(is_repeated)) + 1]
    name = reading.table.get_cells(column)[first]
    raise ValueError(
        f"column {column!r} names {name!r} in rows {reading.rows[first]} and {reading.rows[second]}"
        " with the same tokens, as after a restart or if the tokens are those of the whole"
        " training: keep one of these rows, or pass history=False if every row is a run"
    )


def _require_no_checkpoints(
    reading: Reading, rising: Sequence[str], size: Array, progress: Array
) -> None:
    """Raise `ValueError` if the rows look like checkpoints of training runs."""
    rises = [name for name in rising if _is_rising(reading, name, size, progress)]
    if rises:
        evidence = f"column {rises[0]!r} rises with the tokens of each size"
    elif _has_checkpoints(size, progress):
        evidence = (
            f"most sizes have {EVEN_CHECKPOINTS} evenly spaced token counts, or {ANY_CHECKPOINTS}"
            " with any spacing"
        )
    else:
        return
    raise ValueError(
        f"{evidence}: the rows may be a history of fewer runs, or a run each; name the column of"
        " runs with history='…', or pass history=False if every row is the end of a run"
    )


def _is_rising(reading: Reading, column: str, size: Array, progress: Array) -> bool:
    """Return True if a column rises with the tokens of each size, for at least half of the rows.

    Rows that differ only in a seed or another setting count once. At least four rows are needed.
    """
    cells = reading.table.get_cells(column)
    steps = parse_numbers(cells)
    if np.isnan(steps).all():  # names of checkpoints, such as step_1000
        steps = parse_numbers([re.sub(r"^.*?(\d*)\D*$", r"\1", str(cell)) for cell in cells])
    size, steps, progress = np.unique(np.stack([size, steps, progress]), axis=1)
    order = np.lexsort((steps, size))
    gain = np.diff(progress[order])
    # If every row has the tokens of the whole training, steps rise at equal tokens.
    is_later = gain > 0 if "time" in column.lower() else gain >= 0
    rises = (np.diff(steps[order]) > 0) & is_later
    later = int((rises & (np.diff(size[order]) == 0)).sum())
    return len(steps) >= 4 and later >= len(steps) / 2


def _has_checkpoint_names(reading: Reading, column: str) -> bool:
    """Return True if at least half of the cells end with a step, epoch or number of tokens."""
    cells = reading.table.get_cells(column)
    matches = sum(CHECKPOINT_NAME.fullmatch(str(cell).lower()) is not None for cell in cells)
    return matches >= len(cells) / 2


def _has_checkpoints(size: Array, progress: Array) -> bool:
    """Return True if at least half of the rows have sizes with many or evenly spaced token counts.

    Separate runs of several lengths usually have few token counts, evenly spaced in logarithm.
    """
    rows_like_checkpoints = 0
    order = np.argsort(size, kind="stable")
    _, starts, counts = np.unique(size[order], return_index=True, return_counts=True)
    is_long = counts >= min(ANY_CHECKPOINTS, EVEN_CHECKPOINTS)
    for start, count in zip(starts[is_long], counts[is_long], strict=True):
        group = order[start : start + count]
        tokens = np.unique(progress[group])
        if len(tokens) >= ANY_CHECKPOINTS or _has_even_spacing(tokens):
            rows_like_checkpoints += len(group)
    return rows_like_checkpoints >= len(size) / 2


def _has_even_spacing(tokens: Array) -> bool:
    """Return True if `EVEN_CHECKPOINTS` of the sorted token counts are evenly spaced.

    Other counts may lie between them, such as those of a training of another length.
    """
    for start, second in itertools.combinations(tokens.tolist(), 2):
        step = second - start
        expected = start + step * np.arange(2, EVEN_CHECKPOINTS)
        nearest = np.abs(tokens - expected[:, None]).min(1)
        if (nearest <= EVEN_TOLERANCE * step).all():
            return True
    return False

"""Rows that are left out: those without a loss, and all but the best setting of a sweep.

Columns that may count other quantities than the N and D of C = 6 N D are refused.
"""

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import blank_cells, list_some, parse_numbers
from scaling.tables.derived import TIMES
from scaling.tables.grouping import SAME_SIZE, SAME_TOKENS, cluster, setting_codes
from scaling.tables.names import SWEEP_NAMES, WORDS, split_words
from scaling.tables.table import Reading

#: Number of rows that are searched for unknown settings, because a million would take seconds.
MOST_ROWS = 5000

#: Columns that show that N or D may be counted in two ways: the quantity and its description.
COUNTS = {
    "experts": ("parameters", "active_params", "may count all parameters or the active ones"),
    "epochs": ("tokens", "train_tokens", "may count the data set or the tokens of all epochs"),
}


def require_whole_counts(reading: Reading, named: Container[str]) -> None:
    """Raise `ValueError` for an N that may include idle experts, or a D of only one epoch.

    C = 6 N D needs the active parameters and all trained tokens.
    """
    for name in reading.table.columns:
        ours, wanted, reason = COUNTS.get(_counted(name), ("", "", ""))
        column = reading.columns.get(ours)
        if column is None or ours in named:
            continue
        # Trained tokens already count every epoch, unlike the tokens of a data set.
        is_whole = "active" in column.kinds or (ours == "tokens" and "data" not in column.name)
        if is_whole or not (parse_numbers(reading.table.cells(name)) > 1).any():
            continue
        raise ValueError(
            f"column {column.name!r} {reason} ({name!r} is above 1): add a column {wanted!r}, leave"
            f" this one out, or confirm with columns={{{ours!r}: {column.name!r}}}"
        )


def _counted(name: str) -> str:
    """Return the key of `COUNTS` that a name such as n_expert or expert_count stands for."""
    words = split_words(name)
    if "per" in words:
        return ""
    stem = "".join(words).removesuffix("count")
    return next((key for key in COUNTS if stem.endswith((key, key[:-1]))), "")


def drop_rows_without_loss(reading: Reading) -> None:
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
        reading.without_loss = reading.table.select(blank)
        reading.table = reading.table.select(~blank)


def keep_best_settings(reading: Reading) -> None:
    """Leave out all but the best setting of each N and D, if the table is a sweep of settings.

    The settings are learning rates, batch sizes and similar. Repetitions of the best setting, such
    as seeds, are all kept, because the least loss of several repetitions is biased.
    """
    names, sets = _setting_columns(reading)
    if not names:
        rows = np.arange(min(len(reading.table), MOST_ROWS))
        _report_unknown_settings(reading, rows, _designs(reading, sets, rows), sets)
        return
    rows = np.arange(len(reading.table))
    design = _designs(reading, sets, rows)
    setting = setting_codes(reading.table, names)
    pairs, of_row = np.unique(np.stack([design, setting]), axis=1, return_inverse=True)
    of_row = of_row.reshape(-1)
    mean = np.bincount(of_row, reading.values["loss"]) / np.bincount(of_row)
    by_mean = np.lexsort((mean, pairs[0]))
    best = by_mean[np.diff(pairs[0][by_mean], prepend=-1) > 0]
    keep = np.flatnonzero(np.isin(of_row, best))
    if len(keep) < len(design):
        reading.exclusions.append(
            f"columns {names} differ between runs of one size and tokens: the setting of least mean"
            f" loss is read, and {len(design) - len(keep)} runs of other settings are left out"
        )
    _report_unknown_settings(reading, rows[:MOST_ROWS], of_row[:MOST_ROWS], [*names, *sets])
    reading.select(keep)


def _designs(reading: Reading, sets: Sequence[str], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return for each selected row the index of its combination of size, tokens and data set."""
    tolerances = {"parameters": SAME_SIZE, "tokens": SAME_TOKENS, "compute": SAME_TOKENS}
    keys = []
    for k, tolerance in tolerances.items():
        if k in reading.values:
            keys.append(cluster(reading.values[k][rows], tolerance, 1 + tolerance))
    table = reading.table.select(rows)
    keys += [table.codes([name]) for name in sets]
    codes: NDArray[np.intp] = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    return codes


def _setting_columns(reading: Reading) -> tuple[list[str], list[str]]:
    """Return the columns of settings that differ between runs, and the columns of data sets."""
    # A column `eta` is usually the remaining time, and `b` may be anything.
    known = {*SWEEP_NAMES["rate"], *SWEEP_NAMES["batch_size"], *WORDS["settings"]} - {"eta", "b"}
    used = {column.name for column in reading.columns.values()}
    names = []
    sets = []
    for name in reading.table.columns:
        words = split_words(name)
        stems = {"".join(words[i:]) for i in range(len(words))}
        if name not in used and stems & known:
            if setting_codes(reading.table, [name]).any():
                names.append(name)
        elif name not in used and _names_a_set(name):
            sets.append(name)
    return names, sets


def _names_a_set(name: str) -> bool:
    """Return True if a column distinguishes data sets or vocabularies, as `dataset_name` does."""
    words = split_words(name)
    if words[-2:] == ["vocab", "size"]:
        return True
    if words[-1:] in (["name"], ["id"]):
        words = words[:-1]
    return bool(words) and words[-1] in WORDS["sets"]


def _report_unknown_settings(
    reading: Reading,
    rows: NDArray[np.intp],
    groups: NDArray[np.intp],
    known: Sequence[str],
) -> None:
    """Add a message on columns with few values that differ between runs of one setting.

    Such runs are read as repetitions, but the column may be a setting under an unusual name.
    `groups` contains the index of the setting of each row in `rows`.
    """
    is_repeated = np.bincount(groups) > 1
    if not is_repeated.any():
        return
    table = reading.table.select(rows)
    read = {part for column in reading.columns.values() for part in column.name.split(TIMES)}
    unknown = []
    for name in table.columns:
        is_repetition = "".join(split_words(name)[-1:]) in WORDS["repetitions"]
        if name in known or name in read or is_repetition:
            continue
        codes = setting_codes(table, [name])
        values = np.bincount(np.unique(np.stack([groups, codes]), axis=1)[0])
        differs = (values > 1)[is_repeated]
        if (codes.max() + 1) * 3 <= len(table) and differs.mean() >= 0.5:
            unknown.append(name)
    if unknown:
        reading.exclusions.append(
            f"columns {unknown} differ between runs of one size and tokens, which are read as"
            f" repetitions: select one setting with where={{{unknown[0]!r}: …}} if they are not"
        )


def datasets_message(reading: Reading) -> list[str]:
    """Return a warning if the rows use several data sets, whose losses follow different laws."""
    used = {column.name for column in reading.columns.values()}
    for name in reading.table.columns:
        if name not in used and _names_a_set(name):
            seen = dict.fromkeys(map(str, reading.table.cells(name)))
            if 1 < len(seen) <= len(reading.table) / 4:
                return [
                    f"column {name!r} names {len(seen)} sets of runs ({list_some(seen)}), which are"
                    f" read as one: select one with where={{{name!r}: {next(iter(seen))!r}}}"
                ]
    return []

"""Exclusion of rows without a loss, and of all but the best setting of a sweep.

Tables are refused if the rows use several data sets, or if a method such as the optimizer changes
with the size or the tokens. They are also refused if a column with an unusual name may distinguish
several settings.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import flag_blank_cells, list_some, parse_numbers
from scaling.tables.grouping import (
    DESIGN_TOLERANCES,
    SAME_SIZE,
    SAME_TOKENS,
    bin_designs,
    choose_searched_rows,
    cluster,
    encode_designs,
    encode_settings,
)
from scaling.tables.matching import TIMES, classify_factor
from scaling.tables.names import (
    WORDS,
    find_set_word,
    is_method_name,
    is_rate_name,
    is_setting_name,
    split_words,
)
from scaling.tables.states import flag_diverged, parse_flags
from scaling.tables.table import Reading, Table

# Note [Thresholds of settings]
# Names, dates and measurements have more values than a setting, and notes about single runs differ
# in few groups. On 300 tables like those of `test_settings_are_found_in_generated_tables`, the
# values below find 95 % of the settings. They misclassify dates as settings in 8 % of the tables,
# and notes in 4 %. With 2 rows per value, dates are misclassified in 42 %. With 4, two settings of
# three runs each are not found. A fraction of 0.25 misclassifies notes in 39 % of the tables, and
# 0.75 finds 64 % of the settings.

#: An unread column may be a setting if its values repeat `ROWS_PER_SETTING` times on average, and
#: if it differs within at least `SETTING_FRACTION` of the groups of runs with equal known settings
#: and one design (size, tokens and compute). See Note [Thresholds of settings].
ROWS_PER_SETTING = 3
SETTING_FRACTION = 0.5

#: Largest number of different cells in a column of two values, such as 0, 0.0, False and 1.
MAX_NOTATIONS = 6


def drop_rows_without_loss(reading: Reading) -> None:
    """Leave out the rows whose loss is blank or nan; raise `ValueError` if no row has a loss."""
    column = reading.columns["loss"].name
    blank = flag_blank_cells(reading.table.columns[column])
    if blank.all():
        raise ValueError(f"{reading.name} contains no runs with a loss in column {column!r}")
    if blank.any():
        reading.exclusions.append(
            f"column {column!r} is blank or nan in {blank.sum()} rows"
            f" ({list_some(reading.table.rows[blank])}): left out"
        )
        reading.without_loss = reading.table.select(blank)
        reading.table = reading.table.select(~blank)


def require_one_data_set(reading: Reading) -> None:
    """Raise `ValueError` if the rows use several data sets, whose losses follow different laws."""
    for name in _list_possible_settings(reading):
        word = find_set_word(name)
        if not word:
            continue
        codes = reading.table.encode_columns([name])
        count = int(codes.max()) + 1
        if count == 1:
            continue
        # Names that are all different, or mostly different labels, identify runs.
        names_runs = count == len(codes) or (word in WORDS["labels"] and count > len(codes) / 2)
        # Columns such as `experiment_name` may repeat the size of the model in words.
        if names_runs or (word in WORDS["labels"] and _is_quantity_label(reading, codes)):
            named = "runs" if names_runs else "sizes or budgets"
            reading.choices.append(f"column {name!r} names {named}, not several data sets")
            continue
        texts = list(dict.fromkeys(map(str, reading.table.get_cells(name))))
        raise ValueError(
            f"column {name!r} names {count} sets of runs ({list_some(texts)}), which may follow"
            f" different laws: select one with where={{{name!r}: {texts[0]!r}}}, or read all as one"
            f" with ignore=[{name!r}]"
        )


def _is_quantity_label(reading: Reading, codes: NDArray[np.intp]) -> bool:
    """Return True if each value of a column stands for one size, token count or compute."""
    for k, tolerance in DESIGN_TOLERANCES.items():
        if k in reading.values:
            groups = cluster(reading.values[k], tolerance, 1 + tolerance)
            num_pairs = np.unique(np.stack([codes, groups]), axis=1).shape[1]
            num_values = int(codes.max()) + 1
            num_groups = int(groups.max()) + 1
            if num_pairs == num_values == num_groups:
                return True
    return False


def keep_best_settings(reading: Reading, started: Table) -> None:
    """Leave out all but the best setting of each N and D, if the table is a sweep of settings.

    The settings are learning rates, batch sizes and similar. All repetitions of the best setting,
    such as seeds, are kept: the least loss of several seeds is too low by chance. The mean loss of
    the surviving seeds is also too low if another seed diverged. Therefore, a setting with a
    diverged seed is the best only if every setting of its size and tokens has one. `started`
    contains the runs before the unfinished runs were left out.

    Raises `ValueError` if another column may be a setting under an unusual name. Also raises
    `ValueError` if a method, such as the optimizer, changes from one size or number of tokens to
    another.
    """
    names = list_setting_columns(reading)
    if not names:
        searched = choose_searched_rows(bin_designs(reading))
        _require_known_settings(reading, searched, encode_designs(reading, searched), names)
        rows = np.arange(len(reading.table))
        _require_compared_methods(reading, rows, rows, names)
        return
    design = encode_designs(reading, np.arange(len(reading.table)))
    setting = encode_settings(reading.table, names)
    pairs, pair_of_row = np.unique(np.stack([design, setting]), axis=1, return_inverse=True)
    pair_of_row = pair_of_row.reshape(-1)
    mean = np.bincount(pair_of_row, reading.values["loss"]) / np.bincount(pair_of_row)
    diverged = np.zeros(len(mean), bool)
    diverged[pair_of_row[_flag_diverged_settings(reading, started, names)]] = True
    # The first setting of each design in this order is its best.
    order = np.lexsort((mean, diverged, pairs[0]))
    best = order[np.diff(pairs[0][order], prepend=-1) > 0]
    keep = np.flatnonzero(np.isin(pair_of_row, best))
    if len(keep) < len(design):
        condition = ", if possible without a loss of nan," if diverged.any() else ""
        reading.exclusions.append(
            f"columns {names} differ between runs: for each size and tokens, the setting of least"
            f" mean loss{condition} is read, and {len(design) - len(keep)} runs of other settings"
            " are left out"
        )
    searched = choose_searched_rows([pair_of_row])
    _require_known_settings(reading, searched, pair_of_row[searched], names)
    _require_compared_methods(reading, keep, design, names)
    reading.select(keep)


def _flag_diverged_settings(
    reading: Reading, started: Table, names: Sequence[str]
) -> NDArray[np.bool_]:
    """Return True for each row whose design and setting equal those of a run with a loss of nan.

    If no remaining run has the design of such a run, the flagged rows are those of its size and
    setting with at least its tokens. Designs in which a run with its seed remains are not flagged.
    """
    is_nan = flag_diverged(started, reading.columns["loss"].name, ("nan",))
    if not is_nan.any():
        return np.zeros(len(reading.table), bool)
    parts = {k: c.name.split(TIMES) for k, c in reading.columns.items() if k != "loss"}
    remains = np.isin(started.rows, reading.table.rows)
    keys = [encode_settings(started, part, DESIGN_TOLERANCES[k]) for k, part in parts.items()]
    designs = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    settings = encode_settings(started, names)
    codes = np.unique(np.stack([designs, settings]), axis=1, return_inverse=True)[1].reshape(-1)
    flags = np.isin(codes[remains], codes[is_nan])
    early = np.flatnonzero(is_nan & ~np.isin(designs, designs[remains]))
    if "parameters" not in parts or not len(early):
        return flags
    # A run that diverged at the tokens of no other run stopped early, so its planned tokens are
    # unknown. Its setting counts as diverged in all designs of its size with at least its tokens,
    # except in those that a run with its seed finished.
    sizes = encode_settings(started, parts["parameters"], SAME_SIZE)
    tokens = np.ones(len(started))
    for name in parts["tokens" if "tokens" in parts else "compute"]:
        tokens = tokens * parse_numbers(started.columns[name])
    # Blank tokens are compatible with each design.
    tokens[early] = np.nan_to_num(tokens[early], nan=0.0)
    groups = np.unique(np.stack([sizes, settings]), axis=1, return_inverse=True)[1].reshape(-1)
    seeds = _encode_seeds(started, codes, remains)
    may_diverge = np.zeros(len(started), bool)
    keys_of_early = np.stack([groups[early], seeds[early]])
    pairs, pair_of_early = np.unique(keys_of_early, axis=1, return_inverse=True)
    fewest_tokens = np.full(pairs.shape[1], np.inf)
    np.minimum.at(fewest_tokens, pair_of_early.reshape(-1), tokens[early])
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups.max() + 2))
    for (group, seed), fewest in zip(pairs.T, fewest_tokens, strict=True):
        rows = order[starts[group] : starts[group + 1]]
        rows = rows[remains[rows] & (tokens[rows] * (1 + SAME_TOKENS) >= fewest)]
        is_finished = np.isin(designs[rows], designs[rows[seeds[rows] == seed]])
        may_diverge[rows[~is_finished]] = True
    return flags | may_diverge[remains]


def _encode_seeds(
    started: Table, codes: NDArray[np.intp], remains: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Return the index of the seed of each row; -1 for unknown seeds of rows that remain.

    `codes` are the indices of designs and settings. If they differ between all rows that remain,
    the runs are not repeated, so they have one seed.
    """
    names = [name for name in started.columns if _is_repetition(name)]
    seeds = started.encode_columns(names) if names else np.zeros(len(started), np.intp)
    is_unknown = np.ones(len(started), bool)
    for name in names:
        is_unknown &= flag_blank_cells(started.columns[name])
    is_repeated = np.bincount(codes[remains]).max() > 1
    return np.where(remains & is_unknown & is_repeated, -1, seeds)


def _is_repetition(name: str) -> bool:
    """Return True if repetitions of one setting may differ in a column of this name."""
    return "".join(split_words(name)[-1:]) in WORDS["repetitions"]


def _encode_methods(reading: Reading, name: str) -> NDArray[np.intp]:
    """Return integer codes of the texts in a column, per row; zeros if all cells are numbers."""
    cells = reading.table.get_cells(name)
    if not np.isnan(parse_numbers(cells)).any():
        return np.zeros(len(cells), np.intp)
    texts = [str(cell).strip().lower() for cell in cells]
    return np.unique(texts, return_inverse=True)[1]


def _encode_switch(reading: Reading, name: str, keep: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the code of each row in a column that is a switch; zeros for other columns.

    A switch has two values in the kept rows: flags, 0 and another number, or numbers from 0 to 1,
    such as rates of dropout. A blank cell beside such numbers is 0. Counts, widths and learning
    rates may naturally follow the scale, so they are not switches. A switch matters if it follows
    the scale: see `_is_following_scale`.
    """
    none = np.zeros(len(reading.table), np.intp)
    last_word = {*split_words(name)[-1:]}
    if last_word & {"epoch", *WORDS["repetitions"]} or is_rate_name(name):
        return none
    # Each different cell is parsed once. Two values may be written in a few different notations.
    notations = reading.table.encode_columns([name])
    first_rows = np.unique(notations, return_index=True)[1]
    if len(first_rows) > MAX_NOTATIONS:
        return none
    cells = reading.table.columns[name][first_rows]
    numbers = parse_flags(cells)
    if np.nanmax(numbers, initial=0) <= 1:
        numbers[flag_blank_cells(cells)] = 0
    numbers = numbers[notations]
    values, codes, counts = np.unique(numbers[keep], return_inverse=True, return_counts=True)
    is_switch = len(values) == 2 and (values[0] == 0 or 0 < values[0] < values[1] <= 1)
    if (
        not is_switch
        or counts.min() < ROWS_PER_SETTING
        or not _is_following_scale(reading, keep, codes)
    ):
        return none
    return (numbers == values[1]).astype(np.intp)


def _is_following_scale(reading: Reading, keep: NDArray[np.intp], codes: NDArray[np.intp]) -> bool:
    """Return True if two values are constant within each size, token count or budget.

    If most of these groups have a single run, all groups of one value must be larger than those of
    the other.
    """
    scales = {k: values[keep] for k, values in reading.values.items() if k != "loss"}
    if "compute" not in scales:
        scales["compute"] = scales["parameters"] * scales["tokens"]
    for k, values in scales.items():
        groups = cluster(values, DESIGN_TOLERANCES[k], 1 + DESIGN_TOLERANCES[k])
        pairs = np.unique(np.stack([groups, codes]), axis=1)
        num_groups = int(groups.max()) + 1
        is_one_step = np.count_nonzero(np.diff(pairs[1])) == 1
        if pairs.shape[1] == num_groups and (is_one_step or num_groups <= len(keep) / 2):
            return True
    return False


def _require_compared_methods(
    reading: Reading, keep: NDArray[np.intp], design: NDArray[np.intp], compared: Sequence[str]
) -> None:
    """Raise `ValueError` if the kept rows differ in a method, such as the optimizer, or a switch.

    The methods may differ if each design was run with each of them. The best method is then chosen
    if its column is among those that were `compared`.
    """
    used = {part for column in reading.columns.values() for part in column.name.split(TIMES)}
    for name in reading.table.columns:
        if name in used:
            continue
        is_method = is_method_name(name)
        codes = _encode_methods(reading, name) if is_method else _encode_switch(reading, name, keep)
        values = np.unique(codes[keep])
        pairs = np.unique(np.stack([design, codes]), axis=1)
        is_complete = np.isin(pairs[1], values).sum() == len(values) * (design.max() + 1)
        if len(values) == 1 or (name in compared and is_complete):
            continue
        texts = list(dict.fromkeys(map(str, reading.table.get_cells(name))))
        raise ValueError(
            f"column {name!r} has {len(texts)} values ({list_some(texts)}), and not every size and"
            " number of tokens was run with each: the runs may follow one law in spite of this, or"
            f" several laws; select one value with where={{{name!r}: {texts[0]!r}}}, or read all"
            f" runs as one law with ignore=[{name!r}]"
        )


def list_setting_columns(reading: Reading) -> list[str]:
    """Return the columns of known settings, such as learning rates, that differ between runs."""
    used = {column.name for column in reading.columns.values()}
    return [
        name
        for name in reading.table.columns
        if name not in used
        and is_setting_name(name)
        and encode_settings(reading.table, [name]).any()
    ]


def _list_possible_settings(reading: Reading) -> list[str]:
    """Return the columns that are not read, and sequence lengths even if they are read."""
    factors = {part for column in reading.columns.values() for part in column.name.split(TIMES)}
    # The factors of the tokens, such as steps and batch size, are read, so they are not unknown.
    # A sequence length is the exception: unlike a batch size, it is not a known setting.
    used = {name for name in factors if classify_factor(name) != "length"}
    return [name for name in reading.table.columns if name not in used]


def _require_known_settings(
    reading: Reading, rows: NDArray[np.intp], groups: NDArray[np.intp], known: Sequence[str]
) -> None:
    """Raise `ValueError` if a column of few values varies in half of the groups of repeated runs.

    The column may be a setting under an unusual name, or the runs may be repetitions. `groups[i]`
    is the group of `rows[i]`: the runs with the same design and equal known settings. Other rows
    are not searched.
    """
    if len(groups) < len(reading.table):
        reading.choices.append(f"only {len(groups)} rows are searched for unknown settings")
    is_repeated = np.bincount(groups) > 1
    if not is_repeated.any():
        return
    num_repetitions = len(groups) - len(np.unique(groups))
    reading.choices.append(
        f"{num_repetitions} runs with the size, tokens and settings of others are repetitions"
    )
    table = reading.table.select(rows)
    unknown = []
    for name in _list_possible_settings(reading):
        if name in known or _is_repetition(name):
            continue
        codes = encode_settings(table, [name])
        num_values = np.bincount(np.unique(np.stack([groups, codes]), axis=1)[0])
        differs = (num_values > 1)[is_repeated]
        repeats = (codes.max() + 1) * ROWS_PER_SETTING <= len(table)
        if repeats and differs.mean() >= SETTING_FRACTION:
            unknown.append(name)
    if unknown:
        value = str(table.get_cells(unknown[0])[0])
        factors = reading.columns["tokens"].name.split(TIMES) if "tokens" in reading.columns else []
        # If `ignore` removes a factor of the token count, the tokens are no longer known.
        tokens = ", and add a column of tokens" if {*unknown} & {*factors} else ""
        raise ValueError(
            f"columns {unknown} differ between runs of one size and tokens, which may be runs of"
            f" several settings or repetitions: select one setting with where={{{unknown[0]!r}:"
            f" {value!r}}}, or read the runs as repetitions with ignore={unknown}{tokens}"
        )

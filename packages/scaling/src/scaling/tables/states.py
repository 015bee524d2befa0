"""Exclusion of rows that are not finished runs: a crashed run's last loss is not its final loss.

A column of states is recognized by its name (`state`, `run_state`, `status`, `sys/failed`,
`exit_code`, …), or otherwise by its values. The following raise `ValueError`: unknown states,
states that may mean finished or stopped, and rows that summarize other rows, such as their mean.
"""

import itertools
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import is_blank, list_some, parse_numbers
from scaling.tables.names import (
    STATES,
    WORDS,
    has_ending,
    is_current_step,
    is_planned_steps,
    split_words,
)
from scaling.tables.table import Table
from scaling.units import Array

#: The name of an enumeration before a state, as in `RunStatus.FINISHED`.
ENUMERATION_PREFIX = re.compile(r"^(?:job|run|trial|task)_?(?:state|status)[._]")

TRUE = frozenset(("true", "yes", "t", "y", "x", "1", "1.0"))
FALSE = frozenset(("false", "no", "f", "n", "0", "0.0"))

#: A run has reached its planned steps if its last logged step is at most this fraction earlier. The
#: tolerance exists because some trackers log at intervals and count steps from 0.
STEP_TOLERANCE = 0.05


def keep_finished(table: Table, selected_by: Container[str], messages: list[str]) -> Table:
    """Return the finished runs, and append a message about the other rows to `messages`.

    Columns in `selected_by` are not read as states, because the user has selected rows by them.
    """
    for name in table.columns:
        finished = None if name in selected_by else _flag_finished(name, table)
        if finished is None or finished.all():
            continue
        left_out = table.rows[~finished].tolist()
        messages.append(
            f"column {name!r} says that {len(left_out)} runs are not 'finished' in rows"
            f" {list_some(left_out)}: those runs are left out"
        )
        table = table.select(finished)
    return table


def flag_diverged(table: Table, loss: str, words: Container[str]) -> NDArray[np.bool_]:
    """Return flags of the runs whose loss is one of the words, such as nan.

    A loss of nan is missing if the run is not over, or if it was stopped from outside.
    """
    texts = [str(cell).strip().lower() for cell in table.get_cells(loss)]
    diverged = np.array([text in words for text in texts], bool)
    is_nan = np.array([text == "nan" for text in texts], bool)
    if not (diverged & is_nan).any():
        return diverged
    for name, cells in table.columns.items():
        is_flag = bool(STATES["interrupted"] & {*split_words(name)[-1:]})
        if not (is_flag or _is_state_column(name, table)):
            continue
        for i in np.flatnonzero(diverged & is_nan):
            state = _normalize(cells[i])
            if state in STATES["interrupted"] or (is_flag and state in TRUE):
                diverged[i] = False
    return diverged


def _is_state_column(name: str, table: Table) -> bool:
    """Return True if a column states whether each run finished, even with unclear states."""
    try:
        return _flag_finished(name, table) is not None
    except ValueError:
        return True


def is_progress_column(name: str, table: Table) -> bool:
    """Return True if a column states whether each run finished, or how far it came."""
    is_epoch = split_words(name)[-1:] == ["epoch"]
    return _is_state_column(name, table) or is_epoch or has_ending(name, WORDS["progress"])


def flag_complete_runs(table: Table, messages: list[str], choices: list[str]) -> NDArray[np.bool_]:
    """Return flags of the runs that did not stop early; append a message about the other runs.

    The last step of a run is compared with its planned number of steps, such as `max_steps`.
    Without a plan of steps, epochs are compared. A column such as `progress` is compared with 1 or
    100. A column of steps that agrees with the plan in no row counts other steps, as wandb's
    `_step` may do. It is not compared, and this choice is appended to `choices`. Raises
    `ValueError` if it agrees in fewer than half of the rows, or if no `progress` is complete.
    """
    plans = [*filter(is_planned_steps, table.columns)]
    counters = [*filter(is_current_step, table.columns)]
    progress = [*_iter_planned_progress(table, plans, counters, choices)]
    if not progress:
        plans = [name for name in table.columns if has_ending(name, WORDS["planned_epochs"])]
        counters = [name for name in table.columns if split_words(name)[-1:] == ["epoch"]]
        progress = [*_iter_planned_progress(table, plans, counters, choices)]
    progress += _iter_progress_columns(table)
    reached = np.ones(len(table), bool)
    for name, plan, fraction in progress:
        stopped = fraction < 1 - STEP_TOLERANCE
        if stopped.any():
            messages.append(
                f"column {name!r} is below {plan} in rows {list_some(table.rows[stopped])}:"
                f" {stopped.sum()} runs that stopped early are left out"
            )
            reached &= ~stopped
    return reached


def _iter_planned_progress(
    table: Table, plans: Sequence[str], counters: Sequence[str], choices: list[str]
) -> Iterator[tuple[str, str, Array]]:
    """Yield columns that count up to a plan, with the plan and the fraction that is done."""
    for plan, name in itertools.product(plans, counters):
        planned = parse_numbers(table.get_cells(plan))
        fraction = parse_numbers(table.get_cells(name)) / np.where(planned > 0, planned, np.nan)
        agrees = np.abs(fraction - 1) <= STEP_TOLERANCE
        if agrees.mean() >= 0.5:
            yield name, repr(plan), fraction
        elif agrees.any():
            raise ValueError(
                f"column {name!r} is {plan!r} in only {agrees.sum()} of {len(table)} rows: the"
                " other runs may have stopped early, or the columns count different steps; drop"
                f" the runs that stopped early, or pass ignore=[{plan!r}]"
            )
        elif np.isfinite(fraction).any():
            choices.append(f"{name!r} is not compared with {plan!r}: no row has equal numbers")


def _iter_progress_columns(table: Table) -> Iterator[tuple[str, str, Array]]:
    """Yield columns such as `progress`, a fraction or a percentage: name, end and done fraction."""
    for name in table.columns:
        if not has_ending(name, WORDS["progress"]):
            continue
        texts = [str(cell).strip() for cell in table.get_cells(name)]
        progress = parse_numbers([text.removesuffix("%") for text in texts])
        if np.isnan(progress).all():
            continue
        ends = [100] if any(text.endswith("%") for text in texts) else [1, 100]
        largest = np.nanmax(progress)
        complete = [end for end in ends if abs(largest / end - 1) <= STEP_TOLERANCE]
        if not complete:
            raise ValueError(
                f"column {name!r} is at most {largest:g}, so no run has reached its end, or the"
                f" column is not the progress of the runs: read all rows with ignore=[{name!r}]"
            )
        yield name, str(complete[0]), np.nan_to_num(progress / complete[0])


def is_true(cell: Any) -> bool:
    """Return True if a cell is a flag that is set, such as yes or 1."""
    return _normalize(cell) in TRUE


def parse_flags(cells: NDArray[Any]) -> Array:
    """Return a column of flags as 0 and 1, and any other column as numbers; nan for other cells."""
    numbers = parse_numbers(cells)
    for i in np.flatnonzero(np.isnan(numbers)):
        text = _normalize(cells[i])
        if text in TRUE or text in FALSE:
            numbers[i] = text in TRUE
    return numbers


def require_no_marks(table: Table) -> None:
    """Raise `ValueError` if a column such as `outlier` or `keep` marks some of the rows."""
    for name in table.columns:
        words = split_words(name)
        is_bad_mark = bool({*words} & {*WORDS["marks"]})
        if not is_bad_mark and "".join(words[-1:]) not in WORDS["good_marks"]:
            continue
        cells = table.get_cells(name)
        texts = [_normalize(cell) for cell in cells]
        marked = [(text in TRUE) == is_bad_mark for text in texts]
        if {*texts} <= {*TRUE, *FALSE, ""} and any(marked) and not all(marked):
            unmarked = cells[marked.index(False)]
            raise ValueError(
                f"column {name!r} marks {sum(marked)} rows"
                f" ({list_some(table.rows[marked])}): leave them out with"
                f" where={{{name!r}: {unmarked!r}}}, or read all rows with ignore=[{name!r}]"
            )


def require_no_summaries(table: Table) -> None:
    """Raise `ValueError` if a cell in a column of labels marks a row as a summary of others."""
    for name in table.columns:
        if not _is_label(name):
            continue
        cells = table.get_cells(name)
        texts = {*map(str, cells)}
        summaries = {text for text in texts if _has_only(text, WORDS["averages"])}
        if not summaries:
            continue
        # Beside a row such as "mean", rows such as "min" are not runs either.
        summaries |= {text for text in texts if _has_only(text, WORDS["extremes"])}
        is_summary = [str(cell) in summaries for cell in cells]
        # If every row is a mean, the column only describes the losses.
        if not all(is_summary):
            i = is_summary.index(True)
            raise ValueError(
                f"column {name!r} says {cells[i]!r} in row {table.rows[i]}, which may"
                f" summarize other rows or be a run: drop {sum(is_summary)} such rows, or read them"
                f" as runs with ignore=[{name!r}]"
            )


def _is_label(name: str) -> bool:
    """Return True if a column of this name may label rows; so may a column without a name."""
    words = split_words(name)
    label = {*WORDS["run_columns"], *WORDS["repetitions"], *WORDS["row_labels"]}
    return not words or words[-1] in label or "".join(words) in label


def _has_only(text: str, kind: Sequence[str]) -> bool:
    """Return True if a text has a word of `kind`, such as "mean", and otherwise only fillers."""
    if not any(word in text.lower() for word in kind):  # a million names take seconds to split
        return False
    words = {*re.findall("[a-z]+", text.lower())}
    return bool(words & {*kind}) and words <= {*kind, *WORDS["summary_fillers"]}


def _flag_finished(name: str, table: Table) -> NDArray[np.bool_] | None:
    """Return flags of the finished runs by this column; None if it is not a column of states."""
    spaced = re.sub("([a-z])([A-Z])", r"\1 \2", name.rsplit(".")[-1])
    words = re.findall("[a-z]+", spaced.lower())
    if not words:
        return None
    ending = "".join(words[-2:])
    is_state = re.search("(?:state|status)$", words[-1]) and ending not in STATES["other"]
    is_code = re.search("(?:exit|return)(?:code|status)$", ending)
    is_flag = words[-1] in STATES["flags"]
    known = {*STATES["finished"], *STATES["unfinished"], *STATES["unclear"]}
    allowed = None if is_state or is_code or is_flag else {"", *known}
    texts = _normalize_cells(table.get_cells(name), allowed)
    present = {*texts} - {""}
    if not present:
        return None
    finished: set[str] | None = None
    if is_state:
        finished = _find_finished_states(name, texts, table)
    elif is_code:
        finished = {"0", "0.0", "00"}  # Slurm writes 0:0
    elif is_flag and present <= TRUE | FALSE:
        # A blank cell in a column of failures means that the run did not fail.
        finished = {*TRUE} if words[-1] in STATES["finished"] else {*FALSE, ""}
    elif present <= known:
        # With any other name (outcome, phase, result), the values must be unambiguous states.
        has_both = present & STATES["finished"] and present & STATES["unfinished"]
        if has_both or present & STATES["broken"]:
            finished = _find_finished_states(name, texts, table)
            # If a column names only failures, a blank cell means that the run finished.
            if finished is not None and not present & STATES["finished"]:
                finished |= {""}
    return None if finished is None else np.array([text in finished for text in texts])


def _normalize_cells(cells: list[Any], allowed: set[str] | None) -> list[str]:
    """Return the normalized texts of cells; an empty list if any text is not allowed."""
    # A column has few different states, so each text is normalized once.
    normalized: dict[str, str] = {}
    texts = []
    for cell in cells:
        raw = str(cell)
        if raw not in normalized:
            normalized[raw] = _normalize(cell)
            if allowed is not None and normalized[raw] not in allowed:
                return []
        texts.append(normalized[raw])
    return texts


def _find_finished_states(name: str, texts: list[str], table: Table) -> set[str] | None:
    """Return the states of finished runs; raise `ValueError` for unknown states.

    Flags such as 0 and 1 are unknown states too, unless all cells that are not blank are equal.
    Return None if none of the cells is a known state, and if there are no such flags.
    """
    known = {*STATES["finished"], *STATES["unfinished"]}
    if not {*texts} & {*known, *STATES["unclear"]}:
        if len(present := {*texts} - {""}) > 1 and present <= TRUE | FALSE:
            first = table.get_cells(name)[texts.index(min(present))]
            raise ValueError(
                f"column {name!r} says only {list_some(sorted(present))}, which may each mean"
                f" finished or failed: select the finished runs with where={{{name!r}: {first!r}}},"
                f" for example, or read all rows with ignore=[{name!r}]"
            )
        return None
    for text in {*texts} - known - {""}:
        row = table.rows[texts.index(text)]
        reading = "is not a known state"
        if text in STATES["unclear"]:
            reading = "may mean finished or stopped early"
        raise ValueError(
            f"column {name!r} says {text!r} in row {row}, which {reading}: expected words such as"
            " 'finished', 'completed', 'failed' or 'running'; select the finished runs with"
            f" where={{{name!r}: …}}, or read all rows with ignore=[{name!r}]"
        )
    return {*STATES["finished"]}


def _normalize(cell: Any) -> str:
    """Return a state in lower case, without enumeration name, separators and user name."""
    if is_blank(cell):
        return ""
    text = ENUMERATION_PREFIX.sub("", str(cell).strip().lower()).split(" by ")[0]
    return re.sub(r"[^a-z0-9.]", "", text)

"""Exclusion of runs that did not finish: a crashed run's last loss is not its final loss.

The column is recognized by its name (`state`, `run_state`, `status`, `sys/failed`, `exit_code`, …),
or under any name by its values. Unknown states are refused, and so are states that trackers use for
finished and for stopped runs.
"""

import re
from collections.abc import Container
from typing import Any

from scaling.tables.cells import is_blank, list_some
from scaling.tables.names import STATES
from scaling.tables.source import NumberedRecords

#: The name of an enumeration before a state, as in `RunStatus.FINISHED`.
ENUMERATION_PREFIX = re.compile(r"^(?:job|run|trial|task)_?(?:state|status)[._]")

BOOLEANS = {
    "true": True,
    "yes": True,
    "1": True,
    "1.0": True,
    "false": False,
    "no": False,
    "0": False,
    "0.0": False,
}


def keep_finished(
    table: NumberedRecords, selected_by: Container[str], messages: list[str]
) -> NumberedRecords:
    """Return the finished runs, and append to `messages` which rows were left out.

    Columns in `selected_by` are not read as states, because the user has selected rows by them.
    """
    names = dict.fromkeys(name for _, record in table for name in record)
    for name in names:
        flags = None if name in selected_by else _finished_flags(name, table)
        if flags is None:
            continue
        pairs = list(zip(table, flags, strict=True))
        table = [entry for entry, is_finished in pairs if is_finished]
        left_out = [row for (row, _), is_finished in pairs if not is_finished]
        if left_out:
            messages.append(
                f"column {name!r} says that {len(left_out)} runs are not 'finished' in rows"
                f" {list_some(left_out)}: those runs are left out"
            )
    return table


def _finished_flags(name: str, table: NumberedRecords) -> list[bool] | None:
    """Return whether each run finished by this column; None if it is not a column of states."""
    spaced = re.sub("([a-z])([A-Z])", r"\1 \2", name.rsplit(".")[-1])
    words = re.findall("[a-z]+", spaced.lower())
    if not words:
        return None
    ending = "".join(words[-2:])
    is_state = re.search("(?:state|status)$", words[-1]) and ending != "exitstatus"
    is_code = re.search("(?:exit|return)(?:code|status)$", ending)
    known = {*STATES["finished"], *STATES["unfinished"], *STATES["unclear"]}
    cells = []
    for row, record in table:
        text = _normalize(record.get(name))
        if text and text not in known and not (is_state or is_code or words[-1] in STATES["flags"]):
            return None
        cells.append((row, text))
    texts = {text for _, text in cells if text}
    if not texts:
        return None
    if is_state:
        return _by_state(name, cells)
    if is_code:
        return [text in ("0", "0.0") for _, text in cells]
    if words[-1] in STATES["flags"] and texts <= {*BOOLEANS}:
        means_finished = words[-1] in STATES["finished"]
        return [BOOLEANS.get(text, not means_finished) == means_finished for _, text in cells]
    # Under any other name (outcome, phase, result), the values must be unmistakable states.
    if texts <= known:
        has_both = texts & STATES["finished"] and texts & STATES["unfinished"]
        if has_both or texts & STATES["broken"]:
            return _by_state(name, cells)
    return None


def _by_state(name: str, cells: list[tuple[int, str]]) -> list[bool] | None:
    """Return whether each state is a finished one; raise `ValueError` for unknown states.

    Return None if not a single cell is a known state.
    """
    known = {*STATES["finished"], *STATES["unfinished"]}
    if not any(text in known or text in STATES["unclear"] for _, text in cells):
        return None
    for row, text in cells:
        if text and text not in known:
            reading = "finished or stopped early" if text in STATES["unclear"] else "neither known"
            raise ValueError(
                f"column {name!r} says {text!r} in row {row}, which may be {reading}: expected"
                f" words such as 'finished', 'completed', 'failed' or 'running'; select the"
                f" finished runs with where={{{name!r}: …}}, or leave the column out"
            )
    return [text in STATES["finished"] for _, text in cells]


def _normalize(cell: Any) -> str:
    """Return a state in lower case, without enumeration, separators and the user who set it."""
    if is_blank(cell):
        return ""
    text = ENUMERATION_PREFIX.sub("", str(cell).strip().lower()).split(" by ")[0]
    return re.sub(r"[^a-z0-9.]", "", text)

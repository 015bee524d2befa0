"""Which runs of a tracker's export finished: a crashed run's last loss is not its final loss.

The column is found by its name (`state`, `run_state`, `status`, `sys/failed`, `exit_code`, …), or
by its values under any name. A value that is not known is refused, and so is one that trackers
write for both outcomes.
"""

import re
from collections.abc import Container
from typing import Any

from scaling.tables.cells import blank, list_some
from scaling.tables.names import STATES
from scaling.tables.source import Located

PREFIX = re.compile(r"^(?:job|run|trial|task)_?(?:state|status)[._]")
TRUTHS = {"true": True, "yes": True, "1": True, "1.0": True}
TRUTHS |= {"false": False, "no": False, "0": False, "0.0": False}


def keep_finished(table: Located, chosen: Container[str], left_out: list[str]) -> Located:
    """Return the finished runs, and append to `left_out` which column excludes which rows.

    The caller has picked rows by the columns `chosen` already, so those are not read as states.
    """
    names = dict.fromkeys(name for _, record in table for name in record)
    for name in names:
        finished = None if name in chosen else _finished(name, table)
        if finished is None:
            continue
        lost = [row for (row, _), ended in zip(table, finished, strict=True) if not ended]
        table = [pair for pair, ended in zip(table, finished, strict=True) if ended]
        if lost:
            left_out.append(
                f"column {name!r} says that {len(lost)} runs are not 'finished' in rows"
                f" {list_some(lost)}: those runs are left out"
            )
    return table


def _finished(name: str, table: Located) -> list[bool] | None:
    """Return whether each run finished by this column; None if the column does not say so."""
    spaced = re.sub("([a-z])([A-Z])", r"\1 \2", name.rsplit(".")[-1])
    words = re.findall("[a-z]+", spaced.lower())
    cells = [(row, _plain(record.get(name))) for row, record in table]
    if not words or not any(text for _, text in cells):
        return None
    if re.search("(?:state|status)$", words[-1]) and "".join(words[-2:]) != "exitstatus":
        return _by_state(name, cells)
    if re.search("(?:exit|return)(?:code|status)$", "".join(words[-2:])):
        return [text in ("0", "0.0") for _, text in cells]
    if words[-1] in STATES["flags"]:
        flag = words[-1] in STATES["finished"]
        # Not a flag: the name of a loss, a date, a duration.
        if all(text in TRUTHS or not text for _, text in cells):
            return [TRUTHS.get(text, not flag) == flag for _, text in cells]
    # By any other name (outcome, phase, result): only if its words are those of states.
    texts = {text for _, text in cells if text}
    if texts <= {*STATES["finished"], *STATES["unfinished"], *STATES["unclear"]}:
        both = texts & STATES["finished"] and texts & STATES["unfinished"]
        if both or texts & STATES["broken"]:
            return _by_state(name, cells)
    return None


def _by_state(name: str, cells: list[tuple[int, str]]) -> list[bool] | None:
    known = {*STATES["finished"], *STATES["unfinished"]}
    if not any(text in known or text in STATES["unclear"] for _, text in cells):
        return None
    for row, text in cells:
        if text and text not in known:
            reading = "finished or stopped early" if text in STATES["unclear"] else "neither known"
            raise ValueError(
                f"column {name!r} says {text!r} in row {row}, which may be {reading}: expected"
                f" words such as 'finished', 'completed', 'failed' or 'running'; pick the finished"
                f" runs with where={{{name!r}: …}}, or leave the column out"
            )
    return [text in STATES["finished"] for _, text in cells]


def _plain(cell: Any) -> str:
    """Return a state without case, its enumeration's name, separators and the user who set it."""
    if blank(cell):
        return ""
    text = PREFIX.sub("", str(cell).strip().lower()).split(" by ")[0]
    return re.sub(r"[^a-z0-9.]", "", text)

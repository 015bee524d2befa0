"""A check of the report: each row of a stage's table shows the figures of one record.

Both forms of the report are read as text. A record is a dict or a list of figures in summary.json.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.folder import RunFolder

#: Stages whose tables contain figures that the report computes, or texts with column separators.
OTHER_TABLES = ("plan", "audit")
#: Rounding of a figure to three significant digits.
ROUNDING = 0.0051

Table = tuple[str, list[list[str]]]


def shown_figures(folder: RunFolder) -> Check:
    """Check each row of the tables in report.md and of the unfolded tables in report.html.

    The tables of `OTHER_TABLES` are not checked.
    """
    stages = folder.summary["stages"]
    foreign = []
    for name, read in (("report.md", _markdown_tables), ("report.html", _html_tables)):
        path = folder.path / name
        for stage, rows in read(path.read_text(encoding="utf-8")) if path.exists() else ():
            records = list(_records(stages.get(stage)))
            if stage not in OTHER_TABLES:
                foreign += [
                    f"{name}, {stage}: {row[0]}"
                    for row in rows
                    if not any(_shows(row, record) for record in records)
                ]
    tables = Sources("rows of the report's tables", "records of summary.json")
    return tables.none("figures in the report", foreign)


def _markdown_tables(text: str) -> Iterator[Table]:
    """Yield the stage and the rows of each table, without its header."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line.strip("|") for line in body.splitlines() if line.startswith("| ")]
        yield title.lower(), [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


def _html_tables(text: str) -> Iterator[Table]:
    for stage, body in re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL):
        first = body.partition("<details>")[0]
        rows = [re.findall("<td>(.*?)</td>", row) for row in first.split("<tr")]
        yield stage, [[html.unescape(cell) for cell in row] for row in rows if row]


def _records(value: Any) -> Iterator[list[Any]]:
    """Yield the texts and figures of each dict and of each list, at any depth."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if isinstance(inner, list):
        yield [item for item in inner if isinstance(item, int | float | str)]
        for item in inner:
            yield from _records(item)


def _shows(row: list[str], record: list[Any]) -> bool:
    return all(not cell or any(_is_shown(cell, value) for value in record) for cell in row)


def _is_shown(cell: str, value: Any) -> bool:
    """Return True if a cell of a table can be the text of a value."""
    if isinstance(value, bool):
        return cell == ("yes" if value else "no")
    if isinstance(value, str):
        return cell == value
    try:
        figure = float(cell.replace(",", ""))
    except ValueError:
        return False
    return figure == value or abs(figure - value) <= ROUNDING * abs(value)

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
UNCHECKED_STAGES = ("plan", "audit")
#: Largest relative rounding error of a figure with three significant digits, and a margin.
ROUNDING = 0.0051

#: A stage and the rows of its table.
Table = tuple[str, list[list[str]]]


def check_shown_figures(folder: RunFolder) -> Check:
    """Return the check of each row in report.md and in the tables of report.html before details.

    The tables of `UNCHECKED_STAGES` are not checked.
    """
    stages = folder.summary["stages"]
    foreign = []
    readers = {"report.md": _iter_markdown_tables, "report.html": _iter_html_tables}
    for name, read_tables in readers.items():
        path = folder.path / name
        if not path.exists():
            continue
        for stage, rows in read_tables(path.read_text(encoding="utf-8")):
            if stage in UNCHECKED_STAGES:
                continue
            records = list(_iter_records(stages.get(stage)))
            for row in rows:
                if not any(_is_row_shown(row, record) for record in records):
                    foreign.append(f"{name}, {stage}: {row[0]}")
    tables = Sources("rows of the report's tables", "records of summary.json")
    return tables.check_none("figures in the report", foreign)


def _iter_markdown_tables(text: str) -> Iterator[Table]:
    """Yield the table of each section, without the header."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line.strip("|") for line in body.splitlines() if line.startswith("| ")]
        yield title.lower(), [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


def _iter_html_tables(text: str) -> Iterator[Table]:
    for stage, body in re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL):
        unfolded = body.partition("<details>")[0]
        rows = [re.findall("<td>(.*?)</td>", row) for row in unfolded.split("<tr")]
        yield stage, [[html.unescape(cell) for cell in row] for row in rows if row]


def _iter_records(value: Any) -> Iterator[list[Any]]:
    """Yield the texts and figures of each dict and of each list, at any depth."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if isinstance(inner, list):
        yield [item for item in inner if isinstance(item, int | float | str)]
        for item in inner:
            yield from _iter_records(item)


def _is_row_shown(row: list[str], record: list[Any]) -> bool:
    """Return True if every cell of a row is empty or can be the text of a value of the record."""
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

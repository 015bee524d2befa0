"""Render the rows of one bench case as a Markdown table.

A row is a dictionary whose keys are the columns. The rows of one case may have different columns,
for example if only some variants send anything. They still form one table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

#: Suffixes of columns that share one cell: the median, and in parentheses the 10th to the 90th
#: percentile.
MEDIAN = "_p50"
LOW = "_p10"
HIGH = "_p90"


def format_case_table(rows: Iterable[Row], layout: Mapping[str, Any]) -> list[str]:
    """Return the lines of one case: how to read it, what all rows share, and the table.

    `layout` has the keys

    - `read`: sentences that say what was measured and how to read the columns;
    - `columns` (optional): the columns to show, in order, of those that the rows have; by default
      all of them;
    - `best` (optional): a column to "lowest" or "highest"; the best figure is set in bold;
    - `within` (optional): columns; the best figure is marked within each combination of them.
      Results of an older bench may lack some;
    - `references` (optional): a column to values; rows with such a value are never the best.
    """
    rows = [_merge_percentiles(row) for row in rows]
    known = _list_columns(rows)
    wanted = [c for c in layout.get("columns") or known if c in known and c != "case"]
    unknown = {*layout.get("best", {})} - {*known}
    if unknown:
        raise ValueError(f"expected columns of {known}, got {sorted(unknown)}")
    varying = [c for c in wanted if len(rows) == 1 or len({str(r.get(c)) for r in rows}) > 1]
    shared = [c for c in wanted if c not in varying]
    lines = [layout["read"].strip(), ""]
    if shared:
        settings = ", ".join(
            f"{_format_header(c, rows)} {_format_cell(rows[0].get(c))}" for c in shared
        )
        lines += [f"Equal in every row: {settings}.", ""]
    best = {column: _find_best_rows(rows, column, layout) for column in layout.get("best", {})}
    cells = [
        [_format_bold(row.get(c), bold=i in best.get(c, ())) for c in varying]
        for i, row in enumerate(rows)
    ]
    return [*lines, *format_markdown_table([_format_header(c, rows) for c in varying], cells)]


def format_plain_table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table of rows that have the same columns."""
    rows = list(rows)
    header = [column.replace("_", " ") for column in rows[0]]
    return format_markdown_table(
        header, [[_format_cell(value) for value in row.values()] for row in rows]
    )


def format_markdown_table(header: list[str], cells: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(line) + " |" for line in cells),
        "",
    ]


def _merge_percentiles(row: Row) -> Row:
    """Return the row with each median, 10th and 90th percentile merged into one tuple."""
    merged: dict[str, Any] = {}
    for column, value in row.items():
        base = column[: -len(MEDIAN)]
        if column.endswith(MEDIAN) and base + LOW in row and base + HIGH in row:
            merged[base] = (value, row[base + LOW], row[base + HIGH])
        elif not (column.endswith((LOW, HIGH)) and base + MEDIAN in row):
            merged[column] = value
    return merged


def _list_columns(rows: list[Row]) -> list[str]:
    """Return the columns of all rows, each at its position in the row that has most columns."""
    columns: list[str] = []
    for row in sorted(rows, key=len, reverse=True):
        columns += [column for column in row if column not in columns]
    return columns


def _format_header(column: str, rows: list[Row]) -> str:
    merged = any(isinstance(row.get(column), tuple) for row in rows)
    suffix = " (p10 to p90)" if merged else ""
    return column.replace("_", " ") + suffix


def _find_best_rows(rows: list[Row], column: str, layout: Mapping[str, Any]) -> list[int]:
    """Return the indices of the rows with the best figure of a column within their group."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        references = layout.get("references", {})
        is_missing = row.get(column) is None or math.isnan(_parse_number(row[column]))
        if not is_missing and not any(row.get(c) in references[c] for c in references):
            key = tuple(str(row.get(c)) for c in layout.get("within", ()))
            groups.setdefault(key, []).append(i)
    choose = {"lowest": min, "highest": max}[layout["best"][column]]
    winners = []
    for group in groups.values():
        target = choose(_parse_number(rows[i][column]) for i in group)
        winners += [i for i in group if len(group) > 1 and _parse_number(rows[i][column]) == target]
    return winners


def _parse_number(value: Any) -> float:
    return float(value[0] if isinstance(value, tuple) else value)


def _format_bold(value: Any, *, bold: bool) -> str:
    return f"**{_format_cell(value)}**" if bold else _format_cell(value)


def _format_cell(value: Any) -> str:
    """Return a value as text: numbers with three significant digits, missing ones as a dash."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        median, low, high = map(_format_cell, value)
        return median if median == low == high else f"{median} ({low} to {high})"
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        text = f"{value:.3g}"
        return f"{float(text):,.0f}" if 999.5 <= abs(value) < 1e9 else text
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)

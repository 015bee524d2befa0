"""Text files: CSV of any dialect, JSON, and JSON Lines."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.reshape import from_records
from scaling.tables.table import Table, object_cells, require_unique_names

NumberedCells = tuple[int, tuple[str, ...]]

#: Characters of a line without content: spaces and delimiters.
BLANK_CELLS = " \t,;|"

#: Suffixes of files that are not text.
BINARY_SUFFIXES = (".parquet", ".feather", ".xlsx", ".xls", ".gz", ".zip", ".arrow", ".db")


def read_text(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and sentences on how it was decoded."""
    if path.suffix.lower() in BINARY_SUFFIXES or "tfevents" in path.name:
        raise ValueError(
            f"{path} is not a text file: read it with pandas, polars, pyarrow or, for TensorBoard,"
            " tbparse, and pass the DataFrame"
        )
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return raw.decode(encoding), []
    except UnicodeDecodeError:
        return raw.decode("latin-1"), ["the text is not UTF-8 and is read as Latin-1"]


def _split_lines(text: str) -> list[str]:
    """Return the lines of a text. `str.splitlines` would also split at form feeds and U+2028."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def parse_json(path: Path, text: str) -> tuple[Any, list[int] | None]:
    """Return the content of JSON; for JSON Lines, return the records and their line numbers."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        lines = [(i, line) for i, line in enumerate(_split_lines(text), 1) if line.strip()]
        if len(lines) == 1:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    records = []
    for i, line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {i} is not valid JSON: {error}") from None
    return records, [i for i, _ in lines]


def parse_csv(path: Path, text: str, delimiter: str | None) -> Table:
    """Return the table of a CSV file; comments, blank lines and repeated headers are skipped."""
    lines = _split_lines(text)
    comments = [line for line in lines if _is_comment(line)] if "#" in text else []
    first = next((line for line in lines if not (_is_blank(line) or _is_comment(line))), None)
    if first is None:
        return from_records([])
    mark = _find_delimiter(first) if delimiter is None else delimiter
    if '"' in text or mark in " |":
        try:
            rows, comments = _read_records(lines, mark)
        except csv.Error as error:
            raise ValueError(f"{path}: {error}") from None
    else:
        # A function call per line would take a second for a million lines.
        numbered = enumerate(lines, 1)
        content = [(i, line) for i, line in numbered if line.strip(BLANK_CELLS)]
        if comments:
            content = [(i, line) for i, line in content if not _is_comment(line)]
        # Unlike lists, tuples of strings are not traversed by the garbage collector.
        rows = [(i, tuple(line.split(mark))) for i, line in content]
    first_line, header = rows.pop(0)
    if all(_is_numeric(cell) for cell in header if cell) and comments:
        # numpy.savetxt writes the header as a comment.
        rows.insert(0, (first_line, header))
        header = tuple(next(csv.reader([comments[-1].lstrip(" #")], delimiter=mark)))
    names = [name.strip() for name in header]
    _check_header(path, names, mark)
    choices = [] if delimiter is not None else [f"cells are separated by {mark!r}"]
    if comments:
        choices.append(f"{len(comments)} lines that start with '#' are comments")
    data_rows = _check_rows(path, rows, names, mark)
    if len(data_rows) < len(rows):
        choices.append(f"{len(rows) - len(data_rows)} rows that repeat the header are skipped")
    columns = {}
    for k, name in enumerate(names if data_rows else []):
        columns[name] = object_cells([cells[k].strip() for _, cells in data_rows])
    return Table(columns, np.array([line for line, _ in data_rows], np.intp), choices)


def _is_blank(line: str) -> bool:
    return not line.strip(BLANK_CELLS)


def _is_comment(line: str) -> bool:
    return line.lstrip()[:1] == "#"


def _check_rows(
    path: Path, rows: list[NumberedCells], header: Sequence[str], mark: str
) -> list[NumberedCells]:
    """Return the rows that do not repeat the header; raise `ValueError` for a ragged row."""
    lowered = [name.lower() for name in header]
    data_rows = []
    for line, cells in rows:
        while len(cells) > len(header) and not cells[-1]:
            cells = cells[:-1]
        may_repeat = bool(cells) and cells[0].strip().lower() == lowered[0]
        if may_repeat and [cell.strip().lower() for cell in cells] == lowered:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} cells under {len(header)} columns"
                f" {header}; is {mark!r} the delimiter?"
            )
        data_rows.append((line, cells))
    return data_rows


def _read_records(lines: Sequence[str], mark: str) -> tuple[list[NumberedCells], list[str]]:
    """Return the cells of each record with its first line number, and the comments.

    A quoted cell may span several lines, so blank lines and comments are skipped only between
    records.
    """
    comments: list[str] = []
    start = 0

    def read_lines() -> Iterator[str]:
        nonlocal start
        for i, line in enumerate(lines, 1):
            if start == 0:
                if _is_comment(line):
                    comments.append(line)
                if _is_comment(line) or _is_blank(line):
                    continue
                start = i
            yield line + "\n"

    rows = []
    for cells in csv.reader(read_lines(), delimiter=mark, skipinitialspace=True):
        if mark == " ":
            cells = [cell for cell in cells if cell]
        rows.append((start, tuple(cells)))
        start = 0
    return (_strip_markdown(rows) if mark == "|" else rows), comments


def _strip_markdown(rows: list[NumberedCells]) -> list[NumberedCells]:
    """Return the rows without the empty outer cells and the separator line of a Markdown table."""
    header = rows[0][1]
    first = 0 if header[0].strip() else 1
    last = None if header[-1].strip() else -1
    cut = [(i, cells[first:last]) for i, cells in rows]
    return [(i, cells) for i, cells in cut if not cells or not set("".join(cells)) <= set("-: ")]


def _check_header(path: Path, header: list[str], mark: str) -> None:
    """Raise `ValueError` unless a header consists of two or more distinct names."""
    if all(_is_numeric(cell) for cell in header if cell):
        raise ValueError(f"{path}: the first line holds numbers, {header}: put names above them")
    if len(header) < 2:
        other = next((d for d in ";\t|," if d in "".join(header) and d != mark), None)
        hint = f"; pass delimiter={other!r}" if other else ""
        raise ValueError(f"{path}: delimiter {mark!r} leaves one column, {header}{hint}")
    require_unique_names(header, path)


def _find_delimiter(header: str) -> str:
    """Return the most frequent delimiter of a header; a space if it has none."""
    delimiter = max("\t;|,", key=header.count)
    return delimiter if delimiter in header else " "


def _is_numeric(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.,_' ]+(e[-+]?\d+)?", cell.strip(), re.IGNORECASE) is not None

"""Text files: CSV, JSON, and JSON Lines."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.reshape import from_records
from scaling.tables.table import Table, object_cells, require_unique_names

#: Recognized delimiters of a CSV file. The most frequent one in the header is used.
DELIMITERS = "\t;|,"


def read_text(path: Path) -> str:
    """Return the text of a file; raise `ValueError` if it is not text in UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(
            f"{path} is not text in UTF-8: export CSV or JSON, or read it with pandas, polars,"
            " pyarrow or, for TensorBoard, tbparse, and pass the DataFrame"
        )
    return text


def parse_json(path: Path, text: str) -> tuple[Any, list[int] | None]:
    """Return the content of JSON and None, or the records of JSON Lines and their line numbers.

    Raise `ValueError` if the text is neither.
    """
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        # `str.splitlines` would also split at U+2028, which JSON does not escape.
        lines = [(i, line) for i, line in enumerate(io.StringIO(text), 1) if line.strip()]
        if len(lines) == 1:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    records = []
    for i, line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {i} is not valid JSON: {error}") from None
    return records, [i for i, _ in lines]


def parse_csv(path: Path, text: str) -> Table:
    """Return the table of a CSV file; blank lines and lines that start with '#' are skipped.

    Raise `ValueError` for an invalid header, or a line with another number of cells.
    """
    lines = io.StringIO(text, newline="").readlines()
    header = next((line for line in lines if line.strip() and not _is_comment(line)), "")
    mark = max(DELIMITERS, key=header.count)
    try:
        numbered, comments = _read_rows(lines, mark)
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from None
    if not numbered:
        return from_records([])
    names = [name.strip() for name in numbered.pop(0)[1]]
    _require_header(path, names)
    for line, cells in numbered:
        if len(cells) != len(names):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} cells under {len(names)} columns {names}; is"
                f" {mark!r} the delimiter?"
            )
    choices = [f"cells are separated by {mark!r}"]
    if comments:
        choices.append(f"{comments} lines that start with '#' are comments")
    rows = [cells for _, cells in numbered]
    if mark == ";" and _has_decimal_commas(rows):
        rows = [tuple(re.sub(r"(?<=\d),(?=\d)", ".", cell) for cell in row) for row in rows]
        choices.append("a comma in a number starts its decimals")
    columns = {}
    for k, name in enumerate(names if rows else []):
        columns[name] = object_cells([row[k].strip() for row in rows])
    return Table(columns, np.array([line for line, _ in numbered], np.intp), choices)


def _is_comment(line: str) -> bool:
    return line.lstrip()[:1] == "#"


def _read_rows(lines: Sequence[str], mark: str) -> tuple[list[tuple[int, tuple[str, ...]]], int]:
    """Return the cells of each row with its first line number, and the number of comments.

    A quoted cell may span several lines, so comments are skipped only between rows.
    """
    rows = []
    comments = 0
    start = 0

    def content() -> Iterator[str]:
        nonlocal start, comments
        for i, line in enumerate(lines, 1):
            if start == 0:
                if _is_comment(line):
                    comments += 1
                    continue
                start = i
            yield line

    for cells in csv.reader(content(), delimiter=mark, skipinitialspace=True):
        if any(map(str.strip, cells)):
            # Unlike lists, tuples of strings are not traversed by the garbage collector.
            rows.append((start, tuple(cells)))
        start = 0
    return rows, comments


def _has_decimal_commas(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if numbers have commas, but none has a point or several commas.

    Where decimals start with a comma, spreadsheets separate cells by semicolons.
    """
    cells = [cell for row in rows for cell in row]
    has_comma = any(re.search(r"\d,\d", cell) for cell in cells)
    return has_comma and not any(re.search(r"\d\.\d|,\d+,", cell) for cell in cells)


def _require_header(path: Path, names: list[str]) -> None:
    """Raise `ValueError` unless a header consists of two or more distinct names."""
    if all(re.fullmatch(r"[-+]?[\d.,_' ]+(e[-+]?\d+)?", name.lower()) for name in names if name):
        raise ValueError(f"{path}: the first line holds numbers, {names}: put names above them")
    if len(names) < 2:
        raise ValueError(
            f"{path}: the header {names} is one column; separate cells by a comma, a semicolon, a"
            " tab or a |"
        )
    require_unique_names(names, path)

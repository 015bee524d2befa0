"""Text files: CSV, JSON, and JSON Lines."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.cells import NUMBER
from scaling.tables.reshape import flatten_cells, from_records
from scaling.tables.table import Table, as_object_cells, require_unique_names

#: Recognized delimiters of a CSV file. The most frequent one in the header is used.
DELIMITERS = "\t;|,"

#: A date or a version with two points, such as 31.12.2025 and 2.11.0, which is not a number.
DATE_OR_VERSION = re.compile(r"\d{1,4}\.\d{1,2}\.\d{1,4}")

#: The cells of all rows in order, the number of cells and the first line of each row, and the
#: number of comment lines.
CsvCells = tuple[list[str], list[int], list[int], int]


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

    Raises `ValueError` if the text is neither.
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

    Raises `ValueError` for an invalid header, or a line with another number of cells.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    header = next((line for line in lines if line.strip() and not _is_comment(line)), "")
    delimiter = max(DELIMITERS, key=header.count)
    try:
        read = _read_quoted if '"' in text else _read_unquoted
        cells, widths, numbers, comments = read(lines, delimiter)
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from None
    if not widths:
        return from_records([])
    count = widths[0]
    names = [name.strip() for name in cells[:count]]
    _require_header(path, names)
    for i in np.flatnonzero(np.array(widths) != count)[:1]:
        raise ValueError(
            f"{path}: line {numbers[i]} has {widths[i]} cells under {count} columns {names}; is"
            f" {delimiter!r} the delimiter?"
        )
    cells = cells[count:]
    choices = [f"cells are separated by {delimiter!r}"]
    if comments:
        choices.append(f"{comments} lines that start with '#' are comments")
    if delimiter == ";" and _has_decimal_commas(cells):
        cells = [re.sub(r"(?<=\d),(?=\d)", ".", cell) for cell in cells]
        choices.append("a comma in a number starts its decimals")
    columns = {}
    for k, name in enumerate(names if cells else []):
        columns[name] = as_object_cells(list(map(str.strip, cells[k::count])))
    table = Table(columns, np.array(numbers[1:], np.intp), choices)
    return flatten_cells(table) if "{" in text else table


def _is_comment(line: str) -> bool:
    return line.lstrip()[:1] == "#"


def _read_unquoted(lines: list[str], delimiter: str) -> CsvCells:
    """Return `CsvCells` of text without quotes, several times faster than `_read_quoted` does."""
    numbers = [i for i, line in enumerate(lines, 1) if line.replace(delimiter, "").strip()]
    comments = {i for i in numbers if "#" in lines[i - 1] and _is_comment(lines[i - 1])}
    if comments:
        numbers = [i for i in numbers if i not in comments]
    rows = [lines[i - 1] for i in numbers]
    cells = delimiter.join(rows).split(delimiter) if rows else []
    return cells, [row.count(delimiter) + 1 for row in rows], numbers, len(comments)


def _read_quoted(lines: list[str], delimiter: str) -> CsvCells:
    """Return `CsvCells` of text in which a quoted cell may span several lines.

    Lines inside a quoted cell are therefore not skipped as comments.
    """
    all_cells = []
    widths = []
    numbers = []
    comments = 0
    start = 0

    def iter_content() -> Iterator[str]:
        nonlocal start, comments
        for i, line in enumerate(lines, 1):
            if start == 0:
                if _is_comment(line):
                    comments += 1
                    continue
                start = i
            yield f"{line}\n"

    for cells in csv.reader(iter_content(), delimiter=delimiter, skipinitialspace=True):
        if any(map(str.strip, cells)):
            all_cells += cells
            widths.append(len(cells))
            numbers.append(start)
        start = 0
    return all_cells, widths, numbers, comments


def _has_decimal_commas(cells: Sequence[str]) -> bool:
    """Return True if some numbers have a comma, but none has a point or several commas.

    Spreadsheets that use decimal commas separate cells by semicolons. Points in names, such as
    gpt-1.3b, in dates and in versions do not matter.
    """
    has_comma = any(re.search(r"\d,\d", cell) for cell in cells)
    stripped = [cell.strip() for cell in cells]
    numbers = [c for c in stripped if NUMBER.fullmatch(c) and not DATE_OR_VERSION.fullmatch(c)]
    return has_comma and not any(re.search(r"\d\.\d|,\d+,", number) for number in numbers)


def _require_header(path: Path, names: list[str]) -> None:
    """Raise `ValueError` unless a header consists of two or more distinct names."""
    if all(re.fullmatch(r"[-+]?[\d.,_' ]+(e[-+]?\d+)?", name.lower()) for name in names if name):
        raise ValueError(
            f"{path}: expected column names in the first line, got the numbers {names}; add a line"
            " of names above them"
        )
    if len(names) < 2:
        raise ValueError(
            f"{path}: the header {names} is one column; separate cells by a comma, a semicolon, a"
            " tab or a |"
        )
    require_unique_names(names, path)

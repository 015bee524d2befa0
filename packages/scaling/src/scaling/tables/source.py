"""Records from any source of a table: CSV of any dialect, JSON, JSONL, DataFrames, exports.

Numbers are not interpreted here: a record maps names to raw cells. Each record keeps its line or
position, so that every later message can refer to it.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.names import is_known_name

Record = dict[str, Any]

#: Records, each with the line of its file or its position, counted from 1.
NumberedRecords = list[tuple[int, Record]]

#: Keys under which JSON files store their records.
RECORD_KEYS = ("runs", "data", "rows", "results", "records")

#: Suffixes of files that are not text.
BINARY_SUFFIXES = (".parquet", ".feather", ".xlsx", ".xls", ".gz", ".zip")


def read_records(source: Any, delimiter: str | None) -> NumberedRecords:
    """Return the records of a path, a DataFrame, a mapping of columns or an iterable of records."""
    if isinstance(source, str | Path):
        return _read_file(Path(source), delimiter)
    if hasattr(source, "columns") and not isinstance(source, Mapping):
        return _read_frame(source)
    if isinstance(source, Mapping):
        return _read_mapping(source)
    if not isinstance(source, Iterable):
        raise TypeError(f"expected a path, columns, records or a DataFrame, got {source!r}")
    if isinstance(source, np.ndarray) and source.dtype.names:
        return _from_columns({name: source[name] for name in source.dtype.names})
    records = list(source)
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(f"expected a record that maps names to values, got {record!r}")
    return list(enumerate(map(_flatten, records), 1))


def _read_frame(frame: Any) -> NumberedRecords:
    """Return the records of a DataFrame; named index levels of pandas count as columns."""
    if any(getattr(getattr(frame, "index", None), "names", ())):
        frame = frame.reset_index()
    names = [str(name) for name in frame.columns]
    _require_unique_names(names, "the table")
    columns = (frame[name] for name in frame.columns)
    return _from_columns(dict(zip(names, columns, strict=True)))


def _read_mapping(content: Mapping[str, Any]) -> NumberedRecords:
    """Return the records of a mapping.

    It may map names to columns, one key to a list of records, run names to records, or follow
    pandas' JSON orientations.
    """
    if not content:
        return []
    if {"columns", "data"} <= set(content):
        names = content["columns"]
        return read_records([dict(zip(names, row, strict=True)) for row in content["data"]], None)
    for key in RECORD_KEYS:
        records = content.get(key)
        if isinstance(records, list) and records and isinstance(records[0], Mapping):
            return read_records(records, None)
    values = list(content.values())
    if all(isinstance(v, Mapping) for v in values):
        if any(is_known_name(name) for name in content):
            # pandas' orient="columns": {"N": {"0": …, "1": …}}
            return _from_columns({name: list(v.values()) for name, v in content.items()})
        return read_records(values, None)
    if not any(isinstance(v, list | tuple | np.ndarray) or hasattr(v, "__len__") for v in values):
        return [(1, _flatten(content))]
    return _from_columns(content)


def _from_columns(columns: Mapping[str, Any]) -> NumberedRecords:
    """Return the records of columns of the same length."""
    # tolist() makes Python values, so masked cells are None and messages show cells as written.
    table = {name: np.atleast_1d(np.asanyarray(v)).tolist() for name, v in columns.items()}
    lengths = {name: len(v) for name, v in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")
    records = []
    for position, cells in enumerate(zip(*table.values(), strict=True), 1):
        records.append((position, _flatten(dict(zip(table, cells, strict=True)))))
    return records


def _read_file(path: Path, delimiter: str | None) -> NumberedRecords:
    """Return the records of a CSV, JSON or JSONL file."""
    suffix = path.suffix.lower()
    if suffix in BINARY_SUFFIXES:
        raise ValueError(f"{path} is not a text file: read it with pandas and pass the DataFrame")
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    if suffix in (".json", ".jsonl", ".ndjson") or text.lstrip()[:1] in ("{", "["):
        return _read_json(path, text)
    return _read_csv(path, text, "\t" if suffix == ".tsv" and delimiter is None else delimiter)


def _read_json(path: Path, text: str) -> NumberedRecords:
    """Return the records of JSON, or of one JSON object per line."""
    try:
        return read_records(json.loads(text), None)
    except json.JSONDecodeError as error:
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) == 1:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    records = []
    for i, line in lines:
        try:
            records.append((i, _flatten(json.loads(line))))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {i} is not valid JSON: {error}") from None
    return records


def _read_csv(path: Path, text: str, delimiter: str | None) -> NumberedRecords:
    """Return the records of a CSV file; comments, blank lines and repeated headers are skipped."""
    numbered = enumerate(text.splitlines(), 1)
    content = [(i, line) for i, line in numbered if line.strip(" \t\r,;|")]
    comments = [line for _, line in content if line.lstrip().startswith("#")]
    content = [(i, line) for i, line in content if not line.lstrip().startswith("#")]
    if not content:
        return []
    mark = _find_delimiter(content[0][1]) if delimiter is None else delimiter
    rows = _split_lines(content, mark)
    header = rows.pop(0)[1]
    if all(_is_numeric(cell) for cell in header if cell) and comments:
        # numpy.savetxt writes the header as a comment.
        rows.insert(0, (content[0][0], header))
        header = next(csv.reader([comments[-1].lstrip(" #")], delimiter=mark))
    header = [name.strip() for name in header]
    _check_header(path, header, mark)
    records = []
    for line, cells in rows:
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        if [cell.lower() for cell in cells] == [name.lower() for name in header]:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} cells under {len(header)} columns"
                f" {header}; is {mark!r} the delimiter?"
            )
        records.append((line, _flatten(dict(zip(header, cells, strict=True)))))
    return records


def _split_lines(content: list[tuple[int, str]], mark: str) -> list[tuple[int, list[str]]]:
    """Return the cells of each row with the line on which it starts."""
    # Quoted cells may contain line breaks, so the reader's own line count is used.
    reader = csv.reader([line for _, line in content], delimiter=mark, skipinitialspace=True)
    rows = []
    lines_before = 0
    for cells in reader:
        if mark == " ":
            cells = [cell for cell in cells if cell]
        rows.append((content[lines_before][0], [cell.strip() for cell in cells]))
        lines_before = reader.line_num
    if content[0][1].lstrip().startswith("|"):
        # A Markdown table has empty outer cells and a ruler below its header.
        rows = [(i, cells[1:-1]) for i, cells in rows if not set("".join(cells)) <= set("-: ")]
    return rows


def _check_header(path: Path, header: list[str], mark: str) -> None:
    """Raise `ValueError` unless a header consists of several different names."""
    if all(_is_numeric(cell) for cell in header if cell):
        raise ValueError(f"{path}: the first line holds numbers, {header}: put names above them")
    if len(header) < 2:
        other = next((d for d in ";\t|," if d in "".join(header) and d != mark), None)
        hint = f"; pass delimiter={other!r}" if other else ""
        raise ValueError(f"{path}: delimiter {mark!r} leaves one column, {header}{hint}")
    _require_unique_names(header, path)


def _require_unique_names(names: list[str], table: object) -> None:
    if repeated := {name for name in names if name and names.count(name) > 1}:
        raise ValueError(f"{table} has several columns {sorted(repeated)}: rename all but one")


def _find_delimiter(header: str) -> str:
    """Return the most frequent delimiter of a header; a space if it has none."""
    delimiter = max("\t;|,", key=header.count)
    return delimiter if delimiter in header else " "


def _is_numeric(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.,_' ]+(e[-+]?\d+)?", cell.strip(), re.IGNORECASE) is not None


def _flatten(record: Mapping[str, Any], path: str = "") -> Record:
    """Return a record whose nested mappings are replaced by names such as "outer.inner".

    Nested mappings may also be text, as JSON or, in exports of wandb's API, as Python literals.
    """
    flat: Record = {}
    for name, value in record.items():
        nested = _parse_mapping(value) if isinstance(value, str) and value[:1] == "{" else value
        if not isinstance(nested, Mapping):
            flat[path + str(name)] = value
        elif "value" in nested and set(nested) <= {"value", "desc"}:
            # wandb's config.yaml stores each value under the key "value".
            flat[path + str(name)] = nested["value"]
        else:
            flat.update(_flatten(nested, f"{path}{name}."))
    return flat


def _parse_mapping(text: str) -> Any:
    """Return the value of a JSON or Python literal; the text itself if it is neither."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        finite = re.sub(r"(?<=[:\[, ])(nan|-?inf)(?=[,}\]])", "None", text)
    try:
        return ast.literal_eval(finite)
    except (ValueError, SyntaxError):
        return text

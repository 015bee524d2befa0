"""Records from whatever holds a table: CSV of any dialect, JSON, JSONL, DataFrames, exports.

Notable: nothing is guessed about numbers here, a record maps names to raw cells; each keeps the
line or position that it came from, so that every later message can name it.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.names import is_known

Record = dict[str, Any]
Located = list[tuple[int, Record]]
"""Records, each with the line of its file or its position from 1."""

WRAPPERS = ("runs", "data", "rows", "results", "records")


def located(source: Any, delimiter: str | None) -> Located:
    """All records of a path, a DataFrame, a mapping of columns or an iterable of records."""
    if isinstance(source, str | Path):
        return _file(Path(source), delimiter)
    if hasattr(source, "columns") and not isinstance(source, Mapping):
        if any(getattr(getattr(source, "index", None), "names", ())):  # pandas' named levels
            source = source.reset_index()
        names = [str(name) for name in source.columns]
        _no_name_twice(names, "the table")
        return _columns(dict(zip(names, (source[name] for name in source.columns), strict=True)))
    if isinstance(source, Mapping):
        return _mapping(source)
    if not isinstance(source, Iterable):
        raise TypeError(f"runs come from a path, columns, records or a DataFrame, not {source!r}")
    if isinstance(source, np.ndarray) and source.dtype.names:
        return _columns({name: source[name] for name in source.dtype.names})
    records = list(source)
    for wrong in (r for r in records if not isinstance(r, Mapping)):
        raise TypeError(f"a record must map names to values, not {wrong!r}")
    return list(enumerate(map(_flatten, records), 1))


def _mapping(content: Mapping[str, Any]) -> Located:
    """Columns by name; or records under one key, under their names, or as pandas writes them."""
    if not content:
        return []
    if {"columns", "data"} <= set(content):
        names = content["columns"]
        return located([dict(zip(names, row, strict=True)) for row in content["data"]], None)
    for key in WRAPPERS:
        inner = content.get(key)
        if isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            return located(inner, None)
    values = list(content.values())
    if all(isinstance(v, Mapping) for v in values):
        if any(is_known(name) for name in content):  # {"N": {"0": …, "1": …}}
            return _columns({name: list(v.values()) for name, v in content.items()})
        return located(values, None)
    if not any(isinstance(v, list | tuple | np.ndarray) or hasattr(v, "__len__") for v in values):
        return [(1, _flatten(content))]
    return _columns(content)


def _columns(columns: Mapping[str, Any]) -> Located:
    # As Python's own values: what is masked is None, and messages show cells as they were given.
    table = {name: np.atleast_1d(np.asanyarray(v)).tolist() for name, v in columns.items()}
    lengths = {name: len(v) for name, v in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")
    by_row = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
    return list(enumerate(map(_flatten, by_row), 1))


def _file(path: Path, delimiter: str | None) -> Located:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".feather", ".xlsx", ".xls", ".gz", ".zip"):
        raise ValueError(f"{path} is no text: read it with pandas and pass the DataFrame")
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    if suffix in (".json", ".jsonl", ".ndjson") or text.lstrip()[:1] in ("{", "["):
        return _json(path, text)
    return _csv(path, text, "\t" if suffix == ".tsv" and delimiter is None else delimiter)


def _json(path: Path, text: str) -> Located:
    try:
        return located(json.loads(text), None)
    except json.JSONDecodeError as whole:
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) == 1:
            raise ValueError(f"{path} is no JSON: {whole}") from None
    records = []
    for i, line in lines:
        try:
            records.append((i, _flatten(json.loads(line))))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {i} is no JSON: {error}") from None
    return records


def _csv(path: Path, text: str, delimiter: str | None) -> Located:
    """Comments and blank lines are passed over, and a header that is repeated further down."""
    lines = text.splitlines()
    kept = [(i, line) for i, line in enumerate(lines, 1) if line.strip(" \t\r,;|")]
    comments = [line for _, line in kept if line.lstrip().startswith("#")]
    kept = [(i, line) for i, line in kept if not line.lstrip().startswith("#")]
    if not kept:
        return []
    mark = _delimiter(kept[0][1]) if delimiter is None else delimiter
    # Cells in quotes may hold line ends, so the reader counts the lines itself.
    reader = csv.reader([line for _, line in kept], delimiter=mark, skipinitialspace=True)
    rows, before = [], 0
    for cells in reader:
        if mark == " ":
            cells = [cell for cell in cells if cell]
        rows.append((kept[before][0], [cell.strip() for cell in cells]))
        before = reader.line_num
    if kept[0][1].lstrip().startswith("|"):  # a table in Markdown
        rows = [(i, c[1:-1]) for i, c in rows if not set("".join(c)) <= set("-: ")]
    header = rows[0][1]
    if all(_numeric(cell) for cell in header if cell) and comments:
        header = next(csv.reader([comments[-1].lstrip(" #")], delimiter=mark))  # numpy.savetxt's
        rows.insert(0, (0, header))
    header = [name.strip() for name in header]
    if all(_numeric(cell) for cell in header if cell):
        raise ValueError(f"{path}: the first line holds numbers, {header}: put names above them")
    if len(header) < 2:
        other = next((d for d in ";\t|," if d in "".join(header) and d != mark), None)
        hint = f"; pass delimiter={other!r}" if other else ""
        raise ValueError(f"{path}: delimiter {mark!r} leaves one column, {header}{hint}")
    _no_name_twice(header, path)
    records = []
    for line, cells in rows[1:]:
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


def _no_name_twice(names: list[str], table: object) -> None:
    if twice := {name for name in names if name and names.count(name) > 1}:
        raise ValueError(f"{table} has several columns {sorted(twice)}: rename all but one")


def _delimiter(header: str) -> str:
    found = max("\t;|,", key=header.count)
    return found if found in header else " "


def _numeric(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.,_' ]+(e[-+]?\d+)?", cell.strip(), re.IGNORECASE) is not None


def _flatten(record: Mapping[str, Any], path: str = "") -> Record:
    """A record with what lies in mappings at its top, under "outer.inner".

    Mappings may be written out as JSON or, as wandb's own API exports them, in Python.
    """
    flat: Record = {}
    for name, value in record.items():
        nested = _written_out(value) if isinstance(value, str) and value[:1] == "{" else value
        if not isinstance(nested, Mapping):
            flat[path + str(name)] = value
        elif "value" in nested and set(nested) <= {"value", "desc"}:  # wandb's config.yaml
            flat[path + str(name)] = nested["value"]
        else:
            flat.update(_flatten(nested, f"{path}{name}."))
    return flat


def _written_out(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        plain = re.sub(r"(?<=[:\[, ])(nan|-?inf)(?=[,}\]])", "None", text)
    try:
        return ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return text

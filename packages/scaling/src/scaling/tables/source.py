"""Tables from any source: CSV of any dialect, JSON, JSONL, data frames, exports of trackers.

Numbers are not interpreted here: a `Table` has the raw cells of each column. Each row keeps its
line or position, so that every later message can refer to it.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import list_some
from scaling.tables.names import is_known_name, recognize

Record = dict[str, Any]
NumberedCells = tuple[int, tuple[str, ...]]
Cells = NDArray[Any]

#: Keys under which JSON files store their records.
RECORD_KEYS = ("runs", "data", "rows", "results", "records")

#: Suffixes of files that are not text.
BINARY_SUFFIXES = (".parquet", ".feather", ".xlsx", ".xls", ".gz", ".zip", ".arrow", ".db")

#: Names of the columns of a table with one row per metric, as in exports of TensorBoard and MLflow.
METRIC_NAMES = ("tag", "key", "metric", "metric_name")
METRIC_RUNS = ("run", "dir_name", "run_id", "run_uuid", "run_name")


@dataclass(frozen=True)
class Table:
    """The cells of a table by column; a cell that a record does not have is None."""

    columns: dict[str, Cells]
    #: The line or the position from 1 of each row.
    rows: NDArray[np.intp]
    #: Sentences on how the source was read.
    choices: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, which: Cells) -> "Table":
        """Return the rows that a mask or an array of positions selects."""
        columns = {name: cells[which] for name, cells in self.columns.items()}
        return Table(columns, self.rows[which], self.choices)

    def where(self, wanted: Mapping[str, Any], source: str) -> "Table":
        """Return the rows with these cells; raise `ValueError` if there are none."""
        table = self
        for name, value in wanted.items():
            texts = list(map(str, table.cells(name))) if name in table.columns else []
            table = table.select(np.flatnonzero([text == str(value) for text in texts]))
            if not len(table):
                seen = dict.fromkeys(texts)
                reason = f"it is {list_some(seen)}" if seen else "there is no such column"
                raise ValueError(f"{source}: {name!r} is nowhere {value!r}; {reason}")
        return table

    def cells(self, name: str) -> list[Any]:
        """Return a column as Python values, so that messages show cells as they were written."""
        values: list[Any] = self.columns[name].tolist()
        return values

    def codes(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Return an index from 0 of the texts that each row has in some columns."""
        index: dict[tuple[str, ...], int] = {}
        keys = zip(*(map(str, self.cells(name)) for name in names), strict=True)
        codes = (index.setdefault(key, len(index)) for key in keys)
        return np.fromiter(codes, np.intp, len(self))


def read_table(source: Any, delimiter: str | None) -> Table:
    """Return the table of a path, a data frame, a mapping of columns or an iterable of records."""
    return _pivot(_flatten_cells(_read(source, delimiter)))


def _read(source: Any, delimiter: str | None) -> Table:
    if isinstance(source, str | Path):
        return _read_file(Path(source), delimiter)
    if hasattr(source, "collect"):
        source = source.collect()  # a LazyFrame of polars
    if hasattr(source, "columns") and not isinstance(source, Mapping):
        return _read_frame(source)
    if isinstance(source, Mapping):
        return _read_mapping(source)
    if not isinstance(source, Iterable):
        raise TypeError(f"expected a path, columns, records or a DataFrame, got {source!r}")
    if isinstance(source, np.ndarray) and source.dtype.names:
        return _from_columns({name: source[name] for name in source.dtype.names})
    return _from_records(list(source))


def _from_records(records: Sequence[Any], rows: Sequence[int] | None = None) -> Table:
    """Return the table of records, which map names to cells."""
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(f"expected a record that maps names to values, got {record!r}")
    flat = [_flatten(record) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    columns = {name: _cells([record.get(name) for record in flat]) for name in names}
    positions = np.arange(1, len(flat) + 1) if rows is None else np.array(rows, np.intp)
    return Table(columns, positions)


def _cells(values: Sequence[Any]) -> Cells:
    return np.fromiter(values, object, len(values))


def _read_frame(frame: Any) -> Table:
    """Return the table of a DataFrame of pandas or polars, or of an Arrow table."""
    if any(getattr(getattr(frame, "index", None), "names", ())):
        frame = frame.reset_index()  # named index levels of pandas count as columns
    # The attribute `columns` of an Arrow table has the cells.
    names = [str(name) for name in getattr(frame, "column_names", frame.columns)]
    _require_unique_names(names, "the table")
    keys = names if hasattr(frame, "column_names") else frame.columns
    return _from_columns(dict(zip(names, (frame[key] for key in keys), strict=True)))


def _read_mapping(content: Mapping[str, Any]) -> Table:
    """Return the table of a mapping.

    It may map names to columns, one key to a list of records, run names to records, or follow
    pandas' JSON orientations.
    """
    if not content:
        return _from_records([])
    if {"columns", "data"} <= set(content):
        names = content["columns"]
        return _from_records([dict(zip(names, row, strict=True)) for row in content["data"]])
    for key in RECORD_KEYS:
        records = content.get(key)
        if isinstance(records, list) and records and isinstance(records[0], Mapping):
            return _from_records(records)
    values = list(content.values())
    if all(isinstance(v, Mapping) for v in values):
        if any(is_known_name(name) for name in content):
            # pandas' orient="columns": {"N": {"0": …, "1": …}}
            # The keys identify the rows, whose order may differ between columns.
            keys = dict.fromkeys(key for column in values for key in column)
            return _from_columns({n: [c.get(k) for k in keys] for n, c in content.items()})
        return _from_records(values)
    if not any(isinstance(v, list | tuple | np.ndarray) or hasattr(v, "__len__") for v in values):
        return _from_records([content])
    return _from_columns(content)


def _from_columns(content: Mapping[str, Any]) -> Table:
    """Return the table of columns of the same length."""
    _require_same_index(content)
    columns = {}
    for name, values in content.items():
        cells = np.atleast_1d(np.asanyarray(values))
        if cells.dtype.kind not in "biuf" or isinstance(cells, np.ma.MaskedArray):
            cells = _cells(cells.tolist())  # masked cells become None
        columns[str(name)] = cells
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")
    return Table(columns, np.arange(1, max(lengths.values(), default=0) + 1))


def _require_same_index(content: Mapping[str, Any]) -> None:
    """Raise `ValueError` if columns are pandas Series whose rows have different labels."""
    indexes = {n: v.index for n, v in content.items() if hasattr(v, "iloc")}
    for first, name in pairwise(indexes):
        if not indexes[first].equals(indexes[name]):
            raise ValueError(
                f"columns {first!r} and {name!r} are Series with different indexes; pass a"
                " DataFrame, which aligns them, or arrays"
            )


def _read_file(path: Path, delimiter: str | None) -> Table:
    """Return the table of a CSV, JSON or JSONL file."""
    suffix = path.suffix.lower()
    if suffix in BINARY_SUFFIXES or "tfevents" in path.name:
        raise ValueError(
            f"{path} is not a text file: read it with pandas, polars, pyarrow or, for TensorBoard,"
            " tbparse, and pass the DataFrame"
        )
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    choices = []
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
        choices.append("the text is not UTF-8 and is read as Latin-1")
    if suffix in (".json", ".jsonl", ".ndjson") or text.lstrip()[:1] in ("{", "["):
        table = _read_json(path, text)
    else:
        mark = "\t" if suffix == ".tsv" and delimiter is None else delimiter
        table = _read_csv(path, text, mark)
    return Table(table.columns, table.rows, [*choices, *table.choices])


def _read_json(path: Path, text: str) -> Table:
    """Return the table of JSON, or of one JSON object per line."""
    try:
        return _read(json.loads(text), None)
    except json.JSONDecodeError as error:
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) == 1:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    records = []
    for i, line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {i} is not valid JSON: {error}") from None
    return _from_records(records, [i for i, _ in lines])


def _read_csv(path: Path, text: str, delimiter: str | None) -> Table:
    """Return the table of a CSV file; comments, blank lines and repeated headers are skipped."""
    numbered = enumerate(text.splitlines(), 1)
    content = [(i, line) for i, line in numbered if line.strip(" \t\r,;|")]
    comments = [line for _, line in content if line.lstrip()[:1] == "#"]
    if comments:
        content = [(i, line) for i, line in content if line.lstrip()[:1] != "#"]
    if not content:
        return _from_records([])
    mark = _find_delimiter(content[0][1]) if delimiter is None else delimiter
    if '"' in text or mark in " |":
        rows = _split_lines(content, mark)
    else:
        # The garbage collector does not traverse tuples of text, unlike a million lists.
        rows = [(i, tuple(line.split(mark))) for i, line in content]
    header: Sequence[str] = rows.pop(0)[1]
    if all(_is_numeric(cell) for cell in header if cell) and comments:
        # numpy.savetxt writes the header as a comment.
        rows.insert(0, (content[0][0], tuple(header)))
        header = next(csv.reader([comments[-1].lstrip(" #")], delimiter=mark))
    header = [name.strip() for name in header]
    _check_header(path, header, mark)
    choices = [] if delimiter is not None else [f"cells are separated by {mark!r}"]
    if comments:
        choices.append(f"{len(comments)} lines that start with '#' are comments")
    data_rows = _check_rows(path, rows, header, mark)
    if len(data_rows) < len(rows):
        choices.append(f"{len(rows) - len(data_rows)} rows that repeat the header are skipped")
    columns = {}
    for k, name in enumerate(header if data_rows else []):
        columns[name] = _cells([cells[k].strip() for _, cells in data_rows])
    return Table(columns, np.array([line for line, _ in data_rows], np.intp), choices)


def _check_rows(
    path: Path, rows: list[NumberedCells], header: Sequence[str], mark: str
) -> list[NumberedCells]:
    """Return the rows that do not repeat the header; raise `ValueError` for a ragged row."""
    lowered = [name.lower() for name in header]
    data_rows = []
    for line, cells in rows:
        while len(cells) > len(header) and not cells[-1]:
            cells = cells[:-1]
        is_header = cells[0].strip().lower() == lowered[0]
        if is_header and [cell.strip().lower() for cell in cells] == lowered:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} cells under {len(header)} columns"
                f" {header}; is {mark!r} the delimiter?"
            )
        data_rows.append((line, cells))
    return data_rows


def _split_lines(content: list[tuple[int, str]], mark: str) -> list[NumberedCells]:
    """Return the cells of each row with the line on which it starts."""
    # Quoted cells may contain line breaks, so the reader's own line count is used.
    reader = csv.reader([line for _, line in content], delimiter=mark, skipinitialspace=True)
    rows = []
    lines_before = 0
    for cells in reader:
        if mark == " ":
            cells = [cell for cell in cells if cell]
        rows.append((content[lines_before][0], tuple(cells)))
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


def _flatten_cells(table: Table) -> Table:
    """Return a table whose cells are not mappings, not even as text."""
    for cells in table.columns.values():
        if cells.dtype == object and any(
            c[:1] == "{" if isinstance(c, str) else isinstance(c, Mapping) for c in cells
        ):
            names = list(table.columns)
            rows = zip(*table.columns.values(), strict=True)
            records = [dict(zip(names, row, strict=True)) for row in rows]
            flat = _from_records(records, table.rows.tolist())
            return Table(flat.columns, flat.rows, table.choices)
    return table


def _flatten(record: Mapping[str, Any], path: str = "") -> Record:
    """Return a record whose nested mappings are replaced by names such as "outer.inner".

    Nested mappings may also be text, as JSON or, in exports of wandb's API, as Python literals, or
    lists of keys and values, as in exports of MLflow's API.
    """
    flat: Record = {}
    for name, value in record.items():
        nested = _parse_mapping(value) if isinstance(value, str) and value[:1] == "{" else value
        pairs = nested if isinstance(nested, list) else []
        if pairs and all(isinstance(p, Mapping) and {"key", "value"} <= set(p) for p in pairs):
            nested = {pair["key"]: pair["value"] for pair in pairs}
        if not isinstance(nested, Mapping):
            added = {path + str(name): value}
        elif "value" in nested and set(nested) <= {"value", "desc"}:
            # wandb's config.yaml stores each value under the key "value".
            added = {path + str(name): nested["value"]}
        else:
            added = _flatten(nested, f"{path}{name}.")
        if repeated := flat.keys() & added.keys():
            raise ValueError(
                f"a record has {min(repeated)!r} as a name and as nested mappings; keep one of them"
            )
        flat |= added
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


def _pivot(table: Table) -> Table:
    """Return a table with a column per metric, if it has a row per metric and step.

    A metric that is logged once per run, such as its size, belongs to every row of the run. A loss
    belongs to its step alone.
    """
    lowered = {name.lower(): name for name in table.columns}
    metric = next((lowered[name] for name in METRIC_NAMES if name in lowered), None)
    has_losses = any(recognize(name, "loss") for name in table.columns)
    if metric is None or has_losses or not {"value", "step"} <= set(lowered):
        return table
    run_names = [lowered[name] for name in METRIC_RUNS if name in lowered][:1]
    runs = table.codes(run_names) if run_names else np.zeros(len(table), np.intp)
    records: dict[tuple[int, str], Record] = {}
    rows: dict[tuple[int, str], int] = {}
    by_run: dict[int, dict[str, list[Any]]] = {}
    names = [metric, lowered["value"], lowered["step"], *run_names]
    for i, (tag, value, step, *run) in enumerate(zip(*map(table.cells, names), strict=True)):
        key = (int(runs[i]), str(step))
        record = records.setdefault(key, {"step": step, **dict(zip(run_names, run, strict=True))})
        if record.get(str(tag), value) != value:
            raise ValueError(
                f"{tag!r} has two values at step {step} of one run, {record[str(tag)]} and {value},"
                " as after a restart; keep the rows of one attempt"
            )
        record[str(tag)] = value
        rows.setdefault(key, int(table.rows[i]))
        by_run.setdefault(key[0], {}).setdefault(str(tag), []).append(value)
    for (run_code, _), record in records.items():
        for tag, values in by_run[run_code].items():
            if len(values) == 1 and not recognize(tag, "loss"):
                record[tag] = values[0]
    wide = _from_records(list(records.values()), list(rows.values()))
    choice = f"each row is a metric, named by {metric!r}: rows of one step are read as one"
    return Table(wide.columns, wide.rows, [*table.choices, choice])

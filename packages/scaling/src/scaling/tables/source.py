"""Tables from any source: files, data frames, columns, records, and exports of trackers.

Numbers are not parsed in this module: a `Table` has the raw cells of each column.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from scaling.tables.files import parse_csv, parse_json, read_text
from scaling.tables.names import NAMES, recognize
from scaling.tables.reshape import flatten_cells, from_records, pivot
from scaling.tables.table import Table, as_object_cells, require_unique_names

#: Keys under which JSON files store their records.
RECORD_KEYS = ("runs", "data", "rows", "results", "records")


def read_table(source: Any) -> Table:
    """Return the table of a path, a data frame, a mapping of columns or an iterable of records."""
    return pivot(_read(source))


def _read(source: Any) -> Table:
    if isinstance(source, str | Path):
        return _read_file(Path(source))
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
    return from_records(list(source))


def _read_file(path: Path) -> Table:
    text = read_text(path)
    is_json = path.suffix.lower() in (".json", ".jsonl", ".ndjson")
    if not is_json and text.lstrip()[:1] not in ("{", "["):
        return parse_csv(path, text)
    content, lines = parse_json(path, text)
    try:
        if isinstance(content, list):
            return from_records(content, lines)
        if isinstance(content, dict):
            return _read_mapping(content)
        raise TypeError(f"expected records or columns, got {content!r}")
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_frame(frame: Any) -> Table:
    """Return the table of a DataFrame of pandas or polars, or of an Arrow table."""
    if any(getattr(getattr(frame, "index", None), "names", ())):
        frame = frame.reset_index()  # named index levels of pandas count as columns
    # The attribute `columns` of an Arrow table has the cells, and `column_names` the names.
    names = [str(name) for name in getattr(frame, "column_names", frame.columns)]
    require_unique_names(names, "the table")
    keys = names if hasattr(frame, "column_names") else frame.columns
    return _from_columns(dict(zip(names, (frame[key] for key in keys), strict=True)))


def _read_mapping(content: Mapping[str, Any]) -> Table:
    """Return the table of a mapping.

    The mapping may be from names to columns, from a key such as "runs" to a list of records, or
    from run names to records. It may also be the JSON of a pandas data frame, or a single record.
    """
    if not content:
        return from_records([])
    lists = [key for key in RECORD_KEYS if _are_records(content.get(key))]
    if len(lists) > 1:
        raise ValueError(f"{lists} are several lists of records: pass one of them")
    for key in lists:
        table = from_records(content[key])
        total = content.get("num_rows_total")
        if content.get("next_page_token") or (isinstance(total, int) and total > len(table)):
            raise ValueError(
                f"{key!r} has one page of a longer list, {len(table)} records: pass the records of"
                " all pages, or pass only these records to read this page"
            )
        table.choices.append(f"the records are those of {key!r}")
        return table
    values = list(content.values())
    if all(isinstance(v, Mapping) for v in values):
        if any(recognize(name, quantity) for name in content for quantity in NAMES):
            # pandas' orient="columns": {"N": {"0": …, "1": …}}
            # The keys identify the rows, because the order of rows may differ between columns.
            keys = dict.fromkeys(key for column in values for key in column)
            return _from_columns({n: [c.get(k) for k in keys] for n, c in content.items()})
        return from_records(values)
    if not any(isinstance(v, list | tuple | np.ndarray) or hasattr(v, "__len__") for v in values):
        return from_records([content])
    return _from_columns(content)


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _from_columns(content: Mapping[str, Any]) -> Table:
    _require_same_index(content)
    columns = {}
    for name, values in content.items():
        cells = np.atleast_1d(np.asanyarray(values))
        if cells.ndim > 1:  # NumPy drops the field names of a column of structs of polars
            cells = as_object_cells(list(values))
        if cells.dtype.kind not in "biuf" or isinstance(cells, np.ma.MaskedArray):
            cells = as_object_cells(cells.tolist())  # masked cells become None
        columns[str(name)] = cells
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {lengths}")
    rows = np.arange(1, max(lengths.values(), default=0) + 1)
    return flatten_cells(Table(columns, rows))


def _require_same_index(content: Mapping[str, Any]) -> None:
    """Raise `ValueError` if columns are pandas Series whose rows have different labels."""
    indexes = {n: v.index for n, v in content.items() if hasattr(v, "iloc")}
    for first, name in pairwise(indexes):
        if not indexes[first].equals(indexes[name]):
            raise ValueError(
                f"columns {first!r} and {name!r} are Series with different indexes; pass a"
                " DataFrame, which aligns them, or arrays"
            )

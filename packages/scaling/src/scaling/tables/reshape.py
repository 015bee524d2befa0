"""Conversion of nested records, and of tables with one row per metric, to plain tables.

wandb, MLflow and TensorBoard export nested values and one row per metric and step.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaling.tables.names import recognize
from scaling.tables.table import Table, as_object_cells

Record = dict[str, Any]

#: Names of the column of metrics in a table with one row per metric, such as TensorBoard's.
METRIC_NAMES = ("tag", "key", "metric", "metric_name")
#: Names of the column of runs in such a table.
METRIC_RUNS = ("run", "dir_name", "run_id", "run_uuid", "run_name")


def from_records(records: Sequence[Any], rows: Sequence[int] | None = None) -> Table:
    """Return the table of records that map names to cells; raise `TypeError` for other records."""
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(f"expected a record that maps names to values, got {record!r}")
    flat = [_flatten(record) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    columns = {name: as_object_cells([record.get(name) for record in flat]) for name in names}
    positions = np.arange(1, len(flat) + 1) if rows is None else np.array(rows, np.intp)
    return Table(columns, positions)


def flatten_cells(table: Table) -> Table:
    """Return a table in which nested cells, even if stored as text, are separate columns."""
    for cells in table.columns.values():
        if cells.dtype == object and any(
            c[:1] == "{" if isinstance(c, str) else isinstance(c, Mapping) for c in cells
        ):
            names = list(table.columns)
            rows = zip(*table.columns.values(), strict=True)
            records = [dict(zip(names, row, strict=True)) for row in rows]
            flat = from_records(records, table.rows.tolist())
            return Table(flat.columns, flat.rows, table.choices)
    return table


def _flatten(record: Mapping[str, Any], path: str = "") -> Record:
    """Return a record without nested mappings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    A cell is also read as a nested mapping if it is text in JSON or the text of a Python dict
    (wandb's API). The same holds for a list of `{"key": …, "value": …}` (MLflow's API). Raises
    `ValueError` if two cells would have one name.
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
                f"expected unique names, got the key and the path {min(repeated)!r}; keep one"
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


def pivot(table: Table) -> Table:
    """Return a table with one column per metric, if it has one row per metric and step.

    A metric that is logged once per run, such as the size, applies to every row of the run. A loss
    applies only to its step. Other tables are returned unchanged. Raises `ValueError` if a metric
    has two values at one step of a run.
    """
    lowered = {name.lower(): name for name in table.columns}
    metric = next((lowered[name] for name in METRIC_NAMES if name in lowered), None)
    has_losses = any(recognize(name, "loss") for name in table.columns)
    if metric is None or has_losses or not {"value", "step"} <= set(lowered):
        return table
    run_names = [lowered[name] for name in METRIC_RUNS if name in lowered][:1]
    runs = table.encode_columns(run_names) if run_names else np.zeros(len(table), np.intp)
    records: dict[tuple[int, str], Record] = {}
    rows: dict[tuple[int, str], int] = {}
    by_run: dict[int, dict[str, list[Any]]] = {}
    names = [metric, lowered["value"], lowered["step"], *run_names]
    for i, (tag, value, step, *run) in enumerate(zip(*map(table.get_cells, names), strict=True)):
        key = (int(runs[i]), str(step))
        record = records.setdefault(key, {"step": step, **dict(zip(run_names, run, strict=True))})
        earlier = record.get(str(tag), value)
        is_nan = earlier != earlier and value != value
        if earlier != value and not is_nan:
            raise ValueError(
                f"{tag!r} has two values at step {step} of one run, {earlier} and {value},"
                " as after a restart; keep the rows of one attempt"
            )
        record[str(tag)] = value
        rows.setdefault(key, int(table.rows[i]))
        by_run.setdefault(key[0], {}).setdefault(str(tag), []).append(value)
    for (run_code, _), record in records.items():
        for tag, values in by_run[run_code].items():
            if len(values) == 1 and not recognize(tag, "loss"):
                record[tag] = values[0]
    wide = from_records(list(records.values()), list(rows.values()))
    choice = f"each row is a metric, named by {metric!r}: rows of one step are read as one"
    return Table(wide.columns, wide.rows, [*table.choices, choice])

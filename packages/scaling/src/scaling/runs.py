"""Training runs: how large the model, how many tokens it saw, what it cost, where its loss ended.

Notable: two of parameters, tokens and compute are enough, the third follows from C = 6 N D; columns
are found under their usual names; whatever a fit could choke on is refused here, by row and column.
"""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FLOPS_PER_PARAMETER_TOKEN = 6.0
"""Forward and backward of a dense model: C = 6 N D (Kaplan et al. 2020, section 2.1)."""

LARGEST_LOSS = 20.0
"""Nats; guessing uniformly among a million tokens costs 13.8."""

# Compared in lower case without blanks, "_", "-", "." and "/"; the first that a table has wins.
NAMES = {
    "parameters": (
        "parameters params n nparams numparams nparameters numparameters modelsize modelparams"
    ),
    "tokens": (
        "tokens d ntokens numtokens trainingtokens traintokens tokensseen totaltokens datasize"
    ),
    "compute": (
        "compute c flops flop computebudget trainingflop trainingflops trainflops totalflops"
    ),
    "loss": "loss l finalloss valloss validationloss evalloss testloss trainloss trainingloss",
}


class ScalingWarning(UserWarning):
    """The data or the method cannot carry the question as well as the answer looks."""


@dataclass(frozen=True)
class Runs:
    """A table of finished runs, each column a float64 vector of the same length.

    `load_runs` makes one from a file, from records or from columns, and checks it.
    """

    parameters: Array
    tokens: Array
    compute: Array
    loss: Array
    rows: tuple[int, ...]
    """Where each run stood in its source, for messages: a file's line, or a position from 1."""

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, which: slice | NDArray[Any] | Sequence[int]) -> Runs:
        """The runs that a slice, a mask or a list of positions picks."""
        index = np.arange(len(self))[which]
        columns = {name: getattr(self, name)[index] for name in NAMES}
        return Runs(**columns, rows=tuple(self.rows[i] for i in index))

    def without_highest(self, count: int) -> Runs:
        """All but the `count` runs of the highest loss, which are the likeliest to be misread."""
        return self[np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count])]

    def budgets(self, tolerance: float = 0.05) -> list[Runs]:
        """The runs grouped by compute, ascending; a gap wider than `tolerance` starts a group."""
        order = np.argsort(self.compute, kind="stable")
        gaps = np.diff(np.log(self.compute[order])) > math.log1p(tolerance)
        return [self[group] for group in np.split(order, np.flatnonzero(gaps) + 1)]


def load_runs(
    source: str | Path | Mapping[str, ArrayLike] | Iterable[Mapping[str, Any]],
    *,
    delimiter: str = ",",
    columns: Mapping[str, str] | None = None,
    tolerance: float = 0.1,
) -> Runs:
    """Runs from a CSV, JSON or JSONL file, from a mapping of columns or from records.

    Columns go by their usual names (`N`, `params`, `model_size`, `Training FLOP`, `val_loss`, …);
    `columns={"loss": "eval/ce"}` names the others. Two of parameters, tokens and compute must be
    there. A wandb export is such a CSV or JSON: `config` and `summary` are looked into, and runs
    whose `state` is not finished are left out with a warning.

    ValueError names the row and the column of every value that is missing, not a number, zero,
    negative or infinite. ScalingWarning: a compute that differs from 6 N D by more than
    `tolerance`, a loss above 20 nats, repeated rows.
    """
    records, rows = _read(source, delimiter)
    records, rows = _finished(records, rows)
    if not records:
        raise ValueError(f"{_name(source)} holds no runs")
    found = _match(records, columns or {}, _name(source))
    table = {k: _numbers(records, rows, name) for k, name in found.items()}
    if "parameters" not in table:
        table["parameters"] = table["compute"] / (FLOPS_PER_PARAMETER_TOKEN * table["tokens"])
    elif "tokens" not in table:
        table["tokens"] = table["compute"] / (FLOPS_PER_PARAMETER_TOKEN * table["parameters"])
    expected = FLOPS_PER_PARAMETER_TOKEN * table["parameters"] * table["tokens"]
    runs = Runs(**{"compute": expected, **table}, rows=tuple(rows))
    _warn(runs, runs.compute / expected, found, tolerance)
    return runs


def _name(source: object) -> str:
    return str(source) if isinstance(source, str | Path) else "the table"


def _read(source: Any, delimiter: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Records, and the line or position that each came from."""
    if isinstance(source, Mapping):
        lengths = {name: len(np.atleast_1d(np.asarray(v))) for name, v in source.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")
        by_row = zip(*(np.atleast_1d(np.asarray(v)) for v in source.values()), strict=True)
        records = [dict(zip(source, values, strict=True)) for values in by_row]
        return records, list(range(1, len(records) + 1))
    if not isinstance(source, str | Path):
        records = [_flatten(record) for record in source]
        return records, list(range(1, len(records) + 1))
    path = Path(source)
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [_flatten(json.loads(line)) for _, line in lines], [i for i, _ in lines]
    if path.suffix.lower() == ".json":
        content = json.loads(text)
        return _read(content, delimiter)
    return _read_csv(path, text, "\t" if path.suffix.lower() == ".tsv" else delimiter)


def _read_csv(path: Path, text: str, delimiter: str) -> tuple[list[dict[str, Any]], list[int]]:
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    header = next(reader, [])
    if len(header) < 2:
        other = next((d for d in ";\t|," if d in "".join(header) and d != delimiter), None)
        hint = f"; pass delimiter={other!r}" if other else ""
        raise ValueError(f"{path}: delimiter {delimiter!r} leaves one column, {header}{hint}")
    records, rows = [], []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{path}: line {reader.line_num} has {len(cells)} cells under {len(header)} columns"
                f" {header}; is {delimiter!r} the delimiter?"
            )
        records.append(_flatten(dict(zip(header, cells, strict=True))))
        rows.append(reader.line_num)
    return records, rows


def _flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with what lies in mappings, or in their JSON text as wandb writes it, at its top."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        nested = value
        if isinstance(value, str) and value.startswith("{"):
            try:
                nested = json.loads(value)
            except json.JSONDecodeError:
                nested = value
        if isinstance(nested, Mapping):
            flat.update(
                (k, v["value"] if isinstance(v, Mapping) and "value" in v else v)
                for k, v in nested.items()
            )
        else:
            flat[name] = value
    return flat


def _finished(
    records: list[dict[str, Any]], rows: list[int]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Only runs that ended: a crashed run's last loss is not its final loss."""
    state = next((k for k in records[0] if k.lower() == "state"), None) if records else None
    if state is None:
        return records, rows
    ended = [str(r.get(state, "finished")).lower() == "finished" for r in records]
    if not all(ended):
        lost = list_some(row for row, e in zip(rows, ended, strict=True) if not e)
        message = f"column {state!r} is not 'finished' in rows {lost}: those runs are left out"
        warnings.warn(message, ScalingWarning, stacklevel=3)
    keep = [i for i, e in enumerate(ended) if e]
    return [records[i] for i in keep], [rows[i] for i in keep]


def _match(
    records: list[dict[str, Any]], columns: Mapping[str, str], source: str
) -> dict[str, str]:
    """Which of the source's columns is which of ours."""
    present = list(dict.fromkeys(name for record in records for name in record))
    plain: dict[str, str] = {}
    for name in present:
        plain.setdefault("".join(c for c in name.lower() if c not in " _-./"), name)
    found = {}
    for ours, aliases in NAMES.items():
        given = columns.get(ours)
        if given is not None and given not in present:
            raise ValueError(f"{source} has no column {given!r}; it has {present}")
        usual = (plain[alias] for alias in aliases.split() if alias in plain)
        if match := given or next(usual, None):
            found[ours] = match
    if "loss" not in found or len(found) < 3:
        raise ValueError(
            f"{source} has columns {present}; needed are loss and two of parameters, tokens and "
            f"compute, found {sorted(found)}; name the others with columns={{'loss': '…'}}"
        )
    return found


def _numbers(records: list[dict[str, Any]], rows: list[int], name: str) -> Array:
    values, bad = [], []
    for record, row in zip(records, rows, strict=True):
        raw = record.get(name)
        try:
            value = float(raw)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            bad.append(f"row {row}: {raw!r}")
        values.append(value)
    if bad:
        raise ValueError(f"column {name!r} must be positive and finite, but {list_some(bad)}")
    return np.array(values, dtype=np.float64)


def _warn(runs: Runs, ratio: Array, found: Mapping[str, str], tolerance: float) -> None:
    rows = np.array(runs.rows)
    off = np.abs(ratio - 1) > tolerance
    if off.any():
        worst = ratio[np.argmax(np.abs(np.log(ratio)))]
        warnings.warn(
            f"column {found['compute']!r} is not 6 N D within {tolerance:.0%} in rows "
            f"{list_some(rows[off])} (worst: {worst:.3g} times); a "
            "parametric fit goes by N and D, an IsoFLOP fit takes budgets from it",
            ScalingWarning,
            stacklevel=3,
        )
    if (absurd := runs.loss > LARGEST_LOSS).any():
        warnings.warn(
            f"column {found['loss']!r} is above {LARGEST_LOSS:g} nats in rows "
            f"{list_some(rows[absurd])}: worse than guessing; is it a perplexity, or diverged?",
            ScalingWarning,
            stacklevel=3,
        )
    table = np.stack([runs.parameters, runs.tokens, runs.loss], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    repeated = np.arange(len(runs)) != first[inverse.reshape(-1)]
    if repeated.any():
        warnings.warn(
            f"rows {list_some(rows[repeated])} repeat earlier ones in {sorted(found.values())}: "
            "counted twice, they narrow every interval; drop them unless they are two runs",
            ScalingWarning,
            stacklevel=3,
        )


def list_some(items: Iterable[object]) -> str:
    """The first eight, and how many more there are."""
    listed = [str(item) for item in items]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")

"""Tables of raw cells, and the state while a table is read.

The line or position of each row is stored, so that later messages can refer to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import list_some
from scaling.tables.names import Column
from scaling.units import Array

Cells = NDArray[Any]


@dataclass(frozen=True)
class Table:
    """The cells of a table by column; a cell that a record does not have is None."""

    columns: dict[str, Cells]
    #: The line of each row in its source, or its position counted from 1.
    rows: NDArray[np.intp]
    #: Sentences on how the source was read.
    choices: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, selection: Cells) -> "Table":
        """Return the rows that a mask or an array of positions selects."""
        columns = {name: cells[selection] for name, cells in self.columns.items()}
        return Table(columns, self.rows[selection], self.choices)

    def select_where(self, values: Mapping[str, Any], source: str) -> "Table":
        """Return the rows whose cells equal the `values`; raise `ValueError` if none do."""
        table = self
        for name, value in values.items():
            texts = list(map(str, table.get_cells(name))) if name in table.columns else []
            is_equal = {text: _is_equal(text, value) for text in dict.fromkeys(texts)}
            table = table.select(np.flatnonzero([is_equal[text] for text in texts]))
            if not len(table):
                reason = f"it has {list_some(is_equal)}" if is_equal else "there is no such column"
                raise ValueError(f"{source}: no row has {name!r} = {value!r}; {reason}")
        return table

    def drop_columns(self, names: str | Sequence[str], source: str) -> "Table":
        """Return the table without some columns; raise `ValueError` if it does not have them."""
        names = [names] if isinstance(names, str) else names
        if unknown := set(names) - set(self.columns):
            raise ValueError(
                f"{source}: expected ignore to name columns among {list(self.columns)}, got"
                f" {sorted(unknown)}"
            )
        columns = {name: cells for name, cells in self.columns.items() if name not in names}
        ignored = [f"column {name!r} is ignored" for name in names]
        return Table(columns, self.rows, [*self.choices, *ignored])

    def get_cells(self, name: str) -> list[Any]:
        """Return a column as Python values, so that messages show cells as they were written."""
        values: list[Any] = self.columns[name].tolist()
        return values

    def encode_columns(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Return the index, counted from 0, of each row's combination of texts in some columns."""
        index: dict[tuple[str, ...], int] = {}
        keys = zip(*(map(str, self.get_cells(name)) for name in names), strict=True)
        codes = (index.setdefault(key, len(index)) for key in keys)
        return np.fromiter(codes, np.intp, len(self))


@dataclass
class Reading:
    """The state while a table is read, which the other modules of this folder update."""

    name: str
    table: Table
    #: The chosen column for each name of `Runs`.
    columns: dict[str, Column]
    #: The user's unit for each name of `Runs`.
    units: Mapping[str, float]
    values: dict[str, Array] = field(default_factory=dict)
    #: The rows that were left out because they have no loss.
    without_loss: Table | None = None
    #: Sentences about choices, for `Runs.explanation`.
    choices: list[str] = field(default_factory=list)
    #: Sentences about rows that were left out, also issued as warnings.
    exclusions: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """The line of each row in its source, or its position counted from 1."""
        rows: list[int] = self.table.rows.tolist()
        return rows

    def select(self, selection: NDArray[Any]) -> None:
        """Keep only the selected rows."""
        self.table = self.table.select(selection)
        self.values = {k: v[selection] for k, v in self.values.items()}


def _is_equal(text: str, value: Any) -> bool:
    """Return True if a cell equals a value as text, or is the same number in another notation."""
    if text == str(value):
        return True
    if isinstance(value, str):
        return False  # Versions such as 1.1 and 1.10 differ as texts.
    try:
        return float(text) == float(value)
    except (TypeError, ValueError):
        return False


def as_object_cells(values: Sequence[Any]) -> Cells:
    """Return values as a vector of Python objects, even if they are sequences."""
    return np.fromiter(values, object, len(values))


def require_unique_names(names: Sequence[str], source: object) -> None:
    """Raise `ValueError` if columns have the same name."""
    if repeated := {name for name in names if name and names.count(name) > 1}:
        raise ValueError(f"{source} has several columns {sorted(repeated)}: rename all but one")

"""The state of reading a table, which the other modules of this folder change step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from scaling.tables.names import Column
from scaling.tables.table import Table
from scaling.units import Array


@dataclass
class Reading:
    """The state of reading a table: its rows, the chosen columns and their values."""

    name: str
    table: Table
    #: The chosen columns by our names.
    columns: dict[str, Column]
    #: The user's unit by our names.
    units: Mapping[str, float]
    #: The user's decimal mark.
    decimal: str | None
    values: dict[str, Array] = field(default_factory=dict)
    #: The rows that were left out because they have no loss.
    without_loss: Table | None = None
    #: Sentences about choices, for `Runs.explanation`.
    choices: list[str] = field(default_factory=list)
    #: Sentences about rows that were left out, also issued as warnings.
    exclusions: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """The line or the position from 1 of each row in its source."""
        rows: list[int] = self.table.rows.tolist()
        return rows

    def select(self, which: NDArray[Any]) -> None:
        """Leave out the other rows."""
        self.table = self.table.select(which)
        self.values = {k: v[which] for k, v in self.values.items()}

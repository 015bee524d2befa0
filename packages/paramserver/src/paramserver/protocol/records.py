"""Records of the changes of a server, from which it continues after it was killed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paramserver.protocol.log import Log, Push


@dataclass(frozen=True)
class Staged:
    """Record of a push whose gradients were staged, in the bytes in which they were received."""

    push: Push
    gradients: Tensor


@dataclass(frozen=True)
class Replayed:
    """Record of log entries that were replayed."""

    log: Log


Record = Staged | Replayed


class Journal(Protocol):
    """Append-only storage of one server's records; see `DiskJournal`."""

    def record(self, record: Record) -> None:
        """Store a record; return when it is written."""

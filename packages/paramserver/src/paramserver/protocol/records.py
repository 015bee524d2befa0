"""Records of a server's changes, from which a killed server recovers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paramserver.protocol.log import Log, Push


@dataclass(frozen=True)
class Staged:
    """Record of a staged push, with its gradients as the bytes that were received."""

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

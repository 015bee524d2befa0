"""The errors of a group, which name the ranks that are the reason by their numbers in the group."""

from collections.abc import Sequence
from typing import Any

UNUSABLE = "this group cannot be used any more"
LEFT_GROUP = "has left the group: it called destroy_process_group"


class RankLost(RuntimeError):
    """A rank died, hangs or left after an error; `ranks` says which."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        # A launcher may send it from one process to another.
        return type(self), (self.ranks, str(self))


class Mismatch(RuntimeError):
    """Ranks met with different calls, or with a NaN; `ranks` are the odd ones.

    Where calls are compared first (`checked`, or one host) no data has moved, the group works on.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerError(RuntimeError):
    """Messages with a peer failed; `peer` is its rank in the group, None if that is not known."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason if peer is None else f"lost rank {peer}: {reason}")
        self.peer = peer

"""Errors of a process group, which contain the ranks that caused them."""

from collections.abc import Sequence
from typing import Any

UNUSABLE = "this group can no longer be used: destroy it and create a new one"
LEFT_GROUP = "called destroy_process_group and left the group"


class RankLost(RuntimeError):
    """A rank died, failed, did not respond within the timeout, or left the group.

    The lost ranks are in `ranks`, as ranks of the group. `ranks` is empty if the group's store does
    not answer, or if a connection failed although every rank still responds.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers pickle errors to send them to another process.
        return type(self), (self.ranks, str(self))


class Mismatch(RuntimeError):
    """Ranks made different calls.

    The deviating ranks are in `ranks`, as ranks of the group. If calls are compared first (on one
    host or inside `checked`), no data has moved and the group can still be used.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerError(RuntimeError):
    """Sending to or receiving from a peer failed.

    `peer` is the peer's rank in the group, or None if it is not known.
    """

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason if peer is None else f"lost rank {peer}: {reason}")
        self.peer = peer

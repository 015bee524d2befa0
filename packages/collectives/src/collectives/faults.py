"""Which rank is it? A broken connection tells that something ended, not who.

When messages fail, every rank that still runs signs a roll in the group's store and hangs up, which
makes the messages of the others fail too. Whoever has not signed soon after is lost, and is whom
all the others name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

GRACE_SECONDS = 2.0


class RankLost(RuntimeError):
    """A rank died, hangs or left after an error; `ranks` says which, by their group's numbers."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def fetch(store: Store, keys: Mapping[int, str], seconds: float) -> dict[int, bytes]:
    """What other ranks put into the store: keys[rank] is where; raises RankLost if they do not."""
    found: dict[int, bytes] = {}
    deadline = time.monotonic() + seconds
    for rank, key in keys.items():
        with suppress(RuntimeError):
            left = max(0.01, deadline - time.monotonic())
            store.wait([key], timedelta(seconds=left))
            found[rank] = store.get(key)
    if absent := [rank for rank in keys if rank not in found]:
        who = f"rank {', '.join(map(str, absent))}"
        raise RankLost(absent, f"{who} did not come to set up the group within {seconds:g} s")
    return found


class Roll:
    """The list that survivors of a failed call sign, in the group's store."""

    def __init__(self, store: Store, call: int, rank: int, world: int) -> None:
        self._store, self._call, self._rank, self._world = store, call, rank, world

    def sign(self) -> None:
        """Say that this rank is still there."""
        with suppress(RuntimeError):
            self._store.set(f"roll/{self._call}/{self._rank}", "here")

    def absent(self, seconds: float) -> list[int]:
        """The ranks that have not signed within so many seconds."""
        absent = [rank for rank in range(self._world) if rank != self._rank]
        end = time.monotonic() + seconds
        try:
            while absent and time.monotonic() < end:
                key = f"roll/{self._call}/"
                absent = [rank for rank in absent if not self._store.check([f"{key}{rank}"])]
                time.sleep(0.01)
        except RuntimeError:
            # Unless it is a file, the store lives in rank 0's process.
            return [0]
        return absent

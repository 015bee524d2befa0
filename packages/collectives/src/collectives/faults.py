"""Which rank is it? A broken connection tells that something ended, not who.

When messages fail, every rank that still runs signs a roll in the group's store, with the call that
it was in and, if it knows, who is to blame; then it hangs up, which makes the messages of the
others fail too. Whoever has not signed soon after is lost, and is whom all the others name; if all
have signed, their calls are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

GRACE_SECONDS = 5.0


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


@dataclass(frozen=True)
class Entry:
    """What a survivor says: the call that it was in, and whom it knows to be the reason.

    `difference` tells how calls differ, where that is the reason. `lengths` is what it brought to
    an all-to-all: elements that it sends to each rank, and that it expects from each.
    """

    rank: int
    call: bytes = b""
    blames: Sequence[int] = ()
    difference: str = ""
    lengths: tuple[list[int], list[int]] | None = None


class Roll:
    """The list that survivors of a failed call sign, in the group's store."""

    def __init__(self, store: Store, call: int) -> None:
        self._store, self._call = store, call

    def sign(self, entry: Entry) -> None:
        """Say that this rank is still there, and what it knows."""
        known = entry.rank, entry.call.hex(), list(entry.blames), entry.difference, entry.lengths
        text = json.dumps(known)
        with suppress(RuntimeError):
            self._store.set(f"roll/{self._call}/{entry.rank}", text)
            # Whoever knows the reason tells it where all look: also those that had what they
            # needed of this call, and fail in a later one.
            if entry.blames:
                self._store.set("roll/reason", text)

    def read(self, ranks: Sequence[int], seconds: float) -> dict[int, Entry]:
        """The entries of `ranks`, by rank, when all have signed or the time is over.

        Ends at once when somebody has told the reason: then that entry alone.
        """
        found: dict[int, Entry] = {}
        end = time.monotonic() + seconds
        try:
            while True:
                if (reason := self._entry("roll/reason")) is not None:
                    return {reason.rank: reason}
                for rank in ranks:
                    key = f"roll/{self._call}/{rank}"
                    if rank not in found and (entry := self._entry(key)) is not None:
                        found[rank] = entry
                if len(found) == len(ranks) or time.monotonic() > end:
                    return found
                # Every look reads a store that all of them share.
                time.sleep(0.05)
        except RuntimeError:
            # Unless it is a file, the store lives in rank 0's process.
            return {0: Entry(0, blames=[0])}

    def _entry(self, key: str) -> Entry | None:
        if not self._store.check([key]):
            return None
        rank, call, *known = json.loads(self._store.get(key))
        return Entry(rank, bytes.fromhex(call), *known)

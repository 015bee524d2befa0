"""Which rank is it? A broken connection tells that something ended, not who.

When messages fail, every rank that still runs signs a roll in the group's store, with the call that
it was in and, if it knows, who is to blame; then it hangs up, which makes the messages of the
others fail too. Whoever has not signed soon after is lost, and is whom all the others name; if all
have signed, their calls are compared. Ranks that share memory tell each other by their clocks.

Notable:
- everything ends within the group's timeout and two seconds: a host's ranks wait for each other up
  to 0.6 of it, messages up to 0.8, and what comes then is for the roll;
- the store may be as dead as what is looked for: unless it is a file, it lives in rank 0's process
  or the launcher's. So it is asked on a thread of its own, which may be left behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from collectives.errors import UNUSABLE, Mismatch, PeerError, RankLost
from collectives.shared_memory.fingerprint import Lengths, compare, compare_lengths, names_of

# Of the timeout: a host where a rank is missing must find it before others give up on its speaker.
HOSTS_PART, MESSAGES_PART = 0.6, 0.8
# How long survivors are waited for: seconds, and as a part of the timeout.
SHORTEST_ROLL, LONGEST_ROLL, ROLLS_PART = 1.0, 5.0, 0.15
# How long the store may take to note something; beyond that, it is left to do so.
STORE_SECONDS = 0.4
T = TypeVar("T")


@dataclass
class Operation:
    """What a group is doing, as far as it matters to who is asked when it fails.

    `calls` are the last ones, packed, this one at the end; `talking` are the ranks that send and
    receive in it; `comparing` tells that calls are compared before data moves; `lengths` is what
    this rank brings to an all-to-all.
    """

    number: int = 0
    calls: Sequence[bytes] = ()
    talking: Sequence[int] = ()
    comparing: bool = False
    lengths: Lengths | None = None


@dataclass(frozen=True)
class Entry:
    """What a survivor says: its last calls, the last one's number, and whom it knows to be lost.

    `difference` tells how calls differ, where that is the reason. `lengths` is what it brought to
    an all-to-all: elements that it sends to each rank, and that it expects from each.
    """

    rank: int
    number: int = 0
    calls: Sequence[str] = ()
    blames: Sequence[int] = ()
    difference: str = ""
    lengths: tuple[list[int], list[int]] | None = None

    def call(self, number: int) -> bytes:
        """The call of that number, packed; nothing if it was too long ago."""
        ago = self.number - number
        return bytes.fromhex(self.calls[-1 - ago]) if ago < len(self.calls) else b""


class Faults:
    """What one rank does when a call fails: it finds out why, tells the others, and gives up.

    `arena` is the memory that it shares with other ranks, if any; `one_host` says that these are
    all; `lines` are what it can hang up.
    """

    def __init__(
        self, store: Store, rank: int, world: int, arena: Any, one_host: bool, lines: Sequence[Any]
    ) -> None:
        self.broken: RankLost | None = None
        self._store, self._rank, self._world = store, rank, world
        self._arena, self._one_host, self._lines = arena, one_host, lines

    def reason(self, error: BaseException, operation: Operation, timeout: float) -> BaseException:
        """Why the call has failed, as every rank is to say it; the group is given up, if it is."""
        if isinstance(error, Mismatch):
            # The ranks of this host have found it; the other hosts' wait for messages.
            if not (self._one_host or operation.comparing):
                self.give_up(error, operation, found_here=True)
            return error
        blamed: RankLost | Mismatch
        if isinstance(error, PeerError):
            error = blamed = self._who_is_lost(error, operation, timeout)
        elif isinstance(error, RankLost):
            error = blamed = self._told_difference() or error
        else:
            blamed = RankLost([self._rank], f"rank {self._rank} failed: {error!r}")
        self.give_up(blamed, operation)
        return error

    def give_up(
        self, reason: RankLost | Mismatch, operation: Operation, *, found_here: bool = False
    ) -> None:
        """Take no further part, and let every rank know why.

        What the host's ranks all find at the same tick (`found_here`) need not be told to them, and
        must not be: one that is late would miss the tick.
        """
        self.broken = RankLost(reason.ranks, str(reason))
        if not self._one_host:
            difference = str(reason) if isinstance(reason, Mismatch) else ""
            self._sign(operation, reason.ranks, difference)
        # Last: who is told so in memory looks for the reason in the roll.
        if self._arena is not None and not found_here:
            self._arena.leave(reason.ranks[0] if reason.ranks else None)

    def _sign(self, operation: Operation, blames: Sequence[int] = (), difference: str = "") -> None:
        """Say that this rank is still there, and what it knows; then hang up."""
        own, calls = operation.lengths, [call.hex() for call in operation.calls]
        lengths = (own.sends, own.receives) if own else None
        entry = Entry(self._rank, operation.number, calls, blames, difference, lengths)
        text = json.dumps(astuple(entry))

        def go() -> None:
            self._store.set(f"roll/{self._rank}", text)
            # Whoever knows the reason tells it where all look.
            if blames:
                self._store.set("roll/reason", text)

        with suppress(TimeoutError, RuntimeError):
            within(STORE_SECONDS, go)
        for line in self._lines:
            line.hang_up()

    def _read(self, ranks: Sequence[int], seconds: float) -> dict[int, Entry]:
        """The entries of `ranks`, by rank, when all have signed or the time is over.

        Ends at once when somebody has told the reason: then that entry alone.
        """
        found: dict[int, Entry] = {}
        end = time.monotonic() + seconds

        def entry(name: str) -> Entry | None:
            key, store = f"roll/{name}", self._store
            return Entry(*json.loads(store.get(key))) if store.check([key]) else None

        def go() -> dict[int, Entry]:
            while True:
                if (reason := entry("reason")) is not None:
                    return {reason.rank: reason}
                for rank in ranks:
                    if rank not in found and (signed := entry(str(rank))) is not None:
                        found[rank] = signed
                if len(found) == len(ranks) or time.monotonic() > end:
                    return found
                # Every look reads a store that all of them share.
                time.sleep(0.05)

        return ask(seconds + STORE_SECONDS, go)

    def _told_difference(self) -> Mismatch | None:
        """How calls differ, if another host has found that they do."""
        with suppress(RankLost):
            for entry in {} if self._one_host else self._read([], 0).values():
                if entry.difference:
                    return Mismatch(entry.difference, entry.blames)
        return None

    def _who_is_lost(
        self, error: PeerError, operation: Operation, timeout: float
    ) -> RankLost | Mismatch:
        arena, number, talking = self._arena, operation.number, operation.talking
        if arena is not None and (dead := arena.dead()):
            ranks = [arena.names[i] for i in dead]
            return RankLost(ranks, f"rank {ranks[0]} died (call {number}); {UNUSABLE}")
        seconds = max(SHORTEST_ROLL, min(LONGEST_ROLL, ROLLS_PART * timeout))
        told = f"messages failed in call {number}: {error}; {UNUSABLE}"
        self._sign(operation)
        try:
            entries = self._read(talking, seconds)
        except RankLost as silent:
            return RankLost(silent.ranks, f"{silent}; {told}")
        for rank, entry in entries.items():
            if entry.difference:
                return Mismatch(entry.difference, entry.blames)
            if entry.blames:
                return RankLost(
                    entry.blames, f"lost {names_of(entry.blames)}, says rank {rank}; {told}"
                )
        # First: a rank that is absent may have had all that it needed of this call.
        try:
            self._compare(entries)
        except Mismatch as difference:
            return Mismatch(f"{difference}; {UNUSABLE}", difference.ranks)
        if absent := [rank for rank in talking if rank not in entries]:
            silence = f"gave no sign of life for {seconds:g} s after"
            return RankLost(absent, f"{names_of(absent)} {silence} {told}")
        if error.peer is None:
            return RankLost([], f"a connection broke, and every rank is still there: {told}")
        return RankLost([error.peer], f"rank {error.peer} broke off: {told}")

    def _compare(self, entries: Mapping[int, Entry]) -> None:
        """Raise Mismatch if the ranks have made different calls.

        One that had all it needed of a call is in a later one: the first that all of them have made
        is what counts, and what they brought to the same one.
        """
        first = min((entry.number for entry in entries.values()), default=0)
        calls = {r: call for r, entry in entries.items() if (call := entry.call(first))}
        if calls:
            compare(list(calls.values()), list(calls))
        same = {e.rank: e.lengths for e in entries.values() if e.lengths and e.number == first}
        compare_lengths({r: Lengths(*told) for r, told in same.items()}, range(self._world))


def within(seconds: float, function: Callable[[], T]) -> T:
    """What `function` returns or raises, or TimeoutError: then it is left alone."""
    found = Future[T]()

    def go() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=go, daemon=True, name="collectives store").start()
    return found.result(seconds)


def ask(seconds: float, function: Callable[[], T]) -> T:
    """What a store answers; RankLost if it does not: then rank 0 is gone, or the launcher is."""
    try:
        return within(seconds, function)
    except (TimeoutError, RuntimeError) as error:
        raise RankLost([0], "rank 0 is lost: the group's store does not answer") from error


def fetch(
    store: Store, keys: Mapping[int, str], deadline: float, tell: Mapping[str, str] | None = None
) -> dict[int, bytes]:
    """What other ranks put into the store: keys[rank] is where; raises RankLost if they do not.

    `tell` is put there first. `deadline` is of time.monotonic.
    """
    found: dict[int, bytes] = {}
    begun = time.monotonic()

    def go() -> None:
        for key, text in (tell or {}).items():
            store.set(key, text)
        for rank, key in keys.items():
            with suppress(RuntimeError):
                left = max(0.01, deadline - time.monotonic())
                store.wait([key], timedelta(seconds=left))
                found[rank] = store.get(key)

    ask(max(0.0, deadline - begun) + STORE_SECONDS, go)
    if absent := [rank for rank in keys if rank not in found]:
        late = f"did not come to set up the group within {time.monotonic() - begun:.3g} s"
        raise RankLost(absent, f"{names_of(absent)} {late}")
    return found

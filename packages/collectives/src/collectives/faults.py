"""Which rank is it? A broken connection tells that something ended, not who.

When messages fail, every rank that still runs signs a roll in the group's store, with the call that
it was in and, if it knows, who is to blame; then it hangs up, which makes the messages of the
others fail too. Whoever does not sign is lost if its connections have ended, else at the group's
timeout: a rank that is slow is no fault before that. If all have signed, their calls are compared.
Ranks that share memory tell each other by their clocks.

Notable:
- everything ends within the group's timeout and two seconds: ranks wait for each other up to the
  timeout, and what comes then is for the roll;
- whoever waits for long notes for whom, in the store: so who is named is the one that is gone or
  late, and no rank that waits itself, though for another one than those that have given up;
- the store may be as dead as what is looked for: unless it is a file, it lives in rank 0's process
  or the launcher's. So it is asked on a thread of its own, which may be left behind.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from collectives.errors import LEFT_GROUP, UNUSABLE, Mismatch, PeerError, RankLost
from collectives.shared_memory.fingerprint import Lengths, compare, compare_lengths, names_of

# How long survivors are waited for, at least: they see connections end, or wait as long.
ROLL_SECONDS = 1.0
# How often a rank looks whether it waits: seconds at least, and as a part of the timeout.
SHORTEST_LOOK, LOOKS_PART = 0.1, 0.1
# How long the store may be silent: it is slow where many ranks ask at once, and no fault then.
STORE_SECONDS = 0.8
T = TypeVar("T")


@dataclass
class Operation:
    """What a group is doing, as far as it matters to who is asked when it fails.

    `calls` are the last ones, packed, this one at the end; `talking` are the ranks that send and
    receive in it; `comparing` tells that calls are compared before data moves; `lengths` is what
    this rank brings to an all-to-all; `begun` is of time.monotonic.
    """

    number: int = 0
    calls: Sequence[bytes] = ()
    talking: Sequence[int] = ()
    comparing: bool = False
    lengths: Lengths | None = None
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Entry:
    """What a survivor says: its last calls, the last one's number, and whom it knows to be lost.

    `difference` tells how calls differ, where that is the reason. `lengths` is what it brought to
    an all-to-all: elements that it sends to each rank, and that it expects from each. `waits` is
    the rank that it waits for, if it knows, and `timed_out` that it did so for as long as it may;
    `ended` are those whose connections had ended. `left` says that the rank has left the group in
    good order after its last call.
    """

    rank: int
    number: int = 0
    calls: Sequence[str] = ()
    blames: Sequence[int] = ()
    difference: str = ""
    lengths: tuple[list[int], list[int]] | None = None
    waits: int | None = None
    ended: Sequence[int] = ()
    timed_out: bool = False
    left: bool = False

    def call(self, number: int) -> bytes:
        """The call of that number, packed; nothing if it was too long ago."""
        ago = self.number - number
        return bytes.fromhex(self.calls[-1 - ago]) if ago < len(self.calls) else b""


class Faults:
    """What one rank does when a call fails: it finds out why, tells the others, and gives up.

    `arena` is the memory that it shares with other ranks, if any; `one_host` says that these are
    all; `wire` is where its messages go, and `gloo` holds gloo's own groups.
    """

    def __init__(
        self, store: Store, rank: int, world: int, arena: Any, one_host: bool, wire: Any, gloo: Any
    ) -> None:
        self.broken: RankLost | None = None
        # Nobody's long wait for the group's store may keep this one's.
        self._store, self._rank, self._world = cloned(store), rank, world
        # When it last answered, of time.monotonic.
        self._answered = 0.0
        self._arena, self._one_host, self._wire, self._gloo = arena, one_host, wire, gloo

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
            self._sign(operation, blames=reason.ranks, difference=difference)
        # Last: who is told so in memory looks for the reason in the roll.
        if self._arena is not None and not found_here:
            self._arena.leave(reason.ranks[0] if reason.ranks else None)

    def announce_end(self, operation: Operation) -> None:
        """Let the other ranks know that this one makes no further calls after this operation."""
        if self._arena is not None:
            self._arena.announce_end()
        if not self._one_host:
            self._sign(operation, left=True)

    def _entry(self, operation: Operation, waits: int | None = None, **told: Any) -> Entry:
        own, calls = operation.lengths, [call.hex() for call in tuple(operation.calls)]
        lengths = (own.sends, own.receives) if own else None
        return Entry(self._rank, operation.number, calls, lengths=lengths, waits=waits, **told)

    def _sign(self, operation: Operation, **told: Any) -> None:
        """Say that this rank is still there, and what it knows; then hang up."""
        text = json.dumps(astuple(self._entry(operation, ended=self._wire.ended(), **told)))

        def go() -> None:
            self._store.set(f"roll/{self._rank}", text)
            # Whoever knows the reason tells it where all look.
            if told.get("blames"):
                self._store.set("roll/reason", text)

        with suppress(TimeoutError, RuntimeError):
            within(STORE_SECONDS, go)
        self._wire.hang_up()
        self._gloo.hang_up()

    def note(self, operation: Operation | None) -> None:
        """Say that this rank waits in that operation, and for whom, or that it waits no more."""
        text, peer = "", self._wire.waits_for
        if peer is None and self._arena is not None:
            peer = next(iter(self._arena.late()), None)
        if operation is not None:
            text = json.dumps(astuple(self._entry(operation, peer)))
        with suppress(TimeoutError, RuntimeError):
            within(STORE_SECONDS, lambda: self._store.set(f"waits/{self._rank}", text))

    def _told(self, key: str) -> Entry | None:
        text = self._store.get(key) if self._store.check([key]) else b""
        self._answered = time.monotonic()
        return Entry(*json.loads(text)) if text else None

    def _read(
        self, ranks: set[int], until: float, number: int
    ) -> tuple[dict[int, Entry], dict[int, Entry]]:
        """The entries of those who signed, by rank, and the notes of those who have not.

        Ends when `ranks` have signed, at `until` (of time.monotonic), or as soon as all had their
        time and connections of some that have not signed have ended; and at once when a rank has
        left before call `number`, or has told the reason: then that entry alone.
        """
        found, notes = dict[int, Entry](), dict[int, Entry]()
        begun = time.monotonic()
        until = max(until, begun + ROLL_SECONDS)

        def look(where: str, into: dict[int, Entry]) -> None:
            for rank in set(range(self._world)) - found.keys():
                if (told := self._told(f"{where}/{rank}")) is not None:
                    into[rank] = told

        def go() -> tuple[dict[int, Entry], dict[int, Entry]]:
            while True:
                if (reason := self._told("roll/reason")) is not None:
                    return {reason.rank: reason}, {}
                look("roll", found)
                now = time.monotonic()
                gone = ended(found) and now > begun + ROLL_SECONDS
                gone = gone or has_left(found, number)
                if found.keys() >= ranks or gone or now > until:
                    look("waits", notes)
                    return found, notes
                # Every look reads a store that all of them share.
                time.sleep(0.05)

        return ask(STORE_SECONDS, go, lambda: self._answered)

    def _told_difference(self) -> Mismatch | None:
        """How calls differ, if another host has found that they do."""
        with suppress(RankLost):
            if not self._one_host:
                reason = ask(STORE_SECONDS, lambda: self._told("roll/reason"))
                if reason is not None and reason.difference:
                    return Mismatch(reason.difference, reason.blames)
        return None

    def _who_is_lost(
        self, error: PeerError, operation: Operation, timeout: float
    ) -> RankLost | Mismatch:
        arena, number = self._arena, operation.number
        # A speaker's host waits for it alone, and it is asked who is missing.
        asked = {*operation.talking, *([] if error.peer is None else [error.peer])}
        if arena is not None and (dead := arena.dead()):
            ranks = [arena.names[i] for i in dead]
            return RankLost(ranks, f"rank {ranks[0]} died (call {number}); {UNUSABLE}")
        told = f"messages failed in call {number}: {error}; {UNUSABLE}"
        timed_out = time.monotonic() - operation.begun > (1 - LOOKS_PART) * timeout
        self._sign(operation, waits=error.peer, timed_out=timed_out)
        try:
            entries, notes = self._read(asked, operation.begun + timeout, number)
        except RankLost as silent:
            return RankLost(silent.ranks, f"{silent}; {told}")
        for rank, entry in entries.items():
            if entry.difference:
                return Mismatch(entry.difference, entry.blames)
            if entry.blames:
                return RankLost(
                    entry.blames, f"lost {names_of(entry.blames)}, says rank {rank}; {told}"
                )
        if left := has_left(entries, number):
            return RankLost(left, f"{names_of(left)} {LEFT_GROUP}; {told}")
        heard = entries | notes
        # Those who are waited for, and do not wait themselves.
        unheard = asked.union(e.waits for e in heard.values() if e.waits is not None) - heard.keys()
        gone = ended(entries)
        if unheard and any(entry.timed_out for entry in entries.values()):
            # A wait that times out ends connections too: whoever waited is about to sign.
            gone = [rank for rank in gone if rank not in notes]
        # First: a rank that is absent may have had all that it needed of this call.
        try:
            self._compare(entries if gone else heard)
        except Mismatch as difference:
            return Mismatch(f"{difference}; {UNUSABLE}", difference.ranks)
        if gone:
            return RankLost(gone, f"the connections of {names_of(gone)} have ended: {told}")
        if absent := sorted(unheard) or sorted(asked - entries.keys()):
            silence = f"gave no sign of life within the timeout of {timeout:g} s:"
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
        if calls := {r: call for r, entry in entries.items() if (call := entry.call(first))}:
            compare(list(calls.values()), list(calls))
        same = {e.rank: e.lengths for e in entries.values() if e.lengths and e.number == first}
        compare_lengths({r: Lengths(*told) for r, told in same.items()}, range(self._world))


def ended(entries: Mapping[int, Entry]) -> list[int]:
    """Whose connections have ended, and who have not signed before: who left has hung up."""
    return sorted({rank for entry in entries.values() for rank in entry.ended} - entries.keys())


def has_left(entries: Mapping[int, Entry], number: int) -> list[int]:
    """Return the ranks that left the group in good order before the call of that number."""
    return sorted(rank for rank, each in entries.items() if each.left and each.number < number)


def cloned(store: Store) -> Store:
    """The same store over a connection of its own, where it can have one."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


def fresh(store: Store, world: int, seconds: float) -> Store:
    """Return a part of a store that no earlier group of the same ranks has written to.

    A store may outlive a group, and under an elastic launcher it may outlive the processes: without
    a prefix of its own, the next group would read the addresses of ranks that are gone. All ranks
    of a group must call it. The launcher's count of restarts comes first, because ranks that died
    while they set up a group have not all counted it.
    """
    attempt = PrefixStore(f"collectives/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    generation = (ask(seconds, lambda: attempt.add("generation", 1)) - 1) // world
    return PrefixStore(str(generation), attempt)


def within(
    seconds: float, function: Callable[[], T], answered: Callable[[], float] = lambda: 0.0
) -> T:
    """What `function` returns or raises; TimeoutError after that long, and it is left alone.

    The time begins anew whenever it is `answered()`, of time.monotonic.
    """
    found, begun = Future[T](), time.monotonic()

    def go() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=go, daemon=True, name="collectives store").start()
    while (left := max(begun, answered()) + seconds - time.monotonic()) > 0:
        wait([found], left)
        if found.done():
            break
    return found.result(0)


def ask(
    seconds: float, function: Callable[[], T], answered: Callable[[], float] = lambda: 0.0
) -> T:
    """What a store answers; RankLost if it does not: then rank 0 is gone, or the launcher is."""
    try:
        return within(seconds, function, answered)
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

"""An arena: the memory that the ranks of one host share, and the clock they move by.

Each rank owns a segment: a clock, two cells for its call's fingerprint, and two slots of data.
All ranks' clocks tick together. One rule makes every protocol on it safe without a second wait:

    what is written before tick t goes to slot t mod 2, and is read between ticks t and t+1.

A writer returns to that slot for tick t+2, after it has seen everyone at t+1, hence done reading.

Notable:
- the tick is the fence, and `engine.c` does it wherever a compiler was found, also between steps
  that are done in Python. Without one the flags are Python's loads and stores, which is sound where
  stores become visible in program order (x86-64); elsewhere `available` says no: messages are used;
- a wait yields the core, then sleeps: ranks may be more than cores;
- a wait looks at the peers' process handles: a dead peer ends it, a late one does at the deadline.
"""

import mmap
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collectives.errors import LEFT_GROUP, UNUSABLE, PeerError, RankLost
from collectives.shared_memory import engine
from collectives.shared_memory.fingerprint import BYTES as CALL_BYTES
from collectives.shared_memory.fingerprint import NAN_AT, Lengths, compare, compare_lengths
from collectives.shared_memory.process import PeerProcess, yield_core
from collectives.shared_memory.segment import HEADER_BYTES

CHUNK_BYTES = 512 << 10
SLOT_BYTES = CHUNK_BYTES // 2
_CLOCK, _SLEEPERS, _LEFT, _CALLS, _NOTES, _DATA = 0, 8, 64, 128, 640, 4096
ARENA_BYTES = _DATA + CHUNK_BYTES
_CALL_ROOM, _NOTE_ROOM = 256, 64
_ALIGNMENT = 64
# What is smaller is summed at once by every rank; a sum in place is done in pieces of this size.
ONE_SHOT_BYTES = 32 * 1024
PIECE_BYTES = 512 * 1024
YIELDS = 200
SHORTEST_NAP, LONGEST_NAP = 2e-5, 1e-3


def available() -> bool:
    """Whether this machine can share memory in the way that this file does."""
    if sys.platform != "linux":
        return False
    return platform.machine() in ("x86_64", "AMD64") or engine.library() is not None


class Arena:
    """The segments of all ranks of one host. `rank` is the place in `mappings`."""

    def __init__(
        self, mappings: Sequence[mmap.mmap], pids: Sequence[int], rank: int, *,
        names: Sequence[int], timeout: float,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, len(mappings)
        self.timeout = timeout
        # What to call a rank in an error: its number in the group, not on this host.
        self.names = names
        # Whether others than these ranks may know who is late.
        self.alone = True
        self._pids = pids
        self._memory = [memoryview(mapping)[HEADER_BYTES:] for mapping in mappings]
        self._clocks = [memory[_CLOCK : _CLOCK + 8].cast("q") for memory in self._memory]
        # One byte per rank: whether it has left the group in good order.
        self._left = [memory[_LEFT : _LEFT + 1] for memory in self._memory]
        self._others = [i for i in range(self.world) if i != rank]
        self._bytes = [
            torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES + _DATA)
            for mapping in mappings
        ]
        cuts = slice(0, SLOT_BYTES), slice(SLOT_BYTES, 2 * SLOT_BYTES)
        self._slots = [[data[cut] for data in self._bytes] for cut in cuts]
        self._views: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._processes: dict[int, PeerProcess] = {}
        for i in self._others:
            try:
                self._processes[i] = PeerProcess(pids[i])
            except ProcessLookupError as error:
                raise RankLost([names[i]], f"rank {names[i]} (process {pids[i]}) died") from error
        self._library = engine.library()
        self._addresses = engine.addresses(
            [torch.frombuffer(m, dtype=torch.uint8) for m in self._memory]
        )
        self._shared = engine.Memory(
            rank, self.world, 0, SLOT_BYTES, ONE_SHOT_BYTES, PIECE_BYTES,
            _SLEEPERS, _CALLS, _CALL_ROOM, CALL_BYTES, NAN_AT, _NOTES, _NOTE_ROOM, _DATA,
            self._addresses,
        )  # fmt: skip
        # Bytes at the start of a slot where a rank says what it brings to an all-to-all.
        self.lengths_room = -(-2 * self.world * torch.int64.itemsize // _ALIGNMENT) * _ALIGNMENT
        # What is to be announced with the coming tick.
        self._said: tuple[bytes | None, bytes | None] = None, None
        self._queue = engine.Queue()
        # The jobs, in order, that the engine's queue has no room for yet.
        self._backlog: deque[engine.Job | None] = deque()
        self._filling = threading.Lock()

    def close(self) -> None:
        """Give the process handles back."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    # ----- the wait -----

    @property
    def tick(self) -> int:
        """How many ticks there were."""
        return self._shared.tick

    def sync(self) -> None:
        """Tick, and return when all ranks have."""
        if self._library is not None:
            self.do(self.job("meet"))
            return
        tick = self._shared.tick = self.tick + 1
        clocks = self._clocks
        clocks[self.rank][0] = tick
        for i in self._others:
            if clocks[i][0] < tick:
                self._wait(i, tick)

    def _wait(self, other: int, tick: int) -> None:
        clock, yields = self._clocks[other], YIELDS
        while yields and 0 <= clock[0] < tick:
            yield_core()
            yields -= 1
        deadline, nap = time.monotonic() + self.timeout, SHORTEST_NAP
        while clock[0] < tick:
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP)
            self._check_peers(tick, deadline)

    def _check_peers(self, tick: int, deadline: float) -> None:
        """Raise RankLost if a rank that has not come to this tick will not come, or not in time."""
        # In this order: a rank may arrive and then leave or end in good order.
        left = [i for i in self._others if self._left[i][0]]
        dead = self.dead()
        late = [i for i in self._others if self._clocks[i][0] < tick]
        if self._clocks[self.rank][0] < 0:
            own = self.names[self.rank]
            raise RankLost([own], f"rank {own}, this one, has given up; {UNUSABLE}")
        if gone := [i for i in left if i in late]:
            self._report(gone, LEFT_GROUP)
        # Before the dead ranks: a rank that reported a reason may have ended after that.
        if any(self._clocks[i][0] < 0 for i in late):
            self._fail_as_reported(late)
        if lost := [i for i in dead if i in late]:
            self._fail(lost, "died")
        if late and time.monotonic() > deadline:
            self._report(late, f"did not arrive within the timeout of {self.timeout:g} s")

    def late(self) -> list[int]:
        """The ranks, by their numbers in the group, that have not come to this rank's tick."""
        return [self.names[i] for i in self._others if self._clocks[i][0] < self.tick]

    # ----- by the engine -----

    def job(self, kind: str, **fields: Any) -> engine.Job:
        """A whole collective for the engine, with what was announced; `fields` are engine.Job's."""
        call, note = self._said
        self._said = None, None
        return engine.Job(engine.KINDS.index(kind), call=call, note=note, **fields)

    def do(self, job: engine.Job) -> None:
        """Do a collective in machine code, or what is left of it; raise what it fails of."""
        assert self._library is not None
        tick, deadline = -1, 0.0
        while (status := self._library.run(self._shared, job)) == engine.AGAIN:
            if self.tick != tick:
                tick, deadline = self.tick, time.monotonic() + self.timeout
            self._check_peers(tick, deadline)
        if status == engine.MISMATCH:
            # If it is not the calls that differ, it is what they bring.
            self.heard()
            self.heard_lengths()

    def put(self, job: engine.Job | None) -> None:
        """Queue a job for `serve`; None makes `serve` return. The queue has no limit."""
        if self._library is not None:
            with self._filling:
                self._backlog.append(job)
                self._fill_queue()

    def serve(self) -> None:
        """Wait for the next job, and run it as far as that is possible without the interpreter."""
        if self._library is not None:
            self._library.serve(self._shared, self._queue)
            if self._backlog:
                with self._filling:
                    self._fill_queue()

    def _fill_queue(self) -> None:
        put = engine.at_once().put
        while self._backlog and put(self._queue, self._backlog[0]):
            self._backlog.popleft()

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [i for i, process in self._processes.items() if process.has_ended()]

    def announce_end(self) -> None:
        """Let the peers know that this rank makes no further calls after its last tick."""
        self._left[self.rank][0] = 1

    def leave(self, blamed: int | None = None) -> None:
        """Tell the peers, those that come later too, that this rank takes no further part.

        `blamed` is the group's number of the rank that is the reason, this one if not given.
        """
        blamed = self.names[self.rank] if blamed is None else blamed
        self._clocks[self.rank][0] = -1 - blamed

    def _fail_as_reported(self, late: Sequence[int]) -> None:
        left = next(i for i in late if self._clocks[i][0] < 0)
        blamed, reporter = -1 - self._clocks[left][0], self.names[left]
        if blamed == reporter:
            self._fail([left], "left after an error")
        self.leave(blamed)
        raise RankLost([blamed], f"rank {blamed} is lost, says rank {reporter}; {UNUSABLE}")

    def _report(self, places: Sequence[int], what: str) -> None:
        """Raise RankLost, or PeerError if ranks of other hosts may know more."""
        if not self.alone:
            raise PeerError(self.names[places[0]], what)
        self._fail(places, what)

    def _fail(self, places: Sequence[int], what: str) -> None:
        ranks = [self.names[i] for i in places]
        self.leave(ranks[0])
        who = ", ".join(
            f"rank {name} (process {self._pids[i]})" for name, i in zip(ranks, places, strict=True)
        )
        raise RankLost(ranks, f"{who} {what}; {UNUSABLE}")

    # ----- what the ranks are about to do -----

    def announce(self, call: bytes, note: bytes = b"") -> None:
        """Write this rank's call, and a note that may differ, before the coming tick."""
        if self._library is not None:
            self._said = call, note or None
            return
        memory, cell = self._memory[self.rank], (self.tick + 1) & 1
        at = _CALLS + cell * _CALL_ROOM
        memory[at : at + CALL_BYTES] = call
        at = _NOTES + cell * _NOTE_ROOM
        memory[at : at + len(note)] = note

    def heard(self, length: int = 0) -> list[bytes]:
        """After that tick: raise Mismatch if the calls differ; return all ranks' notes."""
        cell = self.tick & 1
        at = _CALLS + cell * _CALL_ROOM
        calls = [bytes(memory[at : at + CALL_BYTES]) for memory in self._memory]
        compare(calls, self.names)
        at = _NOTES + cell * _NOTE_ROOM
        return [bytes(memory[at : at + length]) for memory in self._memory]

    def heard_lengths(self) -> list[Lengths]:
        """After that tick: what each rank brings to an all-to-all; raise Mismatch if it differs."""
        heads = [slot[: self.lengths_room].view(torch.int64) for slot in self.slots(torch.uint8)]
        told = [head[: 2 * self.world].tolist() for head in heads]
        everyone = [Lengths(each[: self.world], each[self.world :]) for each in told]
        compare_lengths(dict(enumerate(everyone)), self.names)
        return everyone

    def slots(self, dtype: torch.dtype, *, ahead: int = 0) -> list[Tensor]:
        """All ranks' slots of the last tick (or of one ahead), as flat tensors of `dtype`."""
        cell = (self.tick + ahead) & 1
        if (dtype, cell) not in self._views:
            self._views[dtype, cell] = [slot.view(dtype) for slot in self._slots[cell]]
        return self._views[dtype, cell]

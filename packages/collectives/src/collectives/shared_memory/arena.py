"""The arena: the memory that the ranks of one host share, and the clocks that synchronize them.

Each rank owns a segment, which contains

    a clock, and the number of peers that sleep until it changes
    two announcements that the rank has left the group: without an error, and after an error
    two cells for the fingerprint of its call, and two cells for a note
    the ranks that it blames for an error
    two slots of data

A tick increments the rank's clock and waits until the clocks of all ranks have reached that value.
One rule makes every protocol safe with a single tick per step:

    Data written before tick t go to slot t mod 2, and are read between ticks t and t+1.

A writer reuses that slot for tick t+2. Before that, it has waited until every rank has reached tick
t+1, so all ranks have finished reading.

A tick is also a memory fence. `engine.c` implements it if all ranks of the host have the same
engine, even between steps that run in Python. Otherwise clocks are loaded and stored by Python,
which is correct only where stores become visible in program order (x86-64). Elsewhere ranks without
the same engine use messages: see `is_available` and `identify_host`.

A wait polls the clock, yields the core and then sleeps, because there may be more ranks than cores.
In the engine, a long yield shows that another program uses the core, and waits then sleep earlier.
A wait also checks the peers' processes: it ends soon after a peer has died, or at the timeout.
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
from collectives.shared_memory import engine, fingerprint
from collectives.shared_memory.fingerprint import Lengths, format_ranks
from collectives.shared_memory.process import PeerProcess, yield_core
from collectives.shared_memory.segment import HEADER_BYTES

CHUNK_BYTES = 512 << 10
SLOT_BYTES = CHUNK_BYTES // 2
# Offsets in a segment, in bytes.
_CLOCK = 0
_SLEEPERS = 8
_LEFT = 64
_FAILURE = 72
_CALLS = 128
_NOTES = 640
_BLAMED = 768
_DATA = 4096
ARENA_BYTES = _DATA + CHUNK_BYTES
# Bytes of a cell for a call and of a cell for a note; a segment has two of each.
_CALL_ROOM = 256
_NOTE_ROOM = 64
_MAX_BLAMED = (_DATA - _BLAMED) // 4
# Every rank sums a whole tensor of at most this size, instead of one slice of it.
ONE_SHOT_BYTES = 32 * 1024
# Tensors in shared memory are summed in pieces of this size.
PIECE_BYTES = 512 * 1024
# Number of times that a wait yields the core before it sleeps, and the seconds that it sleeps.
YIELDS = 200
MIN_SLEEP_SECONDS = 2e-5
MAX_SLEEP_SECONDS = 1e-3


def is_available() -> bool:
    """Return True if ranks can share memory on this machine."""
    if sys.platform != "linux":
        return False
    return platform.machine() in ("x86_64", "AMD64") or engine.get_library() is not None


class Arena:
    """The segments of all ranks of one host.

    Methods number the ranks by their position on this host. Errors name the ranks of the group.

    Args:
        rank: the position of this rank.
        group_ranks: the ranks in the group, by position.
        timeout: the longest wait for a rank, in seconds.
        has_engine: True if all ranks have the same engine.
    """

    def __init__(
        self,
        mappings: Sequence[mmap.mmap],
        pids: Sequence[int],
        rank: int,
        *,
        group_ranks: Sequence[int],
        timeout: float,
        has_engine: bool,
    ) -> None:
        self.rank = rank
        self.world_size = len(mappings)
        self.timeout = timeout
        self.group_ranks = group_ranks
        self.has_engine = has_engine
        #: False if the group has ranks on other hosts, whose reports may name another cause.
        self.is_whole_group = True
        self._pids = pids
        self._memory = [memoryview(mapping)[HEADER_BYTES:] for mapping in mappings]
        self._clocks = [memory[_CLOCK : _CLOCK + 8].cast("q") for memory in self._memory]
        # One byte per rank: 1 if it has left the group without an error.
        self._left = [memory[_LEFT : _LEFT + 1] for memory in self._memory]
        # Number of ranks that each rank blames: 0 unless it has left after an error. `_blamed`
        # stores the blamed ranks, each plus 1, so that 0 means "not yet written".
        self._failures = [memory[_FAILURE : _FAILURE + 8].cast("q") for memory in self._memory]
        self._blamed = [memory[_BLAMED:_DATA].cast("i") for memory in self._memory]
        self._leaving = threading.RLock()  # a signal handler may leave while its thread leaves
        self._others = [i for i in range(self.world_size) if i != rank]
        # Calls outside of inference mode write to these tensors, even if the first call is inside.
        with torch.inference_mode(False):
            self._bytes = [
                torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES + _DATA)
                for mapping in mappings
            ]
        self._slots = [
            [data[:SLOT_BYTES] for data in self._bytes],
            [data[SLOT_BYTES : 2 * SLOT_BYTES] for data in self._bytes],
        ]
        self._views: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        #: The other ranks' processes, by position. A rank whose own set-up is complete may already
        #: have left the group and ended.
        self._processes = {i: PeerProcess(pids[i]) for i in self._others}
        self._library = engine.get_library() if has_engine else None
        self._addresses = engine.make_address_array(
            [torch.frombuffer(m, dtype=torch.uint8).data_ptr() for m in self._memory]
        )
        self._shared = engine.Memory(
            rank=rank,
            world_size=self.world_size,
            tick=0,
            slot_bytes=SLOT_BYTES,
            one_shot_bytes=ONE_SHOT_BYTES,
            piece_bytes=PIECE_BYTES,
            sleepers=_SLEEPERS,
            failure=_FAILURE,
            calls=_CALLS,
            call_room=_CALL_ROOM,
            call_bytes=fingerprint.BYTES,
            notes=_NOTES,
            note_room=_NOTE_ROOM,
            data=_DATA,
            memory=self._addresses,
        )
        # The call and the note that the next job writes before its first tick.
        self._announced: tuple[bytes | None, bytes | None] = None, None
        self._queue = engine.Queue()
        # The jobs for which the engine's queue has no room yet, in order.
        self._backlog: deque[engine.Job | None] = deque()
        self._filling = threading.Lock()

    # ----- the wait -----

    @property
    def tick(self) -> int:
        """The number of ticks so far."""
        return self._shared.tick

    def sync(self) -> None:
        """Tick, then wait until all ranks have ticked."""
        if self._library is not None:
            self.run_job(self.make_job("tick"))
            return
        tick = self._shared.tick = self.tick + 1
        clocks = self._clocks
        clocks[self.rank][0] = tick
        # All ranks have one deadline, so a late rank does not extend the wait for other ranks.
        deadline = time.monotonic() + self.timeout
        for i in self._others:
            if clocks[i][0] < tick:
                self._wait(i, tick, deadline)
        self._shared.completed = tick

    def _wait(self, other: int, tick: int, deadline: float) -> None:
        clock = self._clocks[other]
        yields = YIELDS
        while yields and clock[0] < tick and not self._failures[other][0]:
            yield_core()
            yields -= 1
        seconds = MIN_SLEEP_SECONDS
        while clock[0] < tick:
            time.sleep(seconds)
            seconds = min(seconds * 1.5, MAX_SLEEP_SECONDS)
            self._check_peers(tick, deadline)

    def _check_peers(self, tick: int, deadline: float) -> None:
        """Raise RankLost if a rank cannot reach this tick, or does not reach it in time."""
        late = self._list_late_positions(tick)
        left = [i for i in late if self._left[i][0]]
        dead = [i for i in late if self._processes[i].has_ended()]
        # In this order: a rank may end after a failure, and may fail after it has reached the tick.
        failed = [i for i in late if self._read_blamed_ranks(i)]
        late = self._list_late_positions(tick)
        if self._failures[self.rank][0]:
            rank = self.group_ranks[self.rank]
            raise RankLost([rank], f"rank {rank}, this rank, has left the group; {UNUSABLE}")
        left_late = [i for i in left if i in late]
        if left_late:
            self._raise_lost(left_late, LEFT_GROUP)
        # This check comes before dead ranks: a rank that has ended may have reported the cause.
        failed_late = [i for i in failed if i in late]
        if failed_late:
            self._fail_as_reported(failed_late[0])
        dead_late = [i for i in dead if i in late]
        if dead_late:
            self._leave_and_raise(dead_late, "died")
        # A rank that has failed since lowers its clock. The next check reads the reason.
        has_failed = any(self._failures[i][0] for i in late)
        if late and not has_failed and time.monotonic() > deadline:
            event = f"did not make the call within the timeout of {self.timeout:g} s"
            self._raise_lost(late, event)

    def _list_late_positions(self, tick: int) -> list[int]:
        """Return the positions of the other ranks that have not reached a tick."""
        return [i for i in self._others if self._clocks[i][0] < tick]

    def list_late_ranks(self) -> list[int]:
        """Return the ranks of the group that have not reached this rank's tick."""
        return [self.group_ranks[i] for i in self._list_late_positions(self.tick)]

    # ----- the engine -----

    def make_job(self, kind: str, **fields: Any) -> engine.Job:
        """Return the engine's job for a collective of kind `kind`.

        The job writes the call and the note of the last `announce`. `fields` are the other fields
        of `engine.Job`.
        """
        call, note = self._announced
        self._announced = None, None
        return engine.Job(engine.JOB_KINDS.index(kind), call=call, note=note, **fields)

    def run_job(self, job: engine.Job) -> None:
        """Run a job in the engine, or the remainder of it; raise an error if it fails."""
        assert self._library is not None
        tick = -1
        deadline = 0.0
        while (status := self._library.run(self._shared, job)) == engine.WAITING:
            if self.tick != tick:
                tick = self.tick
                deadline = time.monotonic() + self.timeout
            self._check_peers(tick, deadline)
        if status == engine.MISMATCH:
            # Either the calls or the lengths of an all-to-all differ.
            self.compare_calls()
            self.compare_lengths()

    def put(self, job: engine.Job | None) -> None:
        """Queue a job for `serve`; None makes `serve` return. The queue has no length limit."""
        if self._library is not None:
            with self._filling:
                self._backlog.append(job)
                self._fill_queue()

    def serve(self) -> None:
        """Wait for the next job and run it without the GIL; without an engine, return at once."""
        if self._library is not None:
            self._library.serve(self._shared, self._queue)
            if self._backlog:
                with self._filling:
                    self._fill_queue()

    def _fill_queue(self) -> None:
        put = engine.get_library_with_interpreter().put
        while self._backlog and put(self._queue, self._backlog[0]):
            self._backlog.popleft()

    def list_dead_ranks(self) -> list[int]:
        """Return the ranks of the group whose processes on this host have ended."""
        positions = [i for i, process in self._processes.items() if process.has_ended()]
        return [self.group_ranks[i] for i in positions]

    def announce_end(self) -> None:
        """Announce that this rank makes no further calls after its last tick."""
        self._left[self.rank][0] = 1

    def leave(self, blamed: Sequence[int] = ()) -> None:
        """Announce that this rank has left the group after an error.

        The other ranks then fail at the tick that this rank has not completed. At earlier ticks,
        slower ranks still succeed. `blamed` are the ranks of the group that caused the error, by
        default this rank. Only the first call sets them.
        """
        with self._leaving:  # two threads would mix their ranks
            if not self._failures[self.rank][0]:
                ranks = blamed[:_MAX_BLAMED] or [self.group_ranks[self.rank]]
                for i, rank in enumerate(ranks):
                    self._blamed[self.rank][i] = 1 + rank
                # Other ranks read the blamed ranks as soon as they read this number.
                self._failures[self.rank][0] = len(ranks)
        self._clocks[self.rank][0] = self._shared.completed

    def _read_blamed_ranks(self, position: int) -> list[int]:
        """Return the ranks that the rank at `position` blames, or [] if it has not failed."""
        numbers = self._blamed[position][: self._failures[position][0]].tolist()
        # On some processors, the number of ranks may become visible before the ranks.
        return [number - 1 for number in numbers] if all(numbers) else []

    def _fail_as_reported(self, position: int) -> None:
        """Leave the group for the reason that the rank at `position` has left it."""
        blamed = self._read_blamed_ranks(position)
        reporter = self.group_ranks[position]
        if blamed == [reporter]:
            self._leave_and_raise([position], "left after an error")
        self.leave(blamed)
        loss = f"rank {reporter} reported the loss of {format_ranks(blamed)}"
        raise RankLost(blamed, f"{loss}; {UNUSABLE}")

    def _raise_lost(self, positions: Sequence[int], event: str) -> None:
        """Raise RankLost, or PeerError if reports of other hosts may name another cause."""
        if not self.is_whole_group:
            raise PeerError(self.group_ranks[positions[0]], event)
        self._leave_and_raise(positions, event)

    def _leave_and_raise(self, positions: Sequence[int], event: str) -> None:
        """Leave the group and raise RankLost with the ranks at `positions`."""
        ranks = [self.group_ranks[i] for i in positions]
        self.leave(ranks)
        pids = [self._pids[i] for i in positions]
        subject = ", ".join(f"rank {r} (process {p})" for r, p in zip(ranks, pids, strict=True))
        raise RankLost(ranks, f"{subject} {event}; {UNUSABLE}")

    # ----- fingerprints, notes and slots -----

    def announce(self, packed: bytes, note: bytes = b"") -> None:
        """Write this rank's call before the next tick.

        A note may differ between ranks; only the engine reads it.
        """
        if self._library is not None:
            self._announced = packed, note or None
            return
        at = _CALLS + ((self.tick + 1) & 1) * _CALL_ROOM
        self._memory[self.rank][at : at + len(packed)] = packed

    def compare_calls(self) -> None:
        """Raise Mismatch if the ranks have announced different calls before the last tick."""
        at = _CALLS + (self.tick & 1) * _CALL_ROOM
        calls = [bytes(memory[at : at + fingerprint.BYTES]) for memory in self._memory]
        fingerprint.compare(calls, self.group_ranks)

    def compare_lengths(self) -> None:
        """Raise Mismatch if the ranks' lengths in an all-to-all do not match."""
        rows = [slot[: 2 * self.world_size].tolist() for slot in self.get_slots(torch.int64)]
        lengths = [Lengths(row[: self.world_size], row[self.world_size :]) for row in rows]
        fingerprint.compare_lengths(dict(enumerate(lengths)), self.group_ranks)

    def get_slots(self, dtype: torch.dtype, *, ahead: int = 0) -> list[Tensor]:
        """Return all ranks' slots, viewed as `dtype`, at `ahead` ticks after the last tick."""
        cell = (self.tick + ahead) & 1
        if (dtype, cell) not in self._views:
            with torch.inference_mode(False):
                self._views[dtype, cell] = [slot.view(dtype) for slot in self._slots[cell]]
        return self._views[dtype, cell]

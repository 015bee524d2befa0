"""What a group needs to run collectives: messages, shared memory, and a thread for progress.

One communicator is made for each process group, by its first collective, and kept with it.

Notable:
- operations of one group run one at a time, in the order of the calls. Synchronous ones run in the
  caller's thread; asynchronous ones on the group's progress thread, where sums and copies release
  the interpreter, so that they overlap with the caller's computation;
- an operation that fails leaves the group unusable, and says which rank is the reason; a mismatch
  that is found before data moves leaves it as it was.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from collectives.algorithms.gloo import GlooGroups
from collectives.algorithms.point_to_point import PeerError, PointToPoint
from collectives.choice.cost import CostModel
from collectives.choice.topology import Topology
from collectives.faults import GRACE_SECONDS, Entry, RankLost, Roll
from collectives.shared_memory.arena import UNUSABLE
from collectives.shared_memory.fingerprint import (
    Call,
    Lengths,
    Mismatch,
    compare,
    compare_lengths,
    has_nan,
)
from collectives.work import Work

_known: dict[Any, Communicator] = {}
# Two threads may make a group's first call at once.
_making = threading.Lock()


def communicator(group: Any = None) -> Communicator:
    """The communicator of a process group (torch's default one if None)."""
    pg: Any = dist.group.WORLD if group is None else group
    if pg is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    own = getattr(pg, "communicator", None)
    if isinstance(own, Communicator):
        return own
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError("this rank is not a member of the given group; do not call from here")
    if (known := _known.get(pg)) is not None:
        return known
    with _making:
        if pg not in _known:
            _forget_destroyed_groups()
            _known[pg] = Communicator(
                pg,
                store=dist.distributed_c10d._get_process_group_store(pg),
                timeout=pg._get_backend(pg._device_types[0]).options._timeout,
            )
        return _known[pg]


def _forget_destroyed_groups() -> None:
    for pg in [pg for pg in _known if pg not in dist.distributed_c10d._world.pg_map]:
        _known.pop(pg).close()


class Communicator:
    """One rank's means to talk to the others of a group."""

    def __init__(self, group: Any, *, store: Store, timeout: timedelta) -> None:
        self.rank, self.world = group.rank(), group.size()
        self.timeout = timeout.total_seconds()
        # A store may outlive its group: the next group must not find this one's addresses.
        generation = (store.add("collectives", 1) - 1) // self.world
        self.store = PrefixStore(f"collectives/{generation}", store)
        self.wire = PointToPoint(group, range(self.world), self.rank)
        self.gloo = GlooGroups(group, self.store)
        self.topology = Topology(self.store, self.rank, self.world, self.timeout)
        self.models: dict[str, CostModel] = {}
        self.choices: dict[tuple[str, int, bool], str] = {}
        self.compare_always = False
        self.comparing = False
        self.look_for_nan = False
        # The ranks that send and receive in the operation that runs.
        self.talking: Sequence[int] = range(self.world)
        # What this rank brings to the all-to-all that runs.
        self.lengths: Lengths | None = None
        self._calls = 0
        self._broken: RankLost | None = None
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None

    def run(
        self,
        call: Call,
        brought: Tensor | Sequence[Tensor],
        body: Callable[[bytes], None],
        *,
        async_op: bool,
        result: Tensor | Sequence[Tensor] | None = None,
    ) -> Work | None:
        """Do `body` after all earlier operations: now, or on the progress thread.

        `call` describes it, `brought` is what this rank brings to it and `result` what it gets (the
        same if not given); `body` is called with the packed call.
        """
        result = brought if result is None else result
        # What `checked` says holds for the calls made inside it, whenever they are done.
        compare, look_for_nan = self.compare_always, self.look_for_nan

        def operation() -> None:
            found = look_for_nan and any(map(has_nan, as_list(brought)))
            packed = (replace(call, has_nan=True) if found else call).packed
            with self._lock:
                self._begin(compare)
                try:
                    body(packed)
                except BaseException as error:
                    reason = self._reason(error, packed)
                    if reason is error:
                        raise
                    raise reason from error

        # What torch.profiler shows; it costs microseconds, so only where somebody looks. Of an
        # asynchronous call that is the start: an event that ends after the profiler has is a crash.
        event = record_function(f"collectives:{call.kind}") if _profiler_enabled() else None
        if not async_op:
            last, self._last = self._last, None
            if last is not None:
                last.join()
            with event or nullcontext():
                operation()
            return None
        work = Work(
            operation,
            as_list(result),
            timeout=self.timeout,
            progress=lambda: self._calls,
        )
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_progress, args=(self._queue,), daemon=True, name="collectives"
                )
                self._thread.start()
            # Together: what is last in the queue is what a synchronous call waits for.
            with event or nullcontext():
                self._last = work
                self._queue.put(work)
        return work

    def abort(self) -> None:
        """Take no further part: what runs here ends in an error, and so does every other rank's."""
        lost = RankLost([self.rank], f"rank {self.rank} has aborted; {UNUSABLE}")
        self._give_up(lost, b"")

    def close(self) -> None:
        """Stop the thread and release what the kernel holds."""
        self._queue.put(None)
        self.topology.close()

    def _begin(self, compare: bool) -> None:
        if self._broken is not None:
            raise RankLost(self._broken.ranks, f"an earlier call has failed: {self._broken}")
        self._calls += 1
        self._heed_timeout()
        self.comparing = compare
        self.talking = range(self.world)
        self.lengths = None
        # What is left of the timeout is for finding out who is lost.
        self.wire.finish_within(0.8 * self.timeout)
        self.wire.speak_of(b"")

    def _heed_timeout(self) -> None:
        """Take the timeout that the group has now: torch may have been told another one."""
        seconds = self.gloo.timeout_seconds()
        if seconds and seconds != self.timeout:
            self.timeout = seconds
            if self.topology.arena is not None:
                self.topology.arena.timeout = seconds

    def _reason(self, error: BaseException, packed: bytes) -> BaseException:
        """Why the call has failed, as every rank is to say it; the group is given up, if it is."""
        if isinstance(error, PeerError):
            lost = self._who_is_lost(error, packed)
            self._give_up(lost, packed)
            return lost
        if isinstance(error, Mismatch):
            # The ranks of this host have found it; the other hosts' wait for messages.
            if not (self.topology.one_host or self.comparing):
                self._give_up(error, packed, found_here=True)
            return error
        if isinstance(error, RankLost):
            reason = self._told_difference() or error
            self._give_up(reason, packed)
            return reason
        failed = RankLost([self.rank], f"rank {self.rank} failed: {error!r}")
        self._give_up(failed, packed)
        return error

    def _give_up(
        self, reason: RankLost | Mismatch, packed: bytes, *, found_here: bool = False
    ) -> None:
        """Take no further part, and let every rank know why.

        What the host's ranks all find at the same tick (`found_here`) need not be told to them, and
        must not be: one that is late would miss the tick.
        """
        self._broken = RankLost(reason.ranks, str(reason))
        if not self.topology.one_host:
            difference = str(reason) if isinstance(reason, Mismatch) else ""
            entry = Entry(self.rank, packed, reason.ranks, difference)
            Roll(self.store, self._calls).sign(entry)
            self.wire.hang_up()
            self.gloo.hang_up()
        # Last: who is told so in memory looks for the reason in the roll.
        if self.topology.arena is not None and not found_here:
            self.topology.arena.leave(reason.ranks[0])

    def _told_difference(self) -> Mismatch | None:
        """How calls differ, if another host has found that they do."""
        if not self.topology.one_host:
            for entry in Roll(self.store, self._calls).read([], 0).values():
                if entry.difference:
                    return Mismatch(entry.difference, entry.blames)
        return None

    def _who_is_lost(self, error: PeerError, packed: bytes) -> RankLost | Mismatch:
        arena = self.topology.arena
        if arena is not None and (dead := arena.dead()):
            ranks = [arena.names[i] for i in dead]
            return RankLost(ranks, f"rank {ranks[0]} died (call {self._calls}); {UNUSABLE}")
        roll = Roll(self.store, self._calls)
        lengths = (self.lengths.sends, self.lengths.receives) if self.lengths else None
        roll.sign(Entry(self.rank, packed, lengths=lengths))
        self.wire.hang_up()
        self.gloo.hang_up()
        seconds = min(GRACE_SECONDS, 0.15 * self.timeout)
        entries = roll.read(self.talking, seconds)
        told = f"messages failed in call {self._calls}: {error}; {UNUSABLE}"
        for rank, entry in entries.items():
            if entry.difference:
                return Mismatch(entry.difference, entry.blames)
            if entry.blames:
                names = f"rank {', '.join(map(str, entry.blames))}"
                return RankLost(entry.blames, f"{names} is lost, says rank {rank}; {told}")
        # First: a rank that is absent may have had all that it needed of this call.
        try:
            compare([entry.call for entry in entries.values()], list(entries))
            brought = {e.rank: Lengths(*e.lengths) for e in entries.values() if e.lengths}
            compare_lengths(brought, range(self.world))
        except Mismatch as difference:
            return Mismatch(f"{difference}; {UNUSABLE}", difference.ranks)
        if absent := [rank for rank in self.talking if rank not in entries]:
            who = f"rank {', '.join(map(str, absent))}"
            return RankLost(absent, f"{who} gave no sign of life for {seconds:g} s after {told}")
        if error.peer is None:
            return RankLost([], f"a connection broke, and every rank is still there: {told}")
        return RankLost([error.peer], f"rank {error.peer} broke off: {told}")


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _progress(works: queue.SimpleQueue[Work | None]) -> None:
    while (work := works.get()) is not None:
        work.run()
        del work


@contextmanager
def checked(group: Any = None, *, nan: bool = False) -> Iterator[None]:
    """Inside, ranks compare every call before data moves, and look for NaNs if asked.

    Every rank must enter it. A difference raises `Mismatch` on all ranks, with the odd rank's
    number; a NaN does so too, before it has spread.
    """
    comm = communicator(group)
    before = comm.compare_always, comm.look_for_nan
    comm.compare_always, comm.look_for_nan = True, nan
    try:
        yield
    finally:
        comm.compare_always, comm.look_for_nan = before

"""What a group needs to run collectives: messages, shared memory, and a thread for progress.

One communicator is made for each process group, by its first collective, and kept with it.

Notable:
- operations of one group run one at a time, in the order of the calls. Synchronous ones run in the
  caller's thread; asynchronous ones on the group's progress thread, so that they overlap with the
  caller's computation: it waits in the engine, where there is one, and so needs no turn of the
  interpreter before data move;
- an operation that fails leaves the group unusable, and says which rank is the reason, unless it is
  a mismatch that is found before data moves.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from collectives.algorithms.gloo import GlooGroups
from collectives.algorithms.point_to_point import PointToPoint
from collectives.choice.cost import CostModel
from collectives.choice.topology import Topology
from collectives.coalescing import current
from collectives.errors import UNUSABLE, RankLost
from collectives.faults import LOOKS_PART, SHORTEST_LOOK, Faults, Operation, fresh
from collectives.shared_memory.engine import Job, is_done
from collectives.shared_memory.fingerprint import Call, has_nan
from collectives.work import Work

# A rank that had all it needed of a call goes on: so far it is remembered what that was.
CALLS_REMEMBERED = 16
# How long closing waits for calls that are still queued.
CLOSE_SECONDS = 1.0
# torch does not report that it destroys a group of gloo's, so a thread checks this often.
DESTROYED_SECONDS = 0.2
_watcher: threading.Thread | None = None
_known: dict[Any, "Communicator"] = {}
# Two threads may make a group's first call at once; one for all groups could wait in a circle.
_making: dict[Any, threading.Lock] = {}


def communicator(group: Any = None) -> "Communicator":
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
    with _making.setdefault(pg, threading.Lock()):
        if pg not in _known:
            _forget_destroyed_groups()
            _watch_for_destroyed_groups()
            _known[pg] = Communicator(
                pg,
                store=dist.distributed_c10d._get_process_group_store(pg),
                timeout=pg._get_backend(pg._device_types[0]).options._timeout,
            )
        return _known[pg]


def _forget_destroyed_groups() -> None:
    for pg in [pg for pg in list(_known) if pg not in dist.distributed_c10d._world.pg_map]:
        if gone := _known.pop(pg, None):
            gone.close()
        _making.pop(pg, None)


def _watch_for_destroyed_groups() -> None:
    """Start the thread that closes the communicators of destroyed groups, if it does not run."""
    global _watcher
    # In a forked process it does not.
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_groups, daemon=True, name="collectives groups")
        _watcher.start()


def _watch_groups() -> None:
    while True:
        time.sleep(DESTROYED_SECONDS)
        _forget_destroyed_groups()


class Communicator:
    """One rank's means to talk to the others of a group."""

    def __init__(self, group: Any, *, store: Store, timeout: timedelta) -> None:
        self.rank, self.world = group.rank(), group.size()
        self.timeout = timeout.total_seconds()
        self.store = fresh(store, self.world, self.timeout)
        self.gloo = GlooGroups(group, self.store)
        self.wire = PointToPoint(group, range(self.world), self.rank, self.gloo.base)
        self.topology = here = Topology(self.store, self.rank, self.world, self.timeout)
        self.faults = Faults(
            self.store, self.rank, self.world, here.arena, here.one_host, self.wire, self.gloo
        )
        self.models: dict[str, CostModel] = {}
        self.choices: dict[tuple[str, int, bool], str] = {}
        self.compare_always = False
        self.look_for_nan = False
        self.operation = Operation()
        self._made: deque[bytes] = deque(maxlen=CALLS_REMEMBERED)
        # The first is held by whoever is at work, and for all that the engine has been given.
        self._lock, self._starting = threading.Lock(), threading.Lock()
        # How many asynchronous calls that is, and how many others there are.
        self._moving = self._waiting = 0
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None
        self._closed = threading.Event()
        if not here.one_host:
            watch = partial(_watch, weakref.ref(self), self._closed)
            threading.Thread(target=watch, daemon=True, name="collectives watch").start()

    def run(
        self, call: Call, brought: Tensor | Sequence[Tensor], body: Callable[[bytes], None], *,
        async_op: bool, result: Tensor | Sequence[Tensor] | None = None,
        engine_job: Callable[[], Job | None] = lambda: None,
    ) -> Work | None:  # fmt: skip
        """Do `body` after all earlier operations: now, or on the progress thread.

        `call` describes it, `brought` is what this rank brings to it and `result` what it gets (or
        the same); `body` takes the packed call; `engine_job` makes it for the engine, if it can.
        """
        result = brought if result is None else result
        # What `checked` says holds for the calls made inside it, whenever they are done.
        compare, look_for_nan = self.compare_always, self.look_for_nan
        batch = current()

        def operation(job: Job | None = None) -> None:
            if batch is None:
                operate(job)
                return
            if batch.error is not None:
                raise batch.error
            try:
                operate(job)
            except Exception as error:
                batch.fail(error)
                raise

        def operate(job: Job | None) -> None:
            found = look_for_nan and any(map(has_nan, as_list(brought)))
            packed = (replace(call, has_nan=True) if found else call).packed
            with self._lock if job is None else nullcontext():
                self._begin(compare, packed)
                try:
                    if job is None:
                        body(packed)
                    elif not is_done(job):
                        self.topology.require().do(job)
                except BaseException as error:
                    self._fail(error)

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
        self._heed_timeout()
        # Together: what is last in the queue is what a synchronous call waits for.
        with self._starting, event or nullcontext():
            if self._thread is None:
                self._thread = threading.Thread(target=self._go, daemon=True, name="collectives")
                self._thread.start()
            job = self._move((lambda: None) if look_for_nan else engine_job)
            if batch is not None:
                batch.add(job)
            self._last = work = Work(
                partial(self._later, operation, job), as_list(result), timeout=self.timeout,
                progress=lambda: self.operation.number, moved=partial(is_done, job),
            )  # fmt: skip
            self._put(work, job)
        return work

    def at_once(self, call: Call, *tensors: Tensor) -> bool:
        """What `run` does, as fast as can be, of one that gloo did before; False if it cannot."""
        if self._last or self.compare_always or self.look_for_nan or _profiler_enabled():
            return False
        with self._lock:
            self._count(False, call.packed)
            try:
                self.gloo.run(call.kind, call.packed, tensors, call.op, call.root, self.timeout)
            except BaseException as error:
                self._fail(error)
        return True

    def _fail(self, error: BaseException) -> None:
        reason = self.faults.reason(error, self.operation, self.timeout)
        if reason is error:
            raise error
        raise reason from error

    def _move(self, make: Callable[[], Job | None]) -> Job | None:
        """What the engine can begin with before Python comes to it, and the group held for it."""
        job, held = None, self._moving > 0
        # Behind a call that waits for Python, and so for the group, it would be held for ever.
        free = self.faults.broken is None and not self._waiting
        if free and (held or self._lock.acquire(blocking=False)):
            try:
                job = make()
            finally:
                if job is None and not held:
                    self._lock.release()
        self._moving += job is not None
        self._waiting += job is None
        return job

    def _later(self, operation: Callable[[Job | None], None], job: Job | None) -> None:
        try:
            operation(job)
        finally:
            with self._starting:
                self._moving -= job is not None
                self._waiting -= job is None
                if job is not None and not self._moving:
                    self._lock.release()

    def _put(self, work: Work | None, job: Job | None = None) -> None:
        self._queue.put(work)
        if self.topology.arena is not None:
            self.topology.arena.put(job)

    def _go(self) -> None:
        arena = self.topology.arena
        while True:
            if arena is not None:
                arena.serve()
            if (work := self._queue.get()) is None:
                self._end()
                return
            work.run()
            del work

    def abort(self) -> None:
        """Take no further part: what runs here ends in an error, and so does every other rank's."""
        lost = RankLost([self.rank], f"rank {self.rank} has aborted; {UNUSABLE}")
        self.faults.give_up(lost, self.operation)

    def close(self) -> None:
        """Let the other ranks know that this one has left, after the calls that are queued.

        Those calls may wait for ranks that do not come, so this does not wait for long.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with self._starting:
            thread = self._thread
            self._put(None)
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _end(self) -> None:
        """Announce the end, and release what the kernel holds."""
        if self.faults.broken is None:
            self.faults.announce_end(self.operation)
        self.topology.close()

    def _begin(self, compare: bool, packed: bytes) -> None:
        self._count(compare, packed)
        self.wire.finish_within(self.timeout)
        self.wire.speak_of(b"")

    def _count(self, compare: bool, packed: bytes) -> None:
        if (broken := self.faults.broken) is not None:
            raise RankLost(broken.ranks, f"an earlier call has failed: {broken}")
        self._heed_timeout()
        self._made.append(packed)
        number = self.operation.number + 1
        self.operation = Operation(number, self._made, range(self.world), compare)

    def _heed_timeout(self) -> None:
        """Take the timeout that the group has now: torch may have been told another one."""
        seconds = self.gloo.timeout_seconds()
        if seconds and seconds != self.timeout:
            self.timeout = seconds
            if self.topology.arena is not None:
                self.topology.arena.timeout = seconds


def _watch(of: weakref.ref[Communicator], closed: threading.Event) -> None:
    """Note it where the same call is met at two looks: the rank waits, and is not late."""
    seen: Operation | None = None
    noted: Operation | None = None
    seconds = 0.0
    while not closed.wait(seconds):
        if (comm := of()) is None:
            return
        busy = comm._lock.locked() and comm.faults.broken is None
        before, seen = seen, comm.operation if busy else None
        waits = seen if seen is before else None
        if waits is not noted:
            comm.faults.note(waits)
            noted = waits
        seconds = max(SHORTEST_LOOK, LOOKS_PART * comm.timeout)
        del comm


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


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

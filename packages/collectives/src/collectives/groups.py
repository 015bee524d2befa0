"""The communicator of each group, from the first call on it until the group is destroyed.

torch does not report that it destroys a gloo group, so a thread checks for destroyed groups. A
function that runs when the process exits ends all threads.
"""

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from collectives.algorithms.gloo import get_gloo_backend
from collectives.algorithms.point_to_point import PointToPoint
from collectives.communicator import Communicator, all_communicators, is_exiting
from collectives.execution.progress import CLOSE_SECONDS
from collectives.execution.threads import join_threads, start_thread
from collectives.store import create_fresh_store

# Interval at which a thread checks for destroyed groups.
DESTROYED_POLL_SECONDS = 0.2
# Seconds that the exit of the process waits for all threads: see Note [Threads at exit].
EXIT_SECONDS = 5.0

_communicators: dict[Any, Communicator] = {}
# Two threads may make a group's first call at the same time. Each group has a separate lock,
# because the first calls of several groups may wait for each other.
_creating: dict[Any, threading.Lock] = {}
_watcher: threading.Thread | None = None


def get_communicator(group: Any = None) -> Communicator:
    """Return the communicator of `group`, or of the default group if it is None.

    The first call on a gloo group creates the communicator, so every rank of the group must make
    it. Raise RuntimeError or ValueError if there is no such group, or if it was destroyed.
    """
    pg: Any = dist.group.WORLD if group is None else group
    if pg is None:
        raise RuntimeError("no process group; call torch.distributed.init_process_group first")
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError(
            f"expected a group that this rank is a member of, got {pg!r}; "
            "call collectives on the group's members only"
        )
    existing = getattr(pg, "communicator", None)
    if not isinstance(existing, Communicator):
        existing = _communicators.get(pg)
    if existing is not None and existing.is_inherited:
        raise RuntimeError(
            "expected the process that has set up the group, got a process that was forked from "
            "it; create a process group in the forked process"
        )
    if existing is None and pg in dist.distributed_c10d._world.pg_map:
        return _create(pg)
    if existing is None or existing.is_closed:
        raise ValueError(
            f"expected a group that exists, got {pg!r}, which has been destroyed; create a new one"
        )
    return existing


def _create(pg: Any) -> Communicator:
    """Return the communicator of a gloo group, which this or another thread creates."""
    with _creating.setdefault(pg, threading.Lock()):
        if pg not in _communicators:
            _close_destroyed_groups()
            _watch_for_destroyed_groups()
            _communicators[pg] = _set_up(pg)
        return _communicators[pg]


def _set_up(pg: Any) -> Communicator:
    """Create and return the communicator of a gloo group; every rank must call this function."""
    timeout = pg._get_backend(pg._device_types[0]).options._timeout
    # One deadline bounds all waits of the set-up.
    deadline = time.monotonic() + timeout.total_seconds()
    messages = PointToPoint(pg, range(pg.size()), pg.rank(), get_gloo_backend(pg))
    store = create_fresh_store(
        dist.distributed_c10d._get_process_group_store(pg),
        pg.rank(),
        pg.size(),
        deadline,
        messages.find_disconnected_peers,
    )
    return Communicator(pg, store=store, timeout=timeout, deadline=deadline)


@contextmanager
def checked(group: Any = None, *, shapes: bool = True) -> Iterator[None]:
    """Compare every call across ranks before data moves.

    Every rank must enter the context. A difference raises `Mismatch` on all ranks, with the
    deviating ranks in `Mismatch.ranks`. The context changes the calls of all threads on the group,
    so only one thread may enter it at a time.

    Args:
        shapes: compare the tensors' shapes. False compares their numbers of elements, as gloo does,
            so that ranks can pass tensors of different shapes.
    """
    comm = get_communicator(group)
    outer_compare_calls = comm.compare_calls
    outer_compare_shapes = comm.compare_shapes
    comm.compare_calls = True
    comm.compare_shapes = shapes
    try:
        yield
    finally:
        comm.compare_calls = outer_compare_calls
        comm.compare_shapes = outer_compare_shapes


def _close_destroyed_groups() -> None:
    groups = dist.distributed_c10d._world.pg_map
    for pg in [pg for pg in list(_communicators) if pg not in groups]:
        destroyed = _communicators.pop(pg, None)
        if destroyed is not None:
            destroyed.close()
        _creating.pop(pg, None)


def _watch_for_destroyed_groups() -> None:
    """Start the thread that closes communicators of destroyed groups, unless it runs already."""
    global _watcher
    # A forked process inherits the object, but not the thread.
    if _watcher is None or not _watcher.is_alive():
        _watcher = start_thread("collectives groups", _watch_groups)


def _watch_groups() -> None:
    while not is_exiting.wait(DESTROYED_POLL_SECONDS):
        _close_destroyed_groups()


@atexit.register
def _end_threads() -> None:
    """End all threads before the interpreter ends: see Note [Threads at exit]."""
    is_exiting.set()
    running = [comm for comm in all_communicators if not comm.is_inherited]
    for comm in running:
        comm.stop()
    deadline = time.monotonic() + CLOSE_SECONDS
    for comm in running:
        if not comm.progress.join(deadline):
            # The store may have ended before this process.
            with suppress(Exception):
                comm.abort("ended before its calls had finished")
    deadline = time.monotonic() + EXIT_SECONDS
    for comm in running:
        comm.progress.join(deadline)
    join_threads(max(0.0, deadline - time.monotonic()))

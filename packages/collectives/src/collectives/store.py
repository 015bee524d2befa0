"""Access to a process group's store with a time limit.

Unless it is a file, the store is served by rank 0's process or by the launcher. It may therefore
have ended together with the lost rank. Every query runs on a separate thread, which is abandoned if
the store does not answer.

If a rank is killed in the middle of a write, a store file may never answer. torch's reader then
polls the end of the file in an endless loop, while it holds the lock of the file.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from collectives.errors import RankLost
from collectives.execution.threads import abandon, start_thread
from collectives.shared_memory.fingerprint import format_ranks

# A store that serves many ranks is slow. It has failed if it does not answer for this long.
STORE_SECONDS = 0.8
# The pause between two queries grows from the first value to the second.
MIN_PAUSE_SECONDS = 1e-3
MAX_PAUSE_SECONDS = 0.1
# Interval at which a rank that waits for another one checks whether that rank has ended.
CHECK_SECONDS = 0.5
NUMBER_BYTES = 8
STORE_LOST = (
    "the group's store does not answer: the process that serves it (a launcher, or rank 0 of the "
    "default group) has ended or hangs, or a rank was stopped or killed while it used a file store"
)
T = TypeVar("T")


def clone_store(store: Store) -> Store:
    """Return the same store over a separate connection, or the store itself if it cannot open one.

    A client that waits in a store blocks every other call on the same connection.
    """
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


# Note [Fresh part of a store]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A store may outlive a group, and under an elastic launcher it may outlive the processes. Without a
# separate prefix, the next group of the same ranks would read the addresses of ranks that have
# ended. Rank 0 therefore draws a random prefix for every group, and every other rank requests it:
#
#   rank r   request/r = q       a random number
#   rank 0   answer/q = prefix   for every request that it finds, until all ranks have joined
#   rank r   reads answer/q, then writes joined/r under the prefix
#
# Entries that earlier groups have left are harmless: nobody reads the answer to an old request, and
# an old answer does not answer a new request. This also holds if all processes of an earlier group
# ended during its set-up, and if the number of ranks has changed.


def create_fresh_store(
    store: Store,
    rank: int,
    world_size: int,
    deadline: float,
    find_ended: Callable[[], Sequence[int]] = lambda: (),
) -> Store:
    """Return an empty part of a store when all ranks of the group have called this function.

    Raise RankLost with the ranks that have not called it by `deadline`, a value of time.monotonic,
    or that are known to have ended (`find_ended`). See Note [Fresh part of a store].
    """
    store = PrefixStore("collectives", store)
    number = secrets.token_hex(NUMBER_BYTES)
    prefix = number
    poll = None
    if rank == 0:
        poll = partial(_answer_requests, store, range(1, world_size), prefix)
    else:
        request = {f"request/{rank}": number}
        prefix = fetch(store, {0: f"answer/{number}"}, deadline, request, find_ended)[0].decode()
    fresh = PrefixStore(prefix, store)
    joined = {r: f"joined/{r}" for r in range(world_size)}
    fetch(fresh, joined, deadline, {joined[rank]: ""}, find_ended, poll)
    return fresh


def _answer_requests(store: Store, ranks: Iterable[int], prefix: str) -> None:
    """Send the prefix to the ranks whose requests are in the store."""
    for rank in ranks:
        key = f"request/{rank}"
        if store.check([key]):
            store.set(f"answer/{store.get(key).decode()}", prefix)


def run_within(
    seconds: float, function: Callable[[], T], last_answer: Callable[[], float] = lambda: 0.0
) -> T:
    """Return the result of `function`, or raise its error; raise TimeoutError after `seconds`.

    The time limit restarts at each answer that `function` gets: `last_answer` returns the time of
    the last answer, a value of time.monotonic. After a timeout, the thread that runs `function` is
    abandoned.
    """
    future = Future[T]()
    start_time = time.monotonic()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = start_thread("collectives store", run)
    while (remaining := max(start_time, last_answer()) + seconds - time.monotonic()) > 0:
        wait([future], remaining)
        if future.done():
            return future.result()
    abandon(thread)
    return future.result(0)


def query_store(
    seconds: float, function: Callable[[], T], last_answer: Callable[[], float] = lambda: 0.0
) -> T:
    """Run a query on a store as `run_within` does; raise RankLost if the store does not answer.

    The error names no rank: a store may be served by a launcher, or by a rank outside the group.
    """
    try:
        return run_within(seconds, function, last_answer)
    except (TimeoutError, RuntimeError) as error:
        raise RankLost([], STORE_LOST) from error


def fetch(
    store: Store,
    keys: Mapping[int, str],
    deadline: float,
    publish: Mapping[str, str] | None = None,
    find_ended: Callable[[], Sequence[int]] = lambda: (),
    poll: Callable[[], None] | None = None,
) -> dict[int, bytes]:
    """Write `publish` to the store, then return the value of `keys[rank]` for every rank.

    Raise RankLost with the ranks that have not written their value by `deadline`, a value of
    time.monotonic, or that are known to have ended (`find_ended`). If the store does not answer,
    the error names no rank. `poll` is called repeatedly during the wait.
    """
    values: dict[int, bytes] = {}
    ended: list[int] = []

    def query() -> None:
        for key, text in (publish or {}).items():
            store.set(key, text)
        for rank, key in keys.items():
            ended.extend(_wait_for(store, rank, keys, deadline, find_ended, poll))
            if ended:
                return
            if store.check([key]):
                values[rank] = store.get(key)

    # A store may be silent for a while: other threads of this process use the same connection.
    query_store(max(0.0, deadline - time.monotonic()) + STORE_SECONDS, query)
    missing = ended or [rank for rank in keys if rank not in values]
    if missing:
        event = "ended before writing to the group's store"
        if not ended:
            event = "did not write to the group's store within the timeout"
        raise RankLost(
            missing, f"{format_ranks(missing)} {event}; check that every rank makes this call"
        )
    return values


def _wait_for(
    store: Store,
    rank: int,
    keys: Mapping[int, str],
    deadline: float,
    find_ended: Callable[[], Sequence[int]],
    poll: Callable[[], None] | None,
) -> list[int]:
    """Wait until `rank` has written its key, any rank has ended, or the deadline has passed.

    Return the ranks that ended before they had written their keys.
    """
    pause = MIN_PAUSE_SECONDS
    next_check = time.monotonic() + CHECK_SECONDS
    while not store.check([keys[rank]]) and time.monotonic() <= deadline:
        if poll is not None:
            poll()
        if time.monotonic() > next_check:
            next_check = time.monotonic() + CHECK_SECONDS
            ended = [other for other in find_ended() if other in keys]
            # A rank may have written its value before it ended.
            ended = [other for other in ended if not store.check([keys[other]])]
            if ended:
                return ended
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_PAUSE_SECONDS)
    return []

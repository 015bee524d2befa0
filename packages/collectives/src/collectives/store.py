"""Access to a process group's store that is bounded in time.

Unless it is a file, the store is served by rank 0's process or by the launcher. It may therefore
have ended together with the lost rank. Every query runs on a separate thread, which is abandoned if
the store does not answer.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from collectives.errors import RankLost
from collectives.execution.threads import abandon, start_thread
from collectives.shared_memory.fingerprint import format_ranks

# A store that serves many ranks at once is slow. Only a longer silence counts as a failure.
STORE_SECONDS = 0.8
# The pause between two queries grows from the first value to the second.
MIN_PAUSE_SECONDS = 1e-3
MAX_PAUSE_SECONDS = 0.1
# Interval at which a rank that waits for another one checks whether that rank has ended.
CHECK_SECONDS = 0.5
GENERATION_KEY = "generation"
STORE_LOST = (
    "the group's store does not answer: the process that serves it (a launcher, or rank 0 of the "
    "default group) has ended or hangs"
)
T = TypeVar("T")


def clone_store(store: Store) -> Store:
    """Return the same store over a separate connection, or the store itself if it has only one.

    A client that waits in a store blocks every other call on the same connection.
    """
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


# Note [Generations of a store]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A store may outlive a group, and under an elastic launcher it may outlive the processes. Without a
# separate prefix, the next group of the same ranks would read the addresses of ranks that have
# ended. Every rank of a group increments a counter in the store once, so a counter of c belongs to
# generation (c - 1) // world, whose number is the prefix.
#
# If the set-up of a group fails, some of its ranks may never increment the counter. A rank that
# fails therefore completes the generation: it raises the counter to the last value of the
# generation. Otherwise the ranks of the next group would disagree about their generation and wait
# for each other. If all ranks end during the set-up, no rank completes the generation. The launcher
# then starts new processes, with a higher restart count, which is a part of the prefix too.


@contextmanager
def fresh_store(store: Store, world: int, deadline: float) -> Iterator[Store]:
    """Provide a part of a store that no earlier group of the same ranks has written to.

    Every rank of a group must enter this context and set up the group in it. `deadline` is a value
    of time.monotonic. See Note [Generations of a store].
    """
    attempt = PrefixStore(f"collectives/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    seconds = max(STORE_SECONDS, deadline - time.monotonic())
    count = query_store(seconds, lambda: attempt.add(GENERATION_KEY, 1))
    generation = (count - 1) // world
    try:
        yield PrefixStore(str(generation), attempt)
    except BaseException as error:
        # A store that does not answer is not queried again: the error would come later.
        if not (isinstance(error, RankLost) and not error.ranks):
            end = (generation + 1) * world
            with suppress(RankLost):
                query_store(STORE_SECONDS, lambda: _raise_counter(attempt, end))
        raise


def _raise_counter(store: Store, minimum: int) -> None:
    """Raise the counter of generations to `minimum`, unless it is higher already."""
    count = int(store.get(GENERATION_KEY))
    while count < minimum:
        # The result is the current value, which another rank may have changed.
        count = int(store.compare_set(GENERATION_KEY, str(count), str(minimum)))


def run_within(
    seconds: float, function: Callable[[], T], last_answer: Callable[[], float] = lambda: 0.0
) -> T:
    """Return the result of `function`, or raise its error; raise TimeoutError after `seconds`.

    The time limit restarts at `last_answer()`, a value of time.monotonic. After a timeout the
    thread that runs `function` is abandoned.
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
) -> dict[int, bytes]:
    """Write `publish` to the store, then return the value of `keys[rank]` for every rank.

    Raise RankLost with the ranks that have not written their value by `deadline`, a value of
    time.monotonic, or that are known to have ended (`find_ended`).
    """
    start_time = time.monotonic()
    values: dict[int, bytes] = {}
    ended: list[int] = []

    def query() -> None:
        for key, text in (publish or {}).items():
            store.set(key, text)
        for rank, key in keys.items():
            ended.extend(_wait_for(store, rank, keys, deadline, find_ended))
            if ended:
                return
            if store.check([key]):
                values[rank] = store.get(key)

    # A store may be silent for a while: other threads of this process use the same connection.
    query_store(max(0.0, deadline - start_time) + STORE_SECONDS, query)
    missing = ended or [rank for rank in keys if rank not in values]
    if missing:
        seconds = time.monotonic() - start_time
        event = "ended before joining" if ended else "did not join"
        raise RankLost(
            missing,
            f"{format_ranks(missing)} {event} the group within {seconds:.3g} s; "
            "check that every rank makes its first call on the group",
        )
    return values


def _wait_for(
    store: Store,
    rank: int,
    keys: Mapping[int, str],
    deadline: float,
    find_ended: Callable[[], Sequence[int]],
) -> list[int]:
    """Wait until the rank has written its key, ranks end before writing, or the deadline passes.

    Return the ranks that ended.
    """
    pause = MIN_PAUSE_SECONDS
    next_check = time.monotonic() + CHECK_SECONDS
    while not store.check([keys[rank]]) and time.monotonic() <= deadline:
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

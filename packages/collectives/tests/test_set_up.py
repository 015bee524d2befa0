"""A group whose set-up fails releases its resources, and the next group can use the same store."""

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import collectives
import pytest
import torch.distributed as dist
from collectives.choice.topology import Topology
from collectives.shared_memory import engine
from collectives.shared_memory.arena import ARENA_BYTES, Arena
from collectives.shared_memory.segment import HEADER_BYTES
from collectives.store import create_fresh_store

WORLD = 3
HAS_ENGINE = not engine.explain_refusal()
#: A number that no process can have.
MISSING_PROCESS = 1 << 22
STORES = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path), 1),
    "tcp": lambda path: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


def join(store, ranks, world, seconds):
    """Let these ranks join a group; return the part of the store or the error of each of them."""

    def join_rank(rank):
        try:
            return create_fresh_store(store, rank, world, time.monotonic() + seconds)
        except collectives.RankLost as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(join_rank, ranks))


def list_stores_and_earlier_ranks():
    """Return the cases of each store; the usual tests join every set of ranks on one store."""
    earlier_ranks = (0,), (1,), (0, 1), (1, 2), (0, 1, 2)
    return [
        pytest.param(kind, earlier, marks=[] if is_usual else [pytest.mark.exhaustive])
        for kind in STORES
        for earlier in earlier_ranks
        for is_usual in [kind == "hash" or earlier == (0,)]
    ]


@pytest.mark.parametrize(("kind", "earlier"), list_stores_and_earlier_ranks(), ids=str)
def test_ranks_share_a_prefix_whatever_earlier_groups_have_stored(kind, earlier, tmp_path):
    store = STORES[kind](tmp_path / "store")
    outcomes = join(store, earlier, WORLD, 0.1)
    if len(earlier) < WORLD:
        missing = set(range(WORLD)) - set(earlier)
        # Without rank 0, the other ranks cannot know who has joined.
        expected = {tuple(sorted(missing))} if 0 in earlier else {(0,)}
        assert {error.ranks for error in outcomes} == expected
    for world in (WORLD, WORLD - 1, WORLD + 1, WORLD):
        fresh = join(store, range(world), world, 10)
        assert sorted(part.add("number", 1) for part in fresh) == list(range(1, world + 1))


def open_descriptors():
    return set(Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")
def test_failed_set_up_closes_its_segment():
    before = open_descriptors()
    with pytest.raises(collectives.RankLost, match="rank 1 did not write to the group's store"):
        Topology(
            dist.HashStore(),
            0,
            2,
            timeout=1.0,
            deadline=time.monotonic() + 0.05,
            find_ended=lambda: (),
        )
    assert open_descriptors() == before


def test_arena_whose_peer_has_ended_names_it_in_the_first_call():
    mappings = [mmap.mmap(-1, HEADER_BYTES + ARENA_BYTES) for _ in range(3)]
    processes = [os.getpid(), os.getppid(), MISSING_PROCESS]
    arena = Arena(mappings, processes, 0, group_ranks=range(3), timeout=60.0, has_engine=False)
    with pytest.raises(collectives.RankLost, match=r"rank 2 \(process \d+\) died"):
        arena.sync()


@pytest.mark.parametrize("has_engine", [HAS_ENGINE, False])
def test_rank_that_fails_does_not_fail_slower_ranks_at_ticks_that_it_has_completed(has_engine):
    ranks = (4, 5, 6)
    mappings = [mmap.mmap(-1, HEADER_BYTES + ARENA_BYTES) for _ in ranks]
    fast, leaving, slow = (
        Arena(
            mappings,
            [os.getpid()] * 3,
            i,
            group_ranks=ranks,
            timeout=20.0,
            has_engine=has_engine,
        )
        for i in range(3)
    )
    with ThreadPoolExecutor() as pool:
        # The tick of the slow rank is visible, but that rank has not completed its wait yet.
        slow._clocks[2][0] = 1
        for future in [pool.submit(arena.sync) for arena in (fast, leaving)]:
            future.result()
        leaving.announce_end()
        with pytest.raises(collectives.RankLost, match=r"rank 5 .* left the group"):
            fast.sync()
        assert fast.tick == 2
    slow._clocks[2][0] = 0
    slow.sync()
    with pytest.raises(collectives.RankLost, match="rank 5") as caught:
        slow.sync()
    assert caught.value.ranks == (5,)


@pytest.mark.parametrize("has_engine", [HAS_ENGINE, False])
def test_rank_that_leaves_during_a_check_of_the_peers_is_not_blamed(has_engine):
    # At the timeout, all survivors leave at about the same time, and each of them lowers its clock.
    # A lower clock alone must not count as a call that was not made.
    ranks = (4, 5, 6)
    mappings = [mmap.mmap(-1, HEADER_BYTES + ARENA_BYTES) for _ in ranks]
    waiting, leaving = (
        Arena(mappings, [os.getpid()] * 3, i, group_ranks=ranks, timeout=0.0, has_engine=has_engine)
        for i in range(2)
    )
    leaving._clocks[1][0] = 1

    class LateProcess:
        def has_ended(self):
            leaving.leave([3, 6])
            return False

    waiting._processes[2] = LateProcess()
    # Several ranks may be lost at once; this group also has ranks on another host.
    with pytest.raises(collectives.RankLost, match="5 reported the loss of ranks 3, 6") as caught:
        waiting.sync()
    assert caught.value.ranks == (3, 6)


def test_threads_that_leave_together_do_not_mix_their_ranks():
    mappings = [mmap.mmap(-1, HEADER_BYTES + ARENA_BYTES) for _ in range(3)]
    leaving, other = (
        Arena(mappings, [os.getpid()] * 3, i, group_ranks=range(3), timeout=1.0, has_engine=False)
        for i in range(2)
    )
    memory = leaving._blamed[0]
    second = threading.Thread(target=leaving.leave, args=[[0]])

    class SlowMemory:
        def __setitem__(self, index, value):
            memory[index] = value
            if value == 2:
                second.start()
                second.join(0.1)

    leaving._blamed[0] = SlowMemory()
    leaving.leave([1, 2])
    second.join()
    assert other._read_blamed_ranks(0) == [1, 2]

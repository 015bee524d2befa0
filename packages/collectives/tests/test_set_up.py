"""A group whose set-up fails releases its resources, and the next group can use the same store."""

import mmap
import os
import time
from pathlib import Path

import collectives
import pytest
import torch.distributed as dist
from collectives.choice.topology import Topology
from collectives.shared_memory.arena import ARENA_BYTES, Arena
from collectives.shared_memory.segment import HEADER_BYTES
from collectives.store import fresh_store

WORLD = 3
#: A number that no process can have.
MISSING_PROCESS = 1 << 22
STORES = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path), 1),
    "tcp": lambda path: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


def fail_to_set_up(store, num_ranks):
    """Let some ranks join a group at the same time, and fail in the order in which they joined."""
    contexts = [fresh_store(store, WORLD, time.monotonic() + 1) for _ in range(num_ranks)]
    for context in contexts:
        context.__enter__()
    error = collectives.RankLost([2], "rank 2 did not join")
    for context in contexts:
        assert not context.__exit__(type(error), error, None)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", STORES)
def test_ranks_share_a_prefix_after_a_partly_failed_set_up(kind, num_ranks, tmp_path):
    store = STORES[kind](tmp_path / "store")
    for group in range(2):
        fail_to_set_up(store, num_ranks)
        for rank in range(WORLD):
            with fresh_store(store, WORLD, time.monotonic() + 1) as fresh:
                assert fresh.add("joined", 1) == rank + 1, group


def test_store_that_does_not_answer_is_not_queried_again(monkeypatch):
    context = fresh_store(dist.HashStore(), WORLD, time.monotonic() + 1)
    context.__enter__()
    monkeypatch.setattr(collectives.store, "query_store", None)
    error = collectives.RankLost([], "the group's store does not answer")
    assert not context.__exit__(type(error), error, None)


def open_descriptors():
    return set(Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")
def test_failed_set_up_closes_its_segment():
    before = open_descriptors()
    with pytest.raises(collectives.RankLost, match="rank 1 did not join"):
        Topology(
            dist.HashStore(),
            0,
            2,
            timeout=1.0,
            deadline=time.monotonic() + 0.05,
            find_ended=lambda: (),
        )
    assert open_descriptors() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")
def test_arena_without_a_peer_closes_the_handles_of_the_others():
    mappings = [mmap.mmap(-1, HEADER_BYTES + ARENA_BYTES) for _ in range(3)]
    before = open_descriptors()
    with pytest.raises(collectives.RankLost, match="rank 2"):
        Arena(
            mappings, [os.getpid(), os.getppid(), MISSING_PROCESS], 0, names=range(3), timeout=1.0
        )
    assert open_descriptors() == before

"""Shared memory: tensors in place, mixtures of shared and private tensors, and cleanup."""

import ctypes
import dataclasses
import gc
import itertools
import mmap
import os
import resource
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.algorithms import dispatch
from collectives.choice.cost import list_candidates
from collectives.choice.topology import group_by_host
from collectives.groups import get_communicator
from collectives.shared_memory import arena, segment
from collectives.shared_memory.arena import ARENA_BYTES, CHUNK_BYTES, ONE_SHOT_BYTES
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks


def reduce_in_place():
    rank, world = dist.get_rank(), dist.get_world_size()
    for numel in (1, 1000, ONE_SHOT_BYTES // 4 + 1, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            tensor = collectives.shared_empty(numel, dtype=dtype)
            assert not tensor.any()
            everyone = torch.randint(
                -3, 4, (world, numel), generator=torch.Generator().manual_seed(numel)
            )
            want = everyone.sum(0).to(dtype)
            for view in (slice(None), slice(numel // 3, None)):
                tensor.copy_(everyone[rank])
                collectives.all_reduce(tensor[view])
                assert torch.equal(tensor[view], want[view])
                untouched = everyone[rank].to(dtype)[: view.start or 0]
                assert torch.equal(tensor[: view.start or 0], untouched)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shared_tensors_and_their_views_are_reduced(world):
    assert run_on_shared_ranks(reduce_in_place, world) == [None] * world


def reduce_mixture():
    """Reduce a tensor that is shared on one rank only, and different parts of an allocation."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = 200_000
    shared = collectives.shared_empty(2 * numel)
    private = torch.empty(numel)
    for owner in range(world):
        tensor = shared[:numel] if rank == owner else private
        tensor.fill_(rank + 1)
        collectives.all_reduce(tensor)
        assert (tensor == world * (world + 1) / 2).all()
    tensor = shared[numel:] if rank == 0 else shared[:numel]
    tensor.fill_(rank + 1)
    collectives.all_reduce(tensor)
    assert (tensor == world * (world + 1) / 2).all()


def test_ranks_can_differ_in_sharing_a_tensor():
    assert run_on_shared_ranks(reduce_mixture, 3) == [None] * 3


def release_tensors():
    comm = get_communicator()
    tensor = collectives.shared_empty(100)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert comm.topology.find_shared_copies(view) is not None
    del view
    gc.collect()
    return len(comm.topology._shared)


def test_shared_memory_is_freed_with_its_last_view():
    assert run_on_shared_ranks(release_tensors, 2) == [0, 0]


def compute_during_reduction():
    """Compute while a long reduction runs, which finishes without the caller."""
    tensor = collectives.shared_empty(8 << 20)
    work = collectives.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)
    assert work.is_completed()
    work.wait()


def test_asynchronous_operations_progress_while_the_caller_computes():
    assert run_on_shared_ranks(compute_during_reduction, 2) == [None, None]


def measure_peak_bytes(call):
    """Return the peak bytes that torch's allocator had allocated while `call` ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def measure_extra_memory():
    """Return the extra bytes of each algorithm on tensors of 4 and of 16 MiB."""
    extra_bytes = {}
    for mib in (4, 16):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.zeros((mib << 20) // dtype.itemsize, dtype=dtype)
            shared = collectives.shared_empty(tensor.numel(), dtype=dtype)
            calls = {
                name: partial(collectives.all_reduce, tensor, algorithm=name)
                for name in list_candidates("all_reduce", (dist.get_world_size(),))
            }
            calls["in place"] = partial(collectives.all_reduce, shared)
            for name, call in calls.items():
                call()
                extra_bytes[name, str(dtype), mib] = measure_peak_bytes(call)
    return extra_bytes


def test_extra_memory_is_at_most_2_mib_for_any_size():
    assert measure_peak_bytes(lambda: torch.empty(3 << 20, dtype=torch.uint8)) == 3 << 20
    # The arena is created once per group, and is at most a page larger than its chunk.
    assert ARENA_BYTES - CHUNK_BYTES <= 4096
    for extra_bytes in run_on_shared_ranks(measure_extra_memory, 2):
        for (name, dtype, mib), extra in extra_bytes.items():
            # In addition to the arena; a tensor four times as large needs the same.
            assert extra <= 2 << 20, extra_bytes
            assert extra == extra_bytes[name, dtype, 4], (mib, extra_bytes)


def refuse_room():
    """Limit the file size of a rank, so that the system refuses to create a segment."""
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ARENA_BYTES // 2, resource.RLIM_INFINITY))
    # Default prices, so that "auto" does not measure for seconds.
    dispatch.tune = lambda *_, **options: collectives.CostModel()
    tensor = torch.ones(1000)
    collectives.all_reduce(tensor)
    shared = collectives.shared_empty(1000)
    shared.fill_(1)
    collectives.all_reduce(shared)
    return get_communicator().topology.hosts, tensor.sum().item(), shared.sum().item()


def test_host_without_room_for_memory_uses_messages():
    assert run_ranks(refuse_room, 2) == [([[0], [1]], 2000.0, 2000.0)] * 2


def use_tiny_dev_shm():
    clone_new_mounts = 0x20000
    if ctypes.CDLL(None).unshare(clone_new_mounts) != 0:
        return "may not unshare"
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)
    tensor = collectives.shared_empty(1 << 20)
    tensor.fill_(1)
    collectives.all_reduce(tensor)
    return get_communicator().topology.hosts, tensor.sum().item()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_size_of_dev_shm_does_not_matter():
    assert run_ranks(use_tiny_dev_shm, 2) == [([[0, 1]], 2.0 * (1 << 20))] * 2


def crash(folder, has_memfd):
    """Record the paths of the files that this rank maps in memory, and die."""
    if not has_memfd:
        del os.memfd_create
    tensor = collectives.shared_empty(1000)
    collectives.all_reduce(tensor)
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line[line.index("/") :] for line in lines if "/dev/shm/" in line or "/memfd:" in line}
    (folder / str(dist.get_rank())).write_text("\n".join(sorted(paths)))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("has_memfd", [True, False])
def test_dev_shm_is_empty_after_a_crash(has_memfd, tmp_path):
    outcomes = try_ranks(crash, 2, tmp_path, has_memfd)
    assert all(outcome.exit_code == -signal.SIGKILL for outcome in outcomes)
    for rank in range(2):
        paths = (tmp_path / str(rank)).read_text().splitlines()
        assert any(("/memfd:" in path) == has_memfd for path in paths)
        assert not [path for path in paths if Path(path.removesuffix(" (deleted)")).exists()]


def open_wrong_addresses():
    """Check that an address is accepted only if it refers to the same memory."""
    created = segment.Segment(4096)
    address = created.address
    assert segment.open_segment(address) is not None
    for change in (
        {"host": "another kernel"},
        {"inode": address.inode + 1},
        {"token": "00" * segment.TOKEN_BYTES},
        {"pid": 1 << 22},
    ):
        assert segment.open_segment(dataclasses.replace(address, **change)) is None
    created.seal()
    assert segment.open_segment(address) is None


def test_sharing_memory_is_proved_by_opening_it():
    run_ranks(open_wrong_addresses, 1)


class Clock:
    """A replacement of the module `time` in which only sleeping takes time."""

    def __init__(self, on_sleep):
        self.now = 0.0
        self.on_sleep = on_sleep

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep(self.now)


def test_late_rank_gives_a_lost_rank_no_more_time(monkeypatch):
    """Without the engine, wait for rank 1, which is late, and then for rank 2, which is lost."""
    mappings = [mmap.mmap(-1, segment.HEADER_BYTES + ARENA_BYTES) for _ in range(3)]
    pids = [os.getpid()] * 3
    ours = arena.Arena(mappings, pids, 0, group_ranks=[0, 1, 2], timeout=1.0, has_engine=False)

    def tick_late(now):
        ours._clocks[1][0] = int(now > 0.9)

    clock = Clock(tick_late)
    monkeypatch.setattr(arena, "time", clock)
    with pytest.raises(collectives.RankLost) as caught:
        ours.sync()
    assert caught.value.ranks == (2,)
    assert clock.now < 1.1


def test_hosts_are_the_ranks_that_reach_each_other():
    assert group_by_host([[0, 1], [0, 1], [2, 3], [2, 3]]) == [[0, 1], [2, 3]]
    assert group_by_host([[0, 2], [1, 3], [0, 2], [1, 3]]) == [[0, 2], [1, 3]]
    # Both ranks must reach each other.
    assert group_by_host([[0, 1], [1]]) == [[0], [1]]
    assert group_by_host([[0], [0, 1]]) == [[0], [1]]
    assert group_by_host([[], [1]]) == [[0], [1]]

"""System calls that a kernel, a platform or a build of Python lacks are replaced."""

import errno
import importlib
import os
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.shared_memory import engine, process, segment
from worker_pool import run_ranks, try_ranks

SOURCES = Path(collectives.__file__).parent
MODULES = ("os", "mmap", "fcntl", "ctypes", "socket")
# Python's documentation lists these on every platform, or on Linux, where memory is shared.
PORTABLE = {
    "os.path", "os.environ", "os.getpid", "os.close", "os.open", "os.stat", "os.fstat", "os.dup",
    "os.access", "os.listdir", "os.readlink", "os.O_RDWR", "os.W_OK", "os.posix_fallocate",
    "mmap.mmap", "mmap.PAGESIZE", "mmap.MAP_SHARED", "mmap.MAP_POPULATE",
}  # fmt: skip


def list_calls():
    """Return the calls of these modules that the package makes and that may be missing."""
    names_found = set()
    for path in SOURCES.rglob("*.py"):
        if "bench" not in path.parts:
            names = re.findall(rf"\b(?:{'|'.join(MODULES)})\.\w+", path.read_text())
            names_found.update(name for name in names if not name.startswith("ctypes.c_"))
    names_found -= {
        "ctypes.Structure",
        "ctypes.POINTER",
        "ctypes.Array",
        "ctypes.PyDLL",
        "ctypes.CDLL",
    }
    return sorted(names_found - PORTABLE)


@contextmanager
def remove_calls(names, how):
    """Make calls fail as on a system that lacks them."""

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSYS, "Function not implemented")

    originals = {}
    for call in names:
        module_name, name = call.split(".")
        module = importlib.import_module(module_name)
        originals[module, name] = getattr(module, name)
        if how == "missing":
            delattr(module, name)
        elif callable(getattr(module, name)):
            setattr(module, name, refuse)
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def use_every_feature():
    """Set up a group and use the features that need these calls; return the group."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    total = torch.full((100_000,), rank + 1.0)
    collectives.all_reduce(total, group=group)
    assert total.unique().tolist() == [3.0]
    shared = collectives.shared_empty(50_000, group=group)
    shared.fill_(rank + 1.0)
    work = collectives.all_reduce(shared, group=group, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    assert shared.unique().tolist() == [3.0]
    assert collectives.describe(group).shared_memory
    return group


def without_one_call_at_a_time(how):
    for call in list_calls():
        with remove_calls([call], how):
            group = use_every_feature()
        dist.destroy_process_group(group)


def lose_a_rank(how):
    """Lose rank 1 without these calls and a compiler; return whether it is noticed in time."""
    engine._load_engine.cache_clear()
    engine.shutil.which = lambda name: None
    with remove_calls(list_calls(), how):
        group = use_every_feature()
        if dist.get_rank() == 1:
            os._exit(0)
        start_time = time.monotonic()
        with pytest.raises(collectives.RankLost, match="rank 1"):
            collectives.all_reduce(torch.ones(3), group=group)
    return time.monotonic() - start_time < 15


@pytest.mark.parametrize("how", ["missing", "not implemented"])
def test_missing_system_call_is_replaced(how):
    run_ranks(without_one_call_at_a_time, 2, how)


@pytest.mark.parametrize("how", ["missing", "not implemented"])
def test_all_system_calls_and_the_compiler_can_be_missing(how):
    first, _ = try_ranks(lose_a_rank, 2, how)
    assert first.value is True, first


def test_scan_finds_system_calls():
    assert {"os.memfd_create", "os.sched_yield"} <= {*list_calls()}


def without_dev_shm():
    """Use a group without memfd_create and /dev/shm, so that memory cannot be shared."""

    def refuse(*args, **kwargs):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/shm")

    segment.tempfile.TemporaryFile = refuse
    with remove_calls(["os.memfd_create"], "missing"):
        group = dist.new_group([0, 1])
        total = torch.full((1000,), dist.get_rank() + 1.0)
        collectives.all_reduce(total, group=group, algorithm="ring")
        alone = torch.full((1000,), 3.0, dtype=torch.bfloat16)
        if dist.get_rank() == 0:
            collectives.all_reduce(alone, group=dist.new_group([0], use_local_synchronization=True))
        shares_memory = collectives.describe(group).shared_memory
        return total.unique().tolist(), alone.unique().tolist(), shares_memory


def test_messages_are_used_without_shared_memory():
    assert run_ranks(without_dev_shm, 2) == [([3.0], [3.0], False)] * 2


def test_end_of_a_process_is_detected_before_its_parent_waits_for_it():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    peer = process.PeerProcess(pid)
    assert not peer.has_ended()
    os.kill(pid, 9)
    deadline = time.monotonic() + 10
    while not peer.has_ended():
        assert time.monotonic() < deadline
    os.waitpid(pid, 0)
    assert peer.has_ended()
    assert process.PeerProcess(pid).has_ended()


def test_process_that_reuses_an_id_is_another_process():
    peer = process.PeerProcess(os.getpid())
    assert not peer.has_ended()
    peer._start_time = "0"
    assert peer.has_ended()

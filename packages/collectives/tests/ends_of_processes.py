"""Ranks whose processes end while threads of the package are inside torch.

`test_leaving` calls `end_processes` in a process of the worker pool, which has imported torch. That
process forks every rank, because a process of the pool ends without finalizing its interpreter.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import collectives
import collectives.backend
import torch
import torch.distributed as dist
from collectives.groups import get_communicator
from collectives.shared_memory import segment
from collectives.store import run_within

WORLD = 2
SECONDS = 40
CALLS_BEFORE_THE_END = 10


def wait_until(condition: Callable[[], object]) -> None:
    """Return when the condition is true."""
    while not condition():
        time.sleep(0.001)


def run_scenario(name: str, rank: int) -> object:
    """Make the calls of a scenario; return objects that must exist when the process ends."""
    total = torch.ones(1000)
    dist.all_reduce(total)
    if name == "group is destroyed":
        dist.destroy_process_group()
    if name == "calls are queued":
        return [dist.all_reduce(total, async_op=True) for _ in range(5)]
    if name == "other rank makes no call" and rank == 0:
        return dist.all_reduce(total, async_op=True)
    if name == "callback runs":
        future = dist.all_reduce(total, async_op=True).get_future()
        return future.then(lambda _: time.sleep(0.1))
    if name == "other rank has ended" and rank == 0:
        wait_until(get_communicator().point_to_point.find_disconnected_peers)
        return dist.all_reduce(total, async_op=True)
    if name == "exception is raised":
        work = dist.all_reduce(total, async_op=True)
        raise RuntimeError(work)
    if name == "daemon thread makes calls":
        threading.Thread(target=make_calls, args=(total,), daemon=True).start()
        wait_until(lambda: get_communicator().operation.number >= CALLS_BEFORE_THE_END)
    if name == "daemon thread waits" and rank == 0:
        threading.Thread(target=dist.all_reduce, args=(total,), daemon=True).start()
        wait_until(lambda: get_communicator().operation.number == 2)
    if name == "store answers late":
        with suppress(TimeoutError):
            run_within(0.01, query_repeatedly)
    return None


def query_repeatedly() -> None:
    """Return from the store again and again, so that one of the returns is at the end."""
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        store.check(["missing"])


def make_calls(tensor: torch.Tensor) -> None:
    """Make calls until the process ends, or until the other rank has ended."""
    with suppress(collectives.RankLost):
        while True:
            dist.all_reduce(tensor)


def end_rank(folder: str, name: str, rank: int, where: str) -> object:
    """Run a scenario on this rank, whose process ends afterwards."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if where == "apart":
        segment.get_host_identity = lambda: f"host {rank}"
        # Default prices, so that "auto" does not measure for seconds.
        collectives.algorithms.dispatch.tune = lambda *_, **__: collectives.CostModel()
    store = dist.FileStore(f"{folder}/{where} {name}", WORLD)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=WORLD, timeout=limit)
    return run_scenario(name, rank)


def end_processes(folder: str, where: str, scenarios: Sequence[str]) -> dict[str, int]:
    """Run the scenarios, on one host or on two (`together` or `apart`); return all exit codes."""
    children = {}
    for name in scenarios:
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                end_process(folder, where, name, rank)
            children[pid] = f"{where}, {name}, rank {rank}"
    return {
        name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, name in children.items()
    }


def end_process(folder: str, where: str, name: str, rank: int) -> NoReturn:
    """Run a scenario and finalize the interpreter, as at the end of a program."""
    # Modules refer to global objects until the interpreter has ended.
    global pending_work
    exit_code = 0
    try:
        pending_work = end_rank(folder, name, rank, where)
    except RuntimeError as error:
        sys.last_value = error
        exit_code = 1
    # `sys.exit` would be caught by the functions that have started this process.
    ctypes.pythonapi.Py_Exit(exit_code)
    raise AssertionError("the process has not ended")

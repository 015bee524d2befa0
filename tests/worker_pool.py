"""Run a function on several ranks, one process per rank.

Processes are forked from a server that has imported torch already, so a rank starts in milliseconds
instead of the seconds of an import. Every call gets new processes, so a test may kill one. Ranks
rendezvous through a file, so no port is chosen. The function is loaded from its file by its name,
because a test module cannot be imported by name.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that the server imports before it forks ranks, unless they are not installed. The first
# optimizer of a process imports torch._dynamo, which takes longer than torch.
PRELOADED = [
    "numpy",
    "scipy.optimize",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "collectives",
    "ddp",
    "paramserver",
    "zero",
]

#: The pipe of a process yields its exit code once. `Process.start` also reads the exit codes of all
#: other processes, so two threads that start and end processes can lose one: it becomes 255.
_EXIT_CODES = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """The result of one rank: a value, or the exception or exit code that ended it."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.exit_code is not None


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish in time."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 180.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(*args)` on `world` ranks of a process group and return their values by rank.

    `function` must be defined at the top level of its file. Raises `RankFailed` with the traceback
    of every rank that failed.
    """
    outcomes = try_ranks(function, world, *args, timeout=timeout, backend=backend)
    failures = [outcome for outcome in outcomes if outcome.failed]
    if failures:
        report = (f"rank {o.rank}: {o.trace or f'exit code {o.exit_code}'}" for o in failures)
        raise RankFailed("\n".join(report)) from failures[0].error
    return [outcome.value for outcome in outcomes]


def try_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 180.0,
    backend: str = "gloo",
) -> list[Outcome]:
    """Call `function(*args)` on `world` ranks and return the outcome of each, failures included.

    A rank that still runs after `timeout` seconds is killed. An empty `backend` starts the ranks
    without a process group; they can create one from RANK, WORLD_SIZE and STORE_FILE in the
    environment.
    """
    path = sys.modules[function.__module__].__file__
    call = pickle.dumps(args)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"WORLD_SIZE": str(world), "STORE_FILE": f"{folder}/store"}
        ranks: list[tuple[ForkServerProcess, Connection]] = []
        for rank in range(world):
            ours, theirs = _context().Pipe()
            process = _context().Process(
                target=_serve,
                args=(theirs, path, function.__qualname__, call),
                kwargs={
                    "environment": environment | {"RANK": str(rank)},
                    "backend": backend,
                    "timeout": timeout,
                },
                daemon=True,
            )
            with _EXIT_CODES:
                process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + timeout
        return [_collect(rank, *ranks[rank], deadline) for rank in range(world)]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _collect(rank: int, process: ForkServerProcess, pipe: Connection, deadline: float) -> Outcome:
    outcome = None
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            outcome = pickle.loads(pipe.recv_bytes())
            wait([process.sentinel], 5)
    except (EOFError, ConnectionResetError):
        wait([process.sentinel], 5)
    with _EXIT_CODES:
        if process.is_alive():
            process.kill()
            process.join()
        exit_code = process.exitcode
        process.close()
    pipe.close()
    return outcome or Outcome(rank, exit_code=exit_code)


def _serve(
    pipe: Connection,
    path: str,
    name: str,
    call: bytes,
    *,
    environment: dict[str, str],
    backend: str,
    timeout: float,
) -> None:
    import torch
    import torch.distributed as dist

    # Imported modules live until the end. Without freezing them, each garbage collection scans them
    # all, which takes 0.2 s and copies every page that this rank shares with the fork server.
    gc.freeze()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        if backend:
            limit = timedelta(seconds=timeout)
            store = dist.FileStore(environment["STORE_FILE"], world)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=limit
            )
            # A rank that ends early closes connections that other ranks may still be opening.
            store.set(f"connected {rank}", "yes")
            store.wait([f"connected {other}" for other in range(world)], limit)
        function: Any = _load(path)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = Outcome(rank, value=function(*pickle.loads(call)))
        message = pickle.dumps(outcome)
    except BaseException as error:
        message = _failure(rank, error)
        outcome = pickle.loads(message)
    pipe.send_bytes(message)
    if dist.is_initialized() and not outcome.failed:
        dist.destroy_process_group()
    # End without clean-up: a failed rank must not wait in a collective that its peers never join.
    os._exit(0)


def _failure(rank: int, error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        message = pickle.dumps(Outcome(rank, error=error, trace=trace))
        pickle.loads(message)
    except Exception:
        # An exception that cannot be pickled is sent as its text.
        text = RuntimeError(f"{type(error).__name__}: {error}")
        message = pickle.dumps(Outcome(rank, error=text, trace=trace))
    return message


@cache
def _load(path: str) -> ModuleType:
    name = "ranks_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

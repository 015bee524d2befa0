"""Run a function on several ranks, one process per rank.

Processes are forked from a server that has imported torch already, so a rank starts in milliseconds
instead of the seconds of an import. `run_ranks` and `try_ranks` start new processes for each call,
so a test may kill one. `run_on_shared_ranks` reuses the processes of an earlier call of the same
test file, which have imported that file and everything that its first cases needed.

Ranks rendezvous through a file, so no port is chosen. The function is loaded from its file by its
name, because a test module cannot be imported by name. If that file defines `prepare_rank`, each
rank calls it before the function.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that the server imports before it forks ranks, unless they are not installed. The first
# optimizer of a process imports torch._dynamo, which takes longer than torch. The first function
# that is compiled imports the backends.
PRELOADED = [
    "numpy",
    "scipy.optimize",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "collectives",
    "ddp",
    "paramserver",
    "zero",
    "llmsys_suite.variants",
]

#: The pipe of a process yields its exit code once. `Process.start` also reads the exit codes of all
#: other processes, so two threads that start and end processes can lose one: it becomes 255.
_EXIT_CODES = threading.Lock()

#: The ranks of `run_on_shared_ranks`, by the file of the function.
_shared_ranks: dict[str, list[_Rank]] = {}


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
    return _get_values(try_ranks(function, world, *args, timeout=timeout, backend=backend))


def run_on_shared_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 300.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(*args)` on `world` ranks as `run_ranks` does, without starting them each time.

    Calls with functions of one file share the ranks: a call uses the first `world` of them, and
    starts those that are missing. Each call has a new process group, a new store file and the seed
    of a new process; other changes of a rank's state remain. If a call fails, the next one starts
    new ranks. `close_shared_ranks` ends the ranks.
    """
    file = _get_file(function)
    ranks = _shared_ranks.pop(file, [])
    ranks += [_Rank() for _ in range(world - len(ranks))]
    used = ranks[:world]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _call(used, function, args, folder, timeout, backend, is_last=False)
        if any(outcome.failed for outcome in outcomes) or not all(r.is_ready() for r in used):
            _close(ranks)
        else:
            _shared_ranks[file] = ranks
    return _get_values(outcomes)


def close_shared_ranks() -> None:
    """End the processes of all calls of `run_on_shared_ranks`."""
    while _shared_ranks:
        _close(_shared_ranks.popitem()[1])


def case_folder() -> str:
    """Return a folder for the files of this call, which is equal on all ranks and ends with it."""
    folder = f"{os.environ['STORE_FILE']}-folder"
    Path(folder).mkdir(exist_ok=True)
    return folder


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
    ranks = [_Rank() for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _call(ranks, function, args, folder, timeout, backend, is_last=True)
        # Ranks that leave their group use the store, which is in the folder.
        _close(ranks)
    return outcomes


def _get_values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of all ranks, or raise `RankFailed`."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    if failures:
        report = (f"rank {o.rank}: {o.trace or f'exit code {o.exit_code}'}" for o in failures)
        raise RankFailed("\n".join(report)) from failures[0].error
    return [outcome.value for outcome in outcomes]


@cache
def _create_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass(frozen=True)
class _Call:
    """A call of a function on one rank."""

    rank: int
    world: int
    folder: str
    #: The file that defines the function.
    path: str
    name: str
    #: The pickled arguments. They can be unpickled after the file has been loaded.
    args: bytes
    timeout: float
    backend: str
    is_last: bool

    @property
    def stack_file(self) -> Path:
        return Path(self.folder, f"stacks of rank {self.rank}")


class _Rank:
    """The process of a rank, and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = _create_context().Pipe()
        self._process = _create_context().Process(target=_serve, args=(theirs,), daemon=True)
        with _EXIT_CODES:
            self._process.start()
        theirs.close()

    def send(self, call: _Call) -> None:
        # The outcome of a process that has ended is its exit code.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(pickle.dumps(call))

    def collect(self, call: _Call, deadline: float) -> Outcome:
        """Return the outcome of a call; kill a process that has none at the deadline."""
        trace = ""
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                outcome: Outcome = pickle.loads(self._pipe.recv_bytes())
                return outcome
            trace = f"still running after {call.timeout} s\n{self._stacks(call)}"
        except (EOFError, ConnectionResetError):
            wait([self._process.sentinel], 5)
        return Outcome(call.rank, trace=trace, exit_code=self._end())

    def is_ready(self) -> bool:
        """Return True if the process has left the group of its last call."""
        with suppress(EOFError, ConnectionResetError):
            return self._pipe.poll(30) and self._pipe.recv_bytes() == b"ready"
        return False

    def close(self) -> None:
        """End the process. A process that ends by itself has a few seconds."""
        self._pipe.close()
        with suppress(ValueError):  # It has been closed.
            wait([self._process.sentinel], 5)
            self._end()

    def _end(self) -> int | None:
        with _EXIT_CODES:
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            exit_code = self._process.exitcode
            self._process.close()
        return exit_code

    def _stacks(self, call: _Call) -> str:
        """Return the stacks of the process's threads."""
        text = ""
        if call.stack_file.exists() and self._process.pid:
            os.kill(self._process.pid, signal.SIGUSR2)
            # A process that another one has stopped does not write.
            for _ in range(10):
                time.sleep(0.1)
                earlier, text = text, call.stack_file.read_text()
                if text and text == earlier:
                    break
        return text


def _get_file(function: Callable[..., Any]) -> str:
    path = sys.modules[function.__module__].__file__
    assert path is not None
    return path


def _call(
    ranks: list[_Rank],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
    backend: str,
    is_last: bool,
) -> list[Outcome]:
    """Call a function on ranks that wait for a call; return their outcomes."""
    path, name = _get_file(function), function.__qualname__
    common = folder, path, name, pickle.dumps(args), timeout, backend, is_last
    calls = [_Call(rank, len(ranks), *common) for rank in range(len(ranks))]
    for process, call in zip(ranks, calls, strict=True):
        process.send(call)
    deadline = time.monotonic() + timeout
    return [process.collect(call, deadline) for process, call in zip(ranks, calls, strict=True)]


def _close(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.close()


def _serve(pipe: Connection) -> None:
    """Run calls until one fails, one is the last one, or the test process closes the pipe."""
    import torch

    # Imported modules live until the end. Without freezing them, each garbage collection scans them
    # all, which takes 0.2 s and copies every page that this rank shares with the fork server.
    gc.freeze()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    random_state = torch.get_rng_state()
    with suppress(EOFError):
        while _run(pickle.loads(pipe.recv_bytes()), pipe):
            # The tensors of this call must not take part in the next one.
            gc.collect()
            torch.set_rng_state(random_state)
            pipe.send_bytes(b"ready")
    # End without clean-up: a failed rank must not wait in a collective that its peers never join.
    os._exit(0)


def _run(call: _Call, pipe: Connection) -> bool:
    """Run one call and send its outcome; return True if another call may follow."""
    import torch.distributed as dist

    store_file = f"{call.folder}/store"
    os.environ.update(RANK=str(call.rank), WORLD_SIZE=str(call.world), STORE_FILE=store_file)
    with call.stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)
        try:
            if call.backend:
                _connect(call, store_file)
            module = _load(call.path)
            if hasattr(module, "prepare_rank"):
                module.prepare_rank()
            function: Any = module
            for part in call.name.split("."):
                function = getattr(function, part)
            outcome = Outcome(call.rank, value=function(*pickle.loads(call.args)))
            message = pickle.dumps(outcome)
        except BaseException as error:
            message = _describe_failure(call.rank, error)
            outcome = pickle.loads(message)
        faulthandler.unregister(signal.SIGUSR2)
    pipe.send_bytes(message)
    if dist.is_initialized() and not outcome.failed:
        dist.destroy_process_group()
    return not outcome.failed and not call.is_last


def _connect(call: _Call, store_file: str) -> None:
    """Create the default process group."""
    import torch.distributed as dist

    limit = timedelta(seconds=call.timeout)
    store = dist.FileStore(store_file, call.world)
    dist.init_process_group(
        call.backend, store=store, rank=call.rank, world_size=call.world, timeout=limit
    )
    # A rank that ends early closes connections that other ranks may still be opening.
    store.set(f"connected {call.rank}", "yes")
    store.wait([f"connected {other}" for other in range(call.world)], limit)


def _describe_failure(rank: int, error: BaseException) -> bytes:
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

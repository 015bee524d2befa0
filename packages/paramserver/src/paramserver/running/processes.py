"""Processes of this machine, and how each of them ended.

Notable: each has a thread that waits for the end of who started it, however that comes, and ends
the process then: nothing is left behind that nobody could find.
"""

import math
import multiprocessing
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch.distributed as dist

from paramserver.protocol.messages import PeerLost
from paramserver.running.job import Outcome
from paramserver.running.progress import Progress

Tell = Callable[[Progress], object]


class Processes:
    """Those of a run, by name. If this one dies they end too, and remove `folder`.

    A worker that the first server has lost, and that has not ended `patience` s later, is killed.
    """

    def __init__(
        self, context: BaseContext, folder: str, patience: float, progress: Tell | None
    ) -> None:
        self.patience = patience
        self.running: dict[str, tuple[BaseProcess, Connection]] = {}
        """By name, a process and where its outcome will come from."""
        self._context, self._folder, self._progress = context, folder, progress
        self._calls: dict[str, tuple[Any, ...]] = {}
        self._all: list[BaseProcess] = []
        self._lost: dict[str, tuple[float, str]] = {}  # since when, and why
        self._killed: dict[str, str] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        for process, pipe in self.running.values():
            process.kill()
            pipe.close()
        for process in self._all:
            process.join()
            process.close()

    def start(self, name: str, target: Callable[..., Any], *args: Any) -> None:
        """Start a process that calls `target`; "server 0" tells progress by one more argument."""
        self._calls[name] = target, *args
        ours, theirs = self._context.Pipe(duplex=False)
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_process, args=(theirs, self._folder, name, target, args), name=name
        )
        process.start()
        theirs.close()
        self.running[name] = process, ours
        self._all.append(process)

    def start_again(self, name: str) -> None:
        """Start one that has ended once more."""
        for last in (self._lost, self._killed):
            last.pop(name, None)
        self.start(name, *self._calls[name])

    def kill(self, name: str, reason: str) -> None:
        """Kill one that runs; its outcome will be a PeerLost for this reason."""
        self._killed.setdefault(name, reason)
        self.running[name][0].kill()

    def ends(self, seconds: float | None) -> Iterator[Outcome]:
        """How processes have ended that do so in `seconds`; they run no more."""
        by_pipe = {pipe: name for name, (_, pipe) in self.running.items()}
        for pipe in wait(list(by_pipe), seconds):
            assert isinstance(pipe, Connection)
            name = by_pipe[pipe]
            try:
                said = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process = self.running[name][0]
                process.join()
                echo = PeerLost(self._killed[name]) if name in self._killed else None
                said = Outcome(name, error=echo, exit_code=process.exitcode)
            if isinstance(said, Outcome):
                del self.running[name]
                pipe.close()
                yield said
                continue
            lost = {f"worker {w}": (time.monotonic(), why) for w, why in said.lost.items()}
            self._lost = {name: self._lost.get(name, new) for name, new in lost.items()}
            if self._progress:
                self._progress(said)
        for name, (since, why) in self._lost.items():
            if name in self.running and time.monotonic() - since > self.patience:
                self.kill(name, why)


def _process(
    pipe: Connection, folder: str, name: str, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        if name == "server 0":
            args = (*args, lambda said: pipe.send_bytes(pickle.dumps(said)))
        message = pickle.dumps(Outcome(name, value=target(*args)))
    except SystemExit:
        raise  # its code tells how this process ended, not how the one that started it is to end
    except BaseException as error:
        error.add_note(f"raised in {name}:\n{traceback.format_exc()}")
        try:
            message = pickle.dumps(Outcome(name, error=error))
            pickle.loads(message)
        except Exception:
            text = RuntimeError(f"{name}: {type(error).__name__}: {error}")
            message = pickle.dumps(Outcome(name, error=text))
    pipe.send_bytes(message)
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def collect(processes: Processes, *, survives: bool) -> dict[str, Outcome]:
    """How each process ended. After a failure, those still there in `patience` s are killed.

    If the run `survives` a lost worker, that is no failure.
    """
    outcomes: dict[str, Outcome] = {}
    deadline = math.inf
    while processes.running:
        for outcome in processes.ends(min(1.0, max(0.0, deadline - time.monotonic()))):
            outcomes[outcome.name] = outcome
            if outcome.failed and not (survives and outcome.name.startswith("worker")):
                deadline = min(deadline, time.monotonic() + processes.patience)
        if time.monotonic() >= deadline:
            text = f"it had not ended {processes.patience:g} s after another's failure"
            for name in processes.running:
                processes.kill(name, f"{text}, and was killed")
    return outcomes

"""Processes of a run on this machine, and their outcomes.

A thread of each process waits until the parent process has ended, for any reason, and then ends the
process. Therefore no process outlives its run.
"""

import gc
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

from paramserver.protocol.messages import PeerLost
from paramserver.running.job import Outcome

#: A function that receives the reasons for losses after which training continued, keyed by worker.
ReportLosses = Callable[[dict[int, str]], object]


class Processes:
    """The processes of a run, by name.

    Args:
        context: the multiprocessing context that starts them.
        folder: folder that the processes remove if this process dies; None if there is none.
        grace_period: seconds after which a process that still runs is killed. The period starts
            when the first server reports it as lost, or when another process fails (see `collect`).
            A restarted worker is killed if it has not joined two such periods after its restart.
    """

    def __init__(self, context: BaseContext, folder: str | None, grace_period: float) -> None:
        self.grace_period = grace_period
        #: Each running process, and the pipe from which its outcome is received.
        self.running: dict[str, tuple[BaseProcess, Connection]] = {}
        self._context = context
        self._folder = folder
        #: Target and arguments of each process, for a restart.
        self._calls: dict[str, tuple[Any, ...]] = {}
        self._all: list[BaseProcess] = []
        #: Time and reason of each loss that the first server has reported, by process.
        self._lost: dict[str, tuple[float, str]] = {}
        #: Time of the restart of each worker that has not joined since. The first server may still
        #: report the loss of the process before the restart.
        self._restart_times: dict[str, float] = {}
        #: Reason for killing each process that was killed.
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
        """Start a process that calls `target`.

        In the process "server 0", `target` receives a further argument, a `ReportLosses` function.
        In the process of a worker, the further argument is a function without arguments, which
        `target` calls when the worker has joined.
        """
        self._calls[name] = target, *args
        receiver, sender = self._context.Pipe(duplex=False)
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_run_process, args=(sender, self._folder, name, target, args), name=name
        )
        process.start()
        sender.close()
        self.running[name] = process, receiver
        self._all.append(process)

    def restart(self, name: str) -> None:
        """Start a process again after it has ended."""
        self._lost.pop(name, None)
        self._killed.pop(name, None)
        if name.startswith("worker"):
            self._restart_times[name] = time.monotonic()
        self.start(name, *self._calls[name])

    def kill(self, name: str, reason: str) -> None:
        """Kill a running process; its outcome will be a `PeerLost` with this reason."""
        self._killed.setdefault(name, reason)
        self.running[name][0].kill()

    def iter_outcomes(self, seconds: float | None) -> Iterator[Outcome]:
        """Wait at most `seconds` for a message, and yield the outcomes of processes that ended.

        Then kill the workers that were reported as lost more than `grace_period` seconds ago, and
        those that have not joined `2 * grace_period` seconds after their restart.
        """
        by_pipe = {pipe: name for name, (_, pipe) in self.running.items()}
        for pipe in wait(list(by_pipe), seconds):
            assert isinstance(pipe, Connection)
            name = by_pipe[pipe]
            try:
                received = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # the process may have died while it sent its outcome
                process = self.running[name][0]
                process.join()
                error = PeerLost(self._killed[name]) if name in self._killed else None
                received = Outcome(name, error=error, exit_code=process.exitcode)
            if isinstance(received, Outcome):
                del self.running[name]
                self._restart_times.pop(name, None)
                pipe.close()
                yield received
                continue
            if received is None:  # the worker has joined
                self._restart_times.pop(name, None)
                continue
            now = time.monotonic()
            lost = {f"worker {w}": (now, reason) for w, reason in received.items()}
            self._lost = {
                name: self._lost.get(name, loss)
                for name, loss in lost.items()
                if name not in self._restart_times
            }
        for name, (since, reason) in self._lost.items():
            if name in self.running and time.monotonic() - since > self.grace_period:
                self.kill(name, reason)
        for name, restart_time in self._restart_times.items():
            # A worker that joins for the first time has about as long until it is killed.
            if time.monotonic() - restart_time > 2 * self.grace_period:
                limit = f"{2 * self.grace_period:g} s"
                self.kill(name, f"{name} is lost: it did not join within {limit} of its restart")


def _run_process(
    pipe: Connection,
    folder: str | None,
    name: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The fork server's modules live until the end. Without freezing them, each garbage collection
    # would scan them all and copy every page that this process shares with the fork server.
    gc.freeze()
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        if name == "server 0":
            args = (*args, lambda lost: pipe.send_bytes(pickle.dumps(lost)))
        elif name.startswith("worker"):
            args = (*args, lambda: pipe.send_bytes(pickle.dumps(None)))
        message = pickle.dumps(Outcome(name, value=target(*args)))
    except SystemExit:
        raise  # the exit code is the outcome; the exception must not reach the parent process
    except BaseException as error:
        error.add_note(f"raised in {name}:\n{traceback.format_exc()}")
        try:
            message = pickle.dumps(Outcome(name, error=error))
            pickle.loads(message)
        except Exception:
            text = RuntimeError(f"{name}: {type(error).__name__}: {error}")
            message = pickle.dumps(Outcome(name, error=text))
    pipe.send_bytes(message)


def _end_with_parent(folder: str | None) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def collect(processes: Processes, *, allow_missing: bool) -> dict[str, Outcome]:
    """Wait for all processes and return their outcomes.

    After a failure, the processes that have not ended `grace_period` seconds later are killed. With
    `allow_missing`, the loss of a worker does not count as a failure.
    """
    outcomes: dict[str, Outcome] = {}
    deadline = math.inf
    while processes.running:
        for outcome in processes.iter_outcomes(min(1.0, max(0.0, deadline - time.monotonic()))):
            outcomes[outcome.name] = outcome
            if outcome.failed and not (allow_missing and outcome.name.startswith("worker")):
                deadline = min(deadline, time.monotonic() + processes.grace_period)
        if time.monotonic() >= deadline:
            reason = f"killed, {processes.grace_period:g} s after the failure of another process"
            for name in processes.running:
                processes.kill(name, reason)
    return outcomes

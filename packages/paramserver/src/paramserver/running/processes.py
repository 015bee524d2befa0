"""Processes of this machine, and how each of them ended."""

import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from paramserver.protocol.messages import PeerLost
from paramserver.running.job import Outcome
from paramserver.running.progress import Progress

Tell = Callable[[Progress], object]
AnyCall = Callable[..., Any]
Running = dict[str, tuple[BaseProcess, Connection]]
"""By name, a process and where its outcome will come from."""


def start(
    context: BaseContext, name: str, target: AnyCall, *args: Any, tells: bool = False
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `target`; it `tells` its progress by one more argument."""
    ours, theirs = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_process, args=(theirs, name, target, args, tells), name=name, daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def _process(pipe: Connection, name: str, target: AnyCall, args: Any, tells: bool) -> None:
    try:
        if tells:
            args = (*args, lambda said: pipe.send_bytes(pickle.dumps(said)))
        message = pickle.dumps(Outcome(name, value=target(*args)))
    except SystemExit:
        raise  # its code tells how this process ended, not how the one that started it is to end
    except BaseException as error:
        message = _pickled_failure(name, error)
    pipe.send_bytes(message)
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled_failure(name: str, error: BaseException) -> bytes:
    error.add_note(f"raised in {name}:\n{traceback.format_exc()}")
    try:
        message = pickle.dumps(Outcome(name, error=error))
        pickle.loads(message)
        return message
    except Exception:
        text = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        return pickle.dumps(Outcome(name, error=text))


def ends(running: Running, seconds: float | None, progress: Tell | None) -> Iterator[Outcome]:
    """How processes have ended that do so in `seconds`; they run no more."""
    by_pipe = {pipe: name for name, (_, pipe) in running.items()}
    for pipe in wait(list(by_pipe), seconds):
        assert isinstance(pipe, Connection)
        name = by_pipe[pipe]
        try:
            said = pickle.loads(pipe.recv_bytes())
        except EOFError:
            running[name][0].join()
            said = Outcome(name, exit_code=running[name][0].exitcode)
        if isinstance(said, Outcome):
            del running[name]
            pipe.close()
            yield said
        elif progress:
            progress(said)


def collect(
    running: Running, patience: float, progress: Tell | None, *, survives: bool
) -> dict[str, Outcome]:
    """How each process ended. After a failure, those still there in `patience` s are killed.

    If the run `survives` a lost worker, that is no failure until one of the others has finished.
    """
    outcomes: dict[str, Outcome] = {}
    processes = [process for process, _ in running.values()]
    deadline, failed, killed = math.inf, False, False
    while running:
        for outcome in ends(running, min(1.0, max(0.0, deadline - time.monotonic())), progress):
            if killed and outcome.exit_code is not None:  # an echo: the cause came before
                text = f"it had not ended {patience:g} s after another's failure, and was killed"
                outcome = Outcome(outcome.name, error=PeerLost(text))
            outcomes[outcome.name] = outcome
            failed = failed or outcome.failed
            goes_on = survives and outcome.failed and outcome.name.startswith("worker")
            if failed and not goes_on:
                deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() >= deadline:
            killed = True
            for process, _ in running.values():
                process.kill()
    for process in processes:
        process.join()
        process.close()
    return outcomes

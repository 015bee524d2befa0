"""Processes of this machine, and how each of them ended."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from paramserver.running.job import Outcome


def start(
    context: BaseContext, name: str, target: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[str, BaseProcess, Connection]:
    """Start a process that calls `target`; its name, itself, and where its outcome will come."""
    ours, theirs = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_process, args=(theirs, name, target, args), name=name, daemon=True
    )
    process.start()
    theirs.close()
    return name, process, ours


def _process(pipe: Connection, name: str, target: Callable[..., Any], args: Any) -> None:
    try:
        message = pickle.dumps(Outcome(name, value=target(*args)))
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
    except Exception:
        # An exception that does not pickle travels as its text.
        text = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        message = pickle.dumps(Outcome(name, error=text))
    return message


def collect(started: list[tuple[str, BaseProcess, Connection]], patience: float) -> list[Outcome]:
    """How each process ended. After a failure, those still there in `patience` s are killed."""
    outcomes: dict[str, Outcome] = {}
    open_pipes = {pipe: (name, process) for name, process, pipe in started}
    deadline = None
    while open_pipes:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_pipes), left)
        if not ready:
            for _, process in open_pipes.values():
                process.kill()
        for pipe in ready:
            assert isinstance(pipe, Connection)
            name, process = open_pipes.pop(pipe)
            try:
                outcomes[name] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join()
                outcomes[name] = Outcome(name, exit_code=process.exitcode)
            if outcomes[name].failed and deadline is None:
                deadline = time.monotonic() + patience
    for _, process, pipe in started:
        process.join()
        pipe.close()
        process.close()
    return [outcomes[name] for name, _, _ in started]

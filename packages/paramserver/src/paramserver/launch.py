"""Start servers and workers, wait for them, and say which one failed if one does.

Notable:
- a training function gets a Worker and whatever else it was given; it returns anything that
  pickles;
- the cause is reported, not its echo: a process that died before the ones that noticed, an error of
  the training function before the PeerLost of the others.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramserver.connection import Channel, PeerLost, RemoteConnection
from paramserver.consistency import Consistency
from paramserver.partition import Shard, partition
from paramserver.replica import OptimizerFactory
from paramserver.server import Server
from paramserver.serving import serve
from paramserver.transport import distributed, shared_memory
from paramserver.worker import Worker, trainable

_GRACE = 10.0  # seconds, beyond the timeout, for which a server may say nothing


@dataclass(frozen=True)
class Result:
    """What became of a run."""

    values: list[Any]
    """What `train` returned, by worker; None for a lost one."""
    parameters: dict[str, Tensor]
    """The final parameters, under the module's names."""
    versions: list[int]
    """Updates that each server applied."""
    staleness: Counter[int]
    """How many gradients were applied to parameters that many versions newer than they saw."""
    lost: dict[int, str] = field(default_factory=dict)
    """Why each lost worker was lost (only with on_worker_loss="continue")."""


def run(
    train: Callable[..., Any],
    module: nn.Module,
    optimizer: OptimizerFactory,
    consistency: Consistency | None = None,
    *,
    args: Sequence[Any] = (),
    workers: int = 2,
    servers: int = 1,
    transport: Literal["shared_memory", "distributed", "ray"] = "shared_memory",
    timeout: float = 60.0,
    on_worker_loss: Literal["stop", "continue"] = "stop",
    whole: bool = False,
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver",
) -> Result:
    """Call `train(worker, *args)` on every worker, against servers that start from `module`.

    Each server and each worker is a process of this machine, or a Ray actor. `train` pulls and
    pushes; the worker finishes by itself when it returns. `train`, `module`, `optimizer` and `args`
    must pickle. Raises what `train` raised, or PeerLost naming the process that died. After a
    failure, whoever has not ended within `timeout` seconds is killed.
    """
    job = Job(
        train, module, optimizer, consistency, tuple(args), workers, servers, timeout,
        on_worker_loss, whole,
    )  # fmt: skip
    shards = job.shards()
    if transport == "ray":
        from paramserver.transport.ray import run_on_ray

        return run_on_ray(job, shards)
    sizes = [shard.buffer_bytes for shard in shards]
    with tempfile.TemporaryDirectory() as folder:
        ends: tuple[Sequence[Endpoint], Sequence[Endpoint]]
        if transport == "shared_memory":
            ends = shared_memory.wire(sizes, workers)
        elif transport == "distributed":
            ends = distributed.wire(sizes, workers, f"{folder}/store")
        else:
            raise ValueError(f"transport is {transport!r}; 'shared_memory', 'distributed' or 'ray'")
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # Forked once torch is there, a process costs milliseconds.
            context.set_forkserver_preload(["paramserver.launch", "torch._dynamo"])
        started = [
            _start(context, f"server {i}", _serve, (job, shard, end))
            for i, (shard, end) in enumerate(zip(shards, ends[0], strict=True))
        ] + [_start(context, f"worker {w}", _work, (job, w, end)) for w, end in enumerate(ends[1])]
        for end in (*ends[0], *ends[1]):
            end.close()
        outcomes = _collect(started, timeout + _GRACE)
    return assemble(job, shards, outcomes[:servers], outcomes[servers:])


class Endpoint(Protocol):
    """What a process needs in order to reach its peers."""

    def open(self) -> tuple[Channel, ...]:
        """Channels to every peer, by number."""

    def close(self) -> None:
        """Let go of it in the process that handed it on."""


@dataclass(frozen=True)
class Job:
    """What every process of a run is told."""

    train: Callable[..., Any]
    module: nn.Module
    optimizer: OptimizerFactory
    consistency: Consistency | None
    args: tuple[Any, ...]
    workers: int
    servers: int
    timeout: float
    on_worker_loss: Literal["stop", "continue"]
    whole: bool

    def shards(self) -> list[Shard]:
        """What each server holds."""
        return partition(trainable(self.module), self.servers, whole=self.whole)

    def server(self, shard: Shard) -> Server:
        """The server of one shard."""
        return Server(
            trainable(self.module),
            self.optimizer,
            self.consistency,
            workers=self.workers,
            shard=shard,
            timeout=self.timeout,
            on_worker_loss=self.on_worker_loss,
        )


@dataclass(frozen=True)
class Outcome:
    """How one process ended: with a value, an exception, or only an exit code."""

    name: str
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.error is not None or self.exit_code is not None


@dataclass(frozen=True)
class ServerReport:
    """What a server returns."""

    buffer: bytes
    version: int
    staleness: Counter[int]


def report(server: Server) -> ServerReport:
    """The final state of a server, in a form that pickles cheaply."""
    buffer = server.state_dict()["parameters"].numpy().tobytes()
    return ServerReport(buffer, server.version, server.staleness)


def assemble(
    job: Job, shards: list[Shard], servers: list[Outcome], workers: list[Outcome]
) -> Result:
    """One result from all outcomes, or the error that caused the others."""
    failed = [outcome for outcome in (*servers, *workers) if outcome.failed]
    dead = [outcome for outcome in failed if outcome.exit_code is not None]
    lost = {w: _why(outcome) for w, outcome in enumerate(workers) if outcome.failed}
    stop = job.on_worker_loss == "stop" or len(lost) == len(workers)
    if failed and (stop or any(outcome.failed for outcome in servers)):
        for outcome in dead:
            raise PeerLost(_why(outcome))
        causes = [o for o in failed if not isinstance(o.error, PeerLost)] or failed
        assert causes[0].error is not None
        raise causes[0].error
    reports: list[ServerReport] = [outcome.value for outcome in servers]
    parameters = {name: torch.empty_like(p) for name, p in trainable(job.module).items()}
    for shard, server in zip(shards, reports, strict=True):
        views = shard.views(torch.frombuffer(bytearray(server.buffer), dtype=torch.uint8))
        for piece, view in zip(shard.pieces, views, strict=True):
            with torch.no_grad():
                parameters[piece.name].view(-1)[piece.start : piece.stop] = view.view(-1)
    return Result(
        [outcome.value for outcome in workers],
        {name: tensor.detach() for name, tensor in parameters.items()},
        [server.version for server in reports],
        sum((server.staleness for server in reports), Counter()),
        lost,
    )


def _why(outcome: Outcome) -> str:
    if outcome.exit_code is not None:
        return f"{outcome.name} died with exit code {outcome.exit_code}"
    return f"{outcome.name}: {type(outcome.error).__name__}: {outcome.error}"


def _serve(job: Job, shard: Shard, end: Endpoint) -> ServerReport:
    channels = end.open()
    server = job.server(shard)
    for thread in serve(server, dict(enumerate(channels))):
        thread.join()
    return report(server)


def _work(job: Job, rank: int, end: Endpoint) -> Any:
    connections = [RemoteConnection(channel, job.timeout + _GRACE) for channel in end.open()]
    with Worker(job.module, connections, rank=rank, whole=job.whole) as worker:
        return job.train(worker, *job.args)


def _start(
    context: BaseContext, name: str, target: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[str, BaseProcess, Connection]:
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


def _collect(started: list[tuple[str, BaseProcess, Connection]], patience: float) -> list[Outcome]:
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

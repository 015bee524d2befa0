"""Start servers and workers, wait for them, and raise the error that caused a failure.

`run` raises the cause instead of its consequences. The death of a process has priority over the
errors of its peers. An error of the training function has priority over the `PeerLost` of other
workers.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paramserver.arguments import require_integer
from paramserver.consistency import Consistency, require_policy
from paramserver.optimizers import OptimizerFactory, as_spec
from paramserver.partition import Shard
from paramserver.running.job import Job, Result, ServerReport, assemble_result
from paramserver.running.processes import Processes, ReportLosses, collect
from paramserver.running.serving import serve
from paramserver.running.supervise import run_on_zeromq
from paramserver.transport.connection import GRACE_SECONDS, Channels, RemoteConnection
from paramserver.transport.shared_memory import connect_all

#: Modules that the fork server imports, so that a forked process starts in milliseconds. The first
#: optimizer of a process imports `torch._dynamo`.
PRELOADED = ["paramserver.running.launch", "torch._dynamo"]


def run(
    train: Callable[..., Any],
    module: nn.Module,
    optimizer: OptimizerFactory,
    consistency: Consistency | None = None,
    *,
    args: Sequence[Any] = (),
    workers: int = 2,
    servers: int = 1,
    transport: Literal["shared_memory", "zeromq"] = "shared_memory",
    timeout: float = 60.0,
    allow_missing: bool = False,
    restarts: int = 0,
    journal: str | Path | None = None,
    fsync: bool = False,
) -> Result:
    """Call `train(worker, *args)` on every worker, and return the values and final parameters.

    Each server and each worker is a process of this machine. The servers start with the parameters
    of `module`. `train` pulls and pushes; the worker finishes when `train` returns. After a
    failure, the remaining processes are killed: at once over ZeroMQ, otherwise after `timeout` + 10
    seconds.

    Args:
        train: the training function. `train`, `module`, `optimizer` and `args` must be picklable.
        module: the module to train.
        optimizer: see `Server`.
        consistency: the policy; None is `BulkSynchronous()`.
        args: further arguments of `train`.
        workers: number of workers.
        servers: number of servers.
        transport: transport of messages between the processes.
        timeout: see `Server`.
        allow_missing: True to continue training without a worker that is lost or silent. If the
            process of such a worker is still running `timeout` + 10 seconds later, it is killed.
        restarts: total number of restarts of processes that die; "zeromq" only. A restarted worker
            calls `train` again, and `worker.position` is its position in the training data. It is
            killed if it has not joined `2 * (timeout + 10)` seconds after its restart. A restarted
            server continues from its journal.
        journal: folder of the servers' journals, possibly of an earlier run; "zeromq" only.
        fsync: True to sync each record of a journal to the disk before the server answers, so that
            the record survives a power failure.

    Raises:
        PeerLost: a process has died; the message names it.
        TypeError: an argument has a wrong type; the message names the argument.
        ValueError: an option is out of range, or requires another option.
        Exception: any exception that `train` raised.
    """
    if not isinstance(args, Iterable):
        raise TypeError(f"expected args to be a sequence of arguments of train, got {args!r:.60}")
    job = Job(
        train,
        module,
        optimizer,
        consistency,
        tuple(args),
        workers,
        servers,
        timeout,
        allow_missing,
        fsync,
    )
    _check_options(job, transport, restarts, journal)
    shards = job.shards()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if transport == "zeromq":
        return run_on_zeromq(job, restarts, journal, context)
    server_ends, worker_ends = connect_all([shard.buffer_bytes for shard in shards], workers)
    # Pack the job here. Otherwise, multiprocessing would move the parameters into shared memory
    # that all workers use.
    packed = job.pack()
    with Processes(context, None, job.timeout + GRACE_SECONDS) as processes:
        for i, (shard, channels) in enumerate(zip(shards, server_ends, strict=True)):
            processes.start(f"server {i}", _serve, packed, shard, channels)
        for w, channels in enumerate(worker_ends):
            processes.start(f"worker {w}", _run_worker, packed, w, channels)
        for channels in (*server_ends, *worker_ends):
            for channel in channels:
                channel.close()
        outcomes = collect(processes, allow_missing=allow_missing)
    return assemble_result(job, shards, outcomes)


def _check_options(job: Job, transport: str, restarts: int, journal: str | Path | None) -> None:
    if transport not in ("shared_memory", "zeromq"):
        raise ValueError(f"expected transport 'shared_memory' or 'zeromq', got {transport!r}")
    if not isinstance(journal, str | os.PathLike | None):
        raise TypeError(f"expected journal to be the path of a folder, or None, got {journal!r}")
    as_spec(job.optimizer)
    require_policy(job.consistency)
    require_integer("workers", job.workers, 1)
    require_integer("restarts", restarts, 0)
    if transport != "zeromq" and (restarts or journal is not None):
        raise ValueError(f"expected transport 'zeromq' with restarts or journal, got {transport!r}")
    if job.fsync and journal is None:
        raise ValueError("expected a journal with fsync=True, got journal=None")


def _serve(
    packed: bytes, shard: Shard, channels: Channels, report_losses: ReportLosses | None = None
) -> ServerReport:
    job = Job.unpack(packed)
    server = job.server(shard, memory=channels[0].server_memory)
    for thread in serve(server, dict(enumerate(channels))):
        while thread.is_alive():
            thread.join(1.0)
            if report_losses:
                report_losses(dict(server.core.lost))
    parameters = server.core.replica.newest.numpy().tobytes()
    return ServerReport(parameters, server.version, server.staleness)


def _run_worker(
    packed: bytes, rank: int, channels: Channels, report_join: Callable[[], object]
) -> Any:
    job = Job.unpack(packed)
    connections = [RemoteConnection(channel, job.timeout + GRACE_SECONDS) for channel in channels]
    with job.worker(rank, connections) as worker:
        report_join()
        return job.train(worker, *job.args)

"""Start servers and workers, wait for them, and say which one failed if one does.

Notable: the cause is reported, not its echo: a process that died before the ones that noticed, an
error of the training function before the PeerLost of the others.
"""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paramserver.consistency import Consistency, OptimizerFactory
from paramserver.partition import Shard
from paramserver.running.job import Job, Result, ServerReport, assemble, report
from paramserver.running.processes import Processes, Tell, collect
from paramserver.running.serving import serve
from paramserver.running.supervise import run_on_zeromq
from paramserver.transport import distributed, shared_memory
from paramserver.transport.connection import GRACE, Channels, RemoteConnection

Ends = Channels | distributed.Endpoint  # how a process reaches its peers


def run(
    train: Callable[..., Any], module: nn.Module, optimizer: OptimizerFactory,
    consistency: Consistency | None = None, *, args: Sequence[Any] = (), workers: int = 2,
    servers: int = 1,
    transport: Literal["shared_memory", "distributed", "zeromq", "ray"] = "shared_memory",
    timeout: float = 60.0, on_worker_loss: Literal["stop", "continue"] = "stop",
    whole: bool = False, drop_after: float | None = None,
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver", restarts: int = 0,
    journal: str | Path | None = None, progress: Tell | None = None) -> Result:  # fmt: skip
    """Call `train(worker, *args)` on every worker, against servers that start from `module`.

    Each server and each worker is a process of this machine, or a Ray actor. `train` pulls and
    pushes; the worker finishes by itself when it returns. `train`, `module`, `optimizer` and `args`
    must pickle. Raises what `train` raised, or PeerLost naming the process that died. After a
    failure, whoever has not ended within `timeout` seconds is killed.

    With "continue" the others go on without a worker that is lost, silent, or waited for longer
    than `drop_after` s; one that has not ended `timeout` + 10 s later is killed.

    With "zeromq" a process that dies is started again, up to `restarts` times in all: a worker
    calls `train` anew (`worker.position` says where it is), a server goes on from its `journal`, a
    folder, also an earlier run's. `progress` is called every second or so: `print` prints a line.
    """
    job = Job(
        train, module, optimizer, consistency, tuple(args), workers, servers, timeout,
        on_worker_loss, whole, drop_after)  # fmt: skip
    if transport != "zeromq" and (restarts or journal is not None):
        raise ValueError(f"with {transport} nobody is started again; use transport='zeromq'")
    shards = job.shards()
    if transport == "ray":
        from paramserver.transport.ray import run_on_ray

        return run_on_ray(job, shards, progress)
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Forked once torch is there, a process costs milliseconds.
        context.set_forkserver_preload(["paramserver.running.launch", "torch._dynamo"])
    if transport == "zeromq":
        return run_on_zeromq(job, restarts, journal, context, progress)
    sizes = [shard.buffer_bytes for shard in shards]
    with tempfile.TemporaryDirectory() as folder:
        ends: tuple[Sequence[Ends], Sequence[Ends]]
        if transport == "shared_memory":
            ends = shared_memory.wire(sizes, workers)
        elif transport == "distributed":
            ends = distributed.wire(sizes, workers, f"{folder}/store")
        else:
            known = "'shared_memory', 'distributed', 'zeromq' or 'ray'"
            raise ValueError(f"transport is {transport!r}; {known}")
        # Pickled here, because torch would put the module's parameters into shared memory for
        # processes that it starts: they would be one and the same in all workers.
        packed = pickle.dumps(job)
        with Processes(context, folder, timeout + GRACE, progress) as processes:
            for i, (shard, end) in enumerate(zip(shards, ends[0], strict=True)):
                processes.start(f"server {i}", _serve, packed, shard, end)
            for w, end in enumerate(ends[1]):
                processes.start(f"worker {w}", _work, packed, w, end)
            for end in (*ends[0], *ends[1]):
                for channel in end if isinstance(end, tuple) else ():
                    channel.close()
            outcomes = collect(processes, survives=on_worker_loss == "continue")
    return assemble(job, shards, outcomes)


def _serve(packed: bytes, shard: Shard, end: Ends, tell: Tell | None = None) -> ServerReport:
    job: Job = pickle.loads(packed)
    channels = end if isinstance(end, tuple) else end.open()
    server = job.server(shard, memory=channels[0].home)
    for thread in serve(server, dict(enumerate(channels))):
        while thread.is_alive():
            thread.join(1.0)
            if tell:
                tell(server.progress())
    return report(server)


def _work(packed: bytes, rank: int, end: Ends) -> Any:
    job: Job = pickle.loads(packed)
    channels = end if isinstance(end, tuple) else end.open()
    connections = [RemoteConnection(channel, job.timeout + GRACE) for channel in channels]
    with job.worker(rank, connections) as worker:
        return job.train(worker, *job.args)

"""Servers and workers as Ray actors, for a cluster that Ray runs. Needs the `ray` extra.

Notable: a request is a call of the server's actor, with the gradients as a numpy array that Ray
puts in its own shared memory. A server runs one thread for each worker, since a request waits.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paramserver.partition import Shard
from paramserver.protocol.messages import Message, PeerLost
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble, report
from paramserver.running.processes import Tell
from paramserver.running.progress import Progress
from paramserver.transport.connection import SENDS, Connection, extra


def run_on_ray(job: Job, shards: list[Shard], progress: Tell | None = None) -> Result:
    """What `run` does, on the Ray cluster that is connected, or a new local one."""
    ray = extra("ray", "ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    serve: Any = ray.remote(max_concurrency=job.workers + 2)(_ServerActor)
    work: Any = ray.remote(_work).options(max_retries=0)
    servers = [serve.remote(job, shard) for shard in shards]
    results = [work.remote(job, rank, servers) for rank in range(job.workers)]
    while progress and ray.wait(results, num_returns=len(results), timeout=1.0)[1]:
        progress(ray.get(servers[0].progress.remote()))
    named = {f"worker {i}": result for i, result in enumerate(results)}
    outcomes = {name: _outcome(name, result) for name, result in named.items()}
    for i, server in enumerate(servers):
        outcomes[f"server {i}"] = _outcome(f"server {i}", server.report.remote())
        ray.kill(server)
    return assemble(job, shards, outcomes)


def _outcome(name: str, result: Any) -> Outcome:
    ray = extra("ray", "ray")
    try:
        return Outcome(name, value=ray.get(result))
    except ray.exceptions.RayTaskError as error:
        return Outcome(name, error=error.cause or error)
    except ray.exceptions.RayError as error:
        return Outcome(name, error=PeerLost(f"{name} is gone: {error}"))


class _ServerActor:
    """A server; every method is a request, in the thread that Ray gives it."""

    def __init__(self, job: Job, shard: Shard) -> None:
        self._server = job.server(shard)

    def ask(self, worker: int, message: Message, gradients: Any) -> tuple[Message, Any]:
        data = None if gradients is None else torch.from_numpy(gradients.copy())
        out: list[Tensor] = []
        reply = self._server.ask(worker, message, data, lambda given: out.append(given.clone()))
        return reply, out[0].numpy() if out else None

    def lose(self, worker: int, reason: str) -> None:
        self._server.lose(worker, reason)

    def progress(self) -> Progress:
        return self._server.progress()

    def report(self) -> ServerReport:
        return report(self._server)


class _RayConnection(Connection):
    """A worker's connection to a server's actor."""

    def __init__(self, actor: Any, number: int, worker: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._actor, self._worker, self._name = actor, worker, f"server {number}"

    def ask(self, message: Message, written: Iterable[int] = ()) -> Message:
        ray = extra("ray", "ray")
        deque(written, maxlen=0)
        data = self.gradients.numpy() if message.kind in SENDS else None
        try:
            reply, parameters = ray.get(self._actor.ask.remote(self._worker, message, data))
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except ray.exceptions.RayError as error:
            raise PeerLost(f"{self._name} is gone: {error}") from error
        assert isinstance(reply, Message)
        if parameters is not None:
            self.deliver(torch.from_numpy(parameters.copy()))
        return reply

    def abort(self, reason: str) -> None:
        self._actor.lose.remote(self._worker, reason)


def _work(job: Job, rank: int, servers: list[Any]) -> Any:
    pairs = enumerate(zip(servers, job.shards(), strict=True))
    connections = [_RayConnection(a, i, rank, shard.buffer_bytes) for i, (a, shard) in pairs]
    with job.worker(rank, connections) as worker:
        return job.train(worker, *job.args)

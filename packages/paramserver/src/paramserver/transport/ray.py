"""Servers and workers as actors and tasks of a Ray cluster. Needs the `ray` extra.

A request is a call of the server's actor, with the gradients as a NumPy array that Ray puts into
its shared memory. A server runs one thread per worker, because a request may wait.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paramserver.partition import Shard, require_separate_memory
from paramserver.protocol.messages import Message, PeerLost
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble, report
from paramserver.running.processes import ReportProgress
from paramserver.running.progress import Progress
from paramserver.transport.connection import KINDS_WITH_GRADIENTS, Connection, import_extra


def run_on_ray(job: Job, shards: list[Shard], progress: ReportProgress | None = None) -> Result:
    """Run a job as `run` does, on the connected Ray cluster or on a new local one."""
    ray = import_extra("ray", "ray")
    # Ray serializes each tensor separately, so even frozen tensors would lose shared memory.
    tensors = [*job.module.named_parameters(), *job.module.named_buffers()]
    require_separate_memory(dict(tensors))
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
    ray = import_extra("ray", "ray")
    try:
        return Outcome(name, value=ray.get(result))
    except ray.exceptions.RayTaskError as error:
        return Outcome(name, error=error.cause or error)
    except ray.exceptions.RayError as error:
        return Outcome(name, error=PeerLost(f"{name} is gone: {error}"))


class _ServerActor:
    """A server as a Ray actor; Ray calls each method in a thread of its pool."""

    def __init__(self, job: Job, shard: Shard) -> None:
        self._server = job.server(shard)

    def request(self, worker: int, message: Message, gradients: Any) -> tuple[Message, Any]:
        data = None if gradients is None else torch.from_numpy(gradients.copy())
        delivered: list[Tensor] = []

        def deliver(parameters: Tensor) -> None:
            delivered.append(parameters.clone())

        answer = self._server.request(worker, message, data, deliver)
        return answer, delivered[0].numpy() if delivered else None

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
        self._actor = actor
        self._worker = worker
        self._name = f"server {number}"

    def request(self, message: Message, written: Iterable[int] = ()) -> Message:
        ray = import_extra("ray", "ray")
        for _ in written:
            pass  # iterating writes the payload
        data = self.gradients.numpy() if message.kind in KINDS_WITH_GRADIENTS else None
        try:
            reply, parameters = ray.get(self._actor.request.remote(self._worker, message, data))
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
    connections = [
        _RayConnection(actor, number, rank, shard.buffer_bytes)
        for number, (actor, shard) in enumerate(zip(servers, job.shards(), strict=True))
    ]
    with job.worker(rank, connections) as worker:
        return job.train(worker, *job.args)

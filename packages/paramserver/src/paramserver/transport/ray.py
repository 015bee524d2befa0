"""Servers and workers as Ray actors, for a cluster that Ray runs. Needs the `ray` extra.

Notable: a request is a call of the server's actor, with the gradients as a numpy array that Ray
puts in its own shared memory. A server runs one thread for each worker, since a request waits.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from paramserver.connection import Greeting, PeerLost
from paramserver.launch import Job, Outcome, Result, ServerReport, assemble, report
from paramserver.ledger import Log
from paramserver.partition import Shard
from paramserver.worker import Worker


def run_on_ray(job: Job, shards: list[Shard]) -> Result:
    """What `run` does, on the Ray cluster that is connected, or a new local one."""
    try:
        ray = _ray()
    except ImportError as error:
        raise RuntimeError("transport='ray' needs Ray: pip install 'paramserver[ray]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    serve: Any = ray.remote(max_concurrency=job.workers + 1)(_ServerActor)
    work: Any = ray.remote(_work).options(max_retries=0)
    servers = [serve.remote(job, shard) for shard in shards]
    results = [work.remote(job, rank, servers) for rank in range(job.workers)]
    workers = [_outcome(f"worker {rank}", result) for rank, result in enumerate(results)]
    ended = [_outcome(f"server {i}", s.report.remote()) for i, s in enumerate(servers)]
    for server in servers:
        ray.kill(server)
    return assemble(job, shards, ended, workers)


def _ray() -> Any:
    return importlib.import_module("ray")


def _outcome(name: str, result: Any) -> Outcome:
    ray = _ray()
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
        self._buffers: dict[int, Tensor] = {}

    def hello(self, worker: int, layout: str) -> Greeting:
        greeting = self._server.hello(worker, layout)
        self._buffers[worker] = torch.zeros(self._server.shard.buffer_bytes, dtype=torch.uint8)
        return greeting

    def pull(self, worker: int, clock: int) -> tuple[int, Any]:
        version = self._server.pull(worker, clock, self._buffers[worker])
        return version, self._buffers[worker].numpy()

    def push(self, worker: int, clock: int, gradients: Any) -> None:
        self._server.push(worker, clock, torch.from_numpy(gradients.copy()))

    def stage(self, worker: int, gradients: Any) -> None:
        self._server.stage(worker, torch.from_numpy(gradients.copy()))

    def commit(self, worker: int, clock: int, since: int) -> Log:
        return self._server.commit(worker, clock, since)

    def read(self, worker: int, clock: int, since: int) -> Log:
        return self._server.read(worker, clock, since)

    def fetch(self, worker: int, log: Log) -> tuple[int, Any]:
        version = self._server.fetch(worker, log, self._buffers[worker])
        return version, self._buffers[worker].numpy()

    def follow(self, worker: int, log: Log) -> int:
        return self._server.follow(worker, log)

    def sync(self, worker: int, since: int) -> tuple[bool, Log]:
        return self._server.sync(worker, since)

    def finish(self, worker: int, since: int) -> tuple[int, Any, Log]:
        version, log = self._server.finish(worker, since, self._buffers[worker])
        return version, self._buffers[worker].numpy(), log

    def lose(self, worker: int, reason: str) -> None:
        self._server.lose(worker, reason)

    def report(self) -> ServerReport:
        return report(self._server)


class _RayConnection:
    """A worker's connection to a server's actor."""

    def __init__(self, actor: Any, number: int, worker: int, nbytes: int) -> None:
        self._actor, self._worker, self._name = actor, worker, f"server {number}"
        self.parameters = torch.zeros(nbytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)

    def hello(self, layout: str) -> Greeting:
        greeting = self._ask(self._actor.hello, layout)
        assert isinstance(greeting, Greeting)
        return greeting

    def pull(self, clock: int) -> int:
        return self._filled(*self._ask(self._actor.pull, clock))

    def push(self, clock: int) -> None:
        self._ask(self._actor.push, clock, self.gradients.numpy())

    def stage(self) -> None:
        self._ask(self._actor.stage, self.gradients.numpy())

    def commit(self, clock: int, since: int) -> Log:
        return self._log(self._ask(self._actor.commit, clock, since))

    def read(self, clock: int, since: int) -> Log:
        return self._log(self._ask(self._actor.read, clock, since))

    def fetch(self, log: Log) -> int:
        return self._filled(*self._ask(self._actor.fetch, log))

    def follow(self, log: Log) -> int:
        return int(self._ask(self._actor.follow, log))

    def sync(self, since: int) -> tuple[bool, Log]:
        waits, log = self._ask(self._actor.sync, since)
        return bool(waits), self._log(log)

    def finish(self, since: int) -> tuple[int, Log]:
        version, data, log = self._ask(self._actor.finish, since)
        return self._filled(version, data), self._log(log)

    def end(self, log: Log) -> int:
        return self.fetch(log)

    def abort(self, reason: str) -> None:
        self._actor.lose.remote(self._worker, reason)

    @staticmethod
    def _log(answer: Any) -> Log:
        assert isinstance(answer, Log)
        return answer

    def _filled(self, version: int, data: Any) -> int:
        self.parameters.copy_(torch.from_numpy(data.copy()))
        return version

    def _ask(self, method: Any, *args: Any) -> Any:
        ray = _ray()
        try:
            return ray.get(method.remote(self._worker, *args))
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except ray.exceptions.RayError as error:
            raise PeerLost(f"{self._name} is gone: {error}") from error


def _work(job: Job, rank: int, servers: list[Any]) -> Any:
    connections = [
        _RayConnection(actor, number, rank, shard.buffer_bytes)
        for number, (actor, shard) in enumerate(zip(servers, job.shards(), strict=True))
    ]
    with Worker(job.module, connections, rank=rank, whole=job.whole) as worker:
        return job.train(worker, *job.args)

"""Servers and workers over ZeroMQ: served, joined, and started again when they die.

Notable: nobody is told of a death. A server that is started again has its journal and its address;
a worker that is started again joins again; the others notice a pause.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from paramserver.journal import DiskJournal
from paramserver.protocol.ledger import Log
from paramserver.protocol.messages import Kind, Message
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble
from paramserver.running.processes import start
from paramserver.transport.zeromq import Keys, ZeroMQConnection, ZeroMQServer
from paramserver.worker import Worker


def open_server(
    job: Job, number: int, address: str, *, journal: str | Path | None, keys: Keys | None = None
) -> ZeroMQServer:
    """Server `number` of a job, where its journal left it, bound to an address."""
    server = job.server(job.shards()[number], elastic=True)
    kept = None
    if journal is not None:
        kept = DiskJournal(Path(journal) / f"server-{number}")
        kept.load(server.core)
    return ZeroMQServer(server.core, address, keys=keys, journal=kept)


@contextmanager
def join_servers(
    job: Job, rank: int, addresses: Sequence[str], *, keys: Keys | None = None
) -> Iterator[Worker]:
    """A worker of the servers at these addresses, in the order of their shards."""
    life = secrets.randbits(40)
    shards = job.shards()
    if len(addresses) != len(shards):
        raise ValueError(f"{len(addresses)} addresses for {len(shards)} servers; give one each")
    with ExitStack() as stack:
        connections = []
        for address, shard in zip(addresses, shards, strict=True):
            connection = ZeroMQConnection(
                address, rank, shard.buffer_bytes, life=life, patience=job.timeout, keys=keys
            )
            stack.callback(connection.close)
            connections.append(connection)
        with job.worker(rank, connections) as worker:
            yield worker


def final(job: Job, addresses: Sequence[str], keys: Keys | None = None) -> list[ServerReport]:
    """What the servers hold now, at one version."""
    reports = []
    log = None
    for address, shard in zip(addresses, job.shards(), strict=True):
        connection = ZeroMQConnection(
            address, -1, shard.buffer_bytes, life=secrets.randbits(40), patience=job.timeout,
            keys=keys,
        )  # fmt: skip
        if log is None:
            log = Log.from_text(connection.ask(Message(Kind.SYNC)).text)
        answer = connection.ask(Message(Kind.END, text=log.to_text()))
        staleness = Counter({int(k): count for k, count in json.loads(answer.text).items()})
        held = connection.parameters.numpy().tobytes()
        reports.append(ServerReport(held, answer.number, staleness))
        connection.close()
    return reports


def run_on_zeromq(job: Job, restarts: int, journal: str | Path | None, start_method: str) -> Result:
    """What `run` does, with processes that may die and are started again."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["paramserver.running.supervise", "torch._dynamo"])
    packed = pickle.dumps(job)
    shards = job.shards()
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/server-{i}" for i in range(job.servers)]
        kept = str(journal or Path(folder) / "journal") if restarts or journal else None
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            f"server {i}": (_serve, (packed, i, address, kept))
            for i, address in enumerate(addresses)
        } | {f"worker {w}": (_work, (packed, w, addresses)) for w in range(job.workers)}
        running = {name: start(context, name, *call) for name, call in calls.items()}
        ended: dict[str, Outcome] = {}
        workers = [name for name in calls if name.startswith("worker")]
        try:
            while any(name not in ended for name in workers):
                for name, outcome in _ends(running):
                    died = outcome.exit_code is not None
                    if died and restarts > 0:
                        restarts -= 1
                        running[name] = start(context, name, *calls[name])
                        continue
                    ended[name] = outcome
                    if outcome.failed and (
                        job.on_worker_loss == "stop" or not name.startswith("worker")
                    ):
                        return assemble(job, shards, *_outcomes(job, ended))
            for i, report in enumerate(final(job, addresses)):
                ended[f"server {i}"] = Outcome(f"server {i}", value=report)
        finally:
            for _, process, pipe in running.values():
                process.kill()
                process.join()
                pipe.close()
        return assemble(job, shards, *_outcomes(job, ended))


def _ends(running: dict[str, Any]) -> Iterator[tuple[str, Outcome]]:
    """Who has ended, and how; after a moment, nobody."""
    by_pipe = {pipe: name for name, (_, _, pipe) in running.items()}
    for pipe in wait(list(by_pipe), timeout=0.5):
        name = by_pipe[pipe]
        process = running.pop(name)[1]
        try:
            outcome: Outcome = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
        except EOFError:
            process.join()
            outcome = Outcome(name, exit_code=process.exitcode)
        process.join()
        yield name, outcome


def _outcomes(job: Job, ended: dict[str, Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Of servers and of workers; whoever was still at it when the run failed has no say."""
    servers = [ended.get(f"server {i}", Outcome("")) for i in range(job.servers)]
    return servers, [ended.get(f"worker {w}", Outcome("")) for w in range(job.workers)]


def _serve(packed: bytes, number: int, address: str, journal: str | None) -> None:
    server = open_server(pickle.loads(packed), number, address, journal=journal)
    server.serve()


def _work(packed: bytes, rank: int, addresses: Sequence[str]) -> Any:
    job: Job = pickle.loads(packed)
    with join_servers(job, rank, addresses) as worker:
        return job.train(worker, *job.args)

"""Servers and workers over ZeroMQ: served, joined, and started again when they die.

Notable: nobody is told of a death: a new server has its journal and address, a new worker joins.
"""

import json
import multiprocessing
import pickle
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paramserver.journal import DiskJournal
from paramserver.protocol.ledger import Log
from paramserver.protocol.messages import Kind, Message
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble
from paramserver.running.processes import Running, Tell, ends, start
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
        if not kept.load(server.core):
            kept.snapshot(server.core)  # a job may draw at random what it begins with
            kept.wait()
            if kept.error:
                raise RuntimeError(f"no journal can be kept in {kept.folder}: {kept.error}")
    return ZeroMQServer(server.core, address, keys=keys, journal=kept)


@contextmanager
def join_servers(
    job: Job, rank: int, addresses: Sequence[str], *, keys: Keys | None = None,
    site: dist.ProcessGroup | None = None) -> Iterator[Worker]:  # fmt: skip
    """A worker of the servers at these addresses, in the order of their shards.

    With `site`, its ranks are that worker (see Worker): all call this, the first one connects.
    """
    if site is not None and dist.get_rank(site) > 0:
        with job.worker(rank, [], site) as worker:
            yield worker
        return
    life, shards = secrets.randbits(40), job.shards()
    if len(addresses) != len(shards):
        raise ValueError(f"{len(addresses)} addresses for {len(shards)} servers; give one each")
    with ExitStack() as stack:
        connections = []
        for address, shard in zip(addresses, shards, strict=True):
            size, wait = shard.buffer_bytes, job.timeout
            connection = ZeroMQConnection(address, rank, size, life=life, patience=wait, keys=keys)
            stack.callback(connection.close)
            connections.append(connection)
        with job.worker(rank, connections, site) as worker:
            yield worker


def final(job: Job, addresses: Sequence[str], keys: Keys | None = None) -> list[ServerReport]:
    """What the servers hold now, at one version."""
    reports, log = [], None
    for address, shard in zip(addresses, job.shards(), strict=True):
        life, nbytes, wait = secrets.randbits(40), shard.buffer_bytes, job.timeout
        connection = ZeroMQConnection(address, -1, nbytes, life=life, patience=wait, keys=keys)
        if log is None:
            log = Log.from_text(connection.ask(Message(Kind.SYNC)).text)
        answer = connection.ask(Message(Kind.END, text=log.to_text()))
        said = [{int(key): n for key, n in each.items()} for each in json.loads(answer.text)]
        held = connection.parameters.numpy().tobytes()
        reports.append(ServerReport(held, answer.number, *map(Counter, said)))
        connection.close()
    return reports


def run_on_zeromq(
    job: Job, restarts: int, journal: str | Path | None, start_method: str, progress: Tell | None
) -> Result:
    """What `run` does, with processes that may die and are started again."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["paramserver.running.supervise", "torch._dynamo"])
    packed, shards = pickle.dumps(job), job.shards()
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/server-{i}" for i in range(job.servers)]
        kept = str(journal or Path(folder) / "journal") if restarts or journal else None
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            f"server {i}": (_serve, (packed, i, address, kept))
            for i, address in enumerate(addresses)
        } | {f"worker {w}": (_work, (packed, w, addresses)) for w in range(job.workers)}

        def begin(name: str) -> tuple[BaseProcess, Connection]:
            call, arguments = calls[name]
            return start(context, name, call, *arguments, tells=name == "server 0")

        running: Running = {name: begin(name) for name in calls}
        ended: dict[str, Outcome] = {}
        workers = [name for name in calls if name.startswith("worker")]
        asked: Future[list[ServerReport]] | None = None
        courier = ThreadPoolExecutor(1)  # asks for the end, before which a server may still die
        try:
            while not (asked and asked.done()):
                for outcome in ends(running, 0.02 if asked else 0.5, progress):
                    if outcome.exit_code is not None and restarts > 0:
                        restarts -= 1
                        running[outcome.name] = begin(outcome.name)
                        continue
                    ended[outcome.name] = outcome
                    needed = job.on_worker_loss == "stop" or outcome.name not in workers
                    if outcome.failed and needed:
                        return assemble(job, shards, ended)
                if not asked and all(name in ended for name in workers):
                    asked = courier.submit(final, job, addresses)
            for i, held in enumerate(asked.result()):
                ended[f"server {i}"] = Outcome(f"server {i}", value=held)
        finally:
            for process, pipe in running.values():
                process.kill()
                process.join()
                pipe.close()
            courier.shutdown(wait=False)
        return assemble(job, shards, ended)


def _serve(packed: bytes, number: int, address: str, journal: str | None, *tell: Tell) -> None:
    open_server(pickle.loads(packed), number, address, journal=journal).serve(*tell)


def _work(packed: bytes, rank: int, addresses: Sequence[str]) -> Any:
    job: Job = pickle.loads(packed)
    with join_servers(job, rank, addresses) as worker:
        return job.train(worker, *job.args)

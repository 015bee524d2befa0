"""Servers and workers over ZeroMQ: served, joined, and started again when they die.

Notable: nobody is told of a death: a new server has its journal and address, a new worker joins.
"""

import json
import pickle
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paramserver.journal import DiskJournal
from paramserver.protocol.messages import Kind, Message
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble
from paramserver.running.processes import Processes, Tell
from paramserver.transport.connection import GRACE
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
    with (
        _connected(job, rank, addresses, keys) as connections,
        job.worker(rank, connections, site) as worker,
    ):
        yield worker


@contextmanager
def _connected(
    job: Job, rank: int, addresses: Sequence[str], keys: Keys | None
) -> Iterator[list[ZeroMQConnection]]:
    life, wait, sizes = secrets.randbits(40), job.timeout, [s.buffer_bytes for s in job.shards()]
    if len(addresses) != len(sizes):
        raise ValueError(f"{len(addresses)} addresses for {len(sizes)} servers; give one each")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(ZeroMQConnection(to, rank, size, life=life, patience=wait, keys=keys))
            )
            for to, size in zip(addresses, sizes, strict=True)
        ]


def final(job: Job, addresses: Sequence[str], keys: Keys | None = None) -> list[ServerReport]:
    """What the servers hold now, at one version."""
    reports = []
    with _connected(job, -1, addresses, keys) as connections:
        log = connections[0].ask(Message(Kind.SYNC)).text
        for connection in connections:
            answer = connection.ask(Message(Kind.END, text=log))
            said = [{int(key): n for key, n in each.items()} for each in json.loads(answer.text)]
            held = connection.parameters.numpy().tobytes()
            reports.append(ServerReport(held, answer.number, *map(Counter, said)))
    return reports


def run_on_zeromq(
    job: Job, restarts: int, journal: str | Path | None, context: BaseContext, progress: Tell | None
) -> Result:
    """What `run` does, with processes that may die and are started again."""
    packed, shards = pickle.dumps(job), job.shards()
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(context, folder, job.timeout + GRACE, progress) as processes,
    ):
        addresses = [f"ipc://{folder}/server-{i}" for i in range(job.servers)]
        kept = str(journal or Path(folder) / "journal") if restarts or journal else None
        for i, address in enumerate(addresses):
            processes.start(f"server {i}", _serve, packed, i, address, kept)
        workers = [f"worker {w}" for w in range(job.workers)]
        for w, name in enumerate(workers):
            processes.start(name, _work, packed, w, addresses)
        ended: dict[str, Outcome] = {}
        asked: Future[list[ServerReport]] | None = None
        courier = ThreadPoolExecutor(1)  # asks for the end, before which a server may still die
        try:
            while not (asked and asked.done()):
                for outcome in processes.ends(0.02 if asked else 0.5):
                    if outcome.exit_code is not None and restarts > 0:
                        restarts -= 1
                        processes.start_again(outcome.name)
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
            courier.shutdown(wait=False)
        return assemble(job, shards, ended)


def _serve(packed: bytes, number: int, address: str, journal: str | None, *tell: Tell) -> None:
    open_server(pickle.loads(packed), number, address, journal=journal).serve(*tell)


def _work(packed: bytes, rank: int, addresses: Sequence[str]) -> Any:
    job: Job = pickle.loads(packed)
    with join_servers(job, rank, addresses) as worker:
        return job.train(worker, *job.args)

"""Servers and workers over ZeroMQ, whose processes are restarted when they die.

Other processes are not notified of a restart. A restarted server continues from its journal at the
same address, and a restarted worker joins again.
"""

import json
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from paramserver.consistency import as_local_steps
from paramserver.journal.disk_journal import DiskJournal
from paramserver.journal.files import JournalError
from paramserver.journal.recovery import has_entries, list_journal_folders
from paramserver.protocol.messages import OBSERVER, Kind, Message
from paramserver.running.job import Job, Outcome, Result, ServerReport, assemble_result
from paramserver.running.processes import Processes, ReportLosses
from paramserver.transport.connection import GRACE_SECONDS
from paramserver.transport.zeromq import ZeroMQServer
from paramserver.transport.zeromq_connection import Keys, ZeroMQConnection
from paramserver.worker import Worker


def open_server(
    job: Job, number: int, address: str, *, journal: str | Path | None, keys: Keys | None = None
) -> ZeroMQServer:
    """Return server `number` of a job, bound to `address` and restored from its journal, if any.

    `journal` is the folder that contains the journals of all servers; None writes no journal.
    Raises `ValueError` if the job has no such server.
    """
    if not 0 <= number < job.servers:
        raise ValueError(
            f"expected a server number from 0 to {job.servers - 1}, because the job has "
            f"{job.servers} servers, got {number}"
        )
    server = job.server(job.shards()[number], elastic=True)
    disk_journal = None
    if journal is not None:
        folder = Path(journal) / f"server-{number}"
        disk_journal = DiskJournal.start(folder, server.core, fsync=job.fsync)
    return ZeroMQServer(server.core, address, keys=keys, journal=disk_journal)


@contextmanager
def join_servers(
    job: Job,
    rank: int,
    addresses: Sequence[str],
    *,
    keys: Keys | None = None,
    checkpoint: str | Path | None = None,
) -> Iterator[Worker]:
    """Yield a worker that has joined the servers at `addresses`, in the order of their shards.

    Raises:
        ValueError: the number of addresses is not the number of servers.
    """
    with (
        _open_connections(job, rank, addresses, keys) as connections,
        job.worker(rank, connections, checkpoint) as worker,
    ):
        yield worker


@contextmanager
def _open_connections(
    job: Job, rank: int, addresses: Sequence[str], keys: Keys | None
) -> Iterator[list[ZeroMQConnection]]:
    session = secrets.randbits(40)
    shards = job.shards()
    if len(addresses) != len(shards):
        raise ValueError(f"expected {len(shards)} addresses, one per server, got {len(addresses)}")
    with ExitStack() as stack:
        connections = []
        for address, shard in zip(addresses, shards, strict=True):
            connection = ZeroMQConnection(
                address, rank, shard.buffer_bytes, session=session, timeout=job.timeout, keys=keys
            )
            connections.append(stack.enter_context(closing(connection)))
        yield connections


def read_final_state(
    job: Job, addresses: Sequence[str], keys: Keys | None = None
) -> list[ServerReport]:
    """Return the parameters and staleness counts of all servers at the same version."""
    reports = []
    with _open_connections(job, OBSERVER, addresses, keys) as connections:
        log = connections[0].request(Message(Kind.SYNC)).text
        for connection in connections:
            answer = connection.request(Message(Kind.END, text=log))
            counts = json.loads(answer.text)
            staleness = Counter({int(key): count for key, count in counts.items()})
            parameters = connection.parameters.numpy().tobytes()
            reports.append(ServerReport(parameters, answer.number, staleness))
    return reports


def run_on_zeromq(
    job: Job, restarts: int, journal: str | Path | None, context: BaseContext
) -> Result:
    """Run a job as `run` does; restart processes that die, at most `restarts` times in total."""
    packed = job.pack()
    shards = job.shards()
    if journal is not None:
        _require_journals(Path(journal), job.servers)
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(context, folder, job.timeout + GRACE_SECONDS) as processes,
    ):
        addresses = [f"ipc://{folder}/server-{i}" for i in range(job.servers)]
        journal_folder = str(journal or Path(folder) / "journal") if restarts or journal else None
        for i, address in enumerate(addresses):
            processes.start(f"server {i}", _serve, packed, i, address, journal_folder)
        workers = [f"worker {w}" for w in range(job.workers)]
        for w, name in enumerate(workers):
            processes.start(name, _run_worker, packed, w, addresses, journal_folder)
        ended: dict[str, Outcome] = {}
        final_state: Future[list[ServerReport]] | None = None
        # Read in a thread, because this loop may have to restart a server in the meantime.
        reader = ThreadPoolExecutor(1)
        try:
            while not (final_state and final_state.done()):
                for outcome in processes.iter_outcomes(0.02 if final_state else 0.5):
                    if outcome.exit_code is not None and restarts > 0:
                        restarts -= 1
                        processes.restart(outcome.name)
                        continue
                    ended[outcome.name] = outcome
                    may_be_missing = job.allow_missing and outcome.name in workers
                    if outcome.failed and not may_be_missing:
                        return assemble_result(job, shards, ended)
                if not final_state and all(name in ended for name in workers):
                    final_state = reader.submit(read_final_state, job, addresses)
            for i, server_report in enumerate(final_state.result()):
                ended[f"server {i}"] = Outcome(f"server {i}", value=server_report)
        finally:
            reader.shutdown(wait=False)
        return assemble_result(job, shards, ended)


def _require_journals(folder: Path, servers: int) -> None:
    """Raise `JournalError` unless the folder has a journal of each server, or is new."""
    journals = list_journal_folders(folder)
    if journals and len(journals) != servers and any(has_entries(path) for path in journals):
        raise JournalError(
            f"expected a journal of each of {servers} servers in {folder}, got "
            f"{', '.join(path.name for path in journals)}. Nothing was changed; restore a journal "
            "that was lost from a copy of the same time, or run `python -m paramserver convert` "
            "for another number of servers"
        )
    checkpoints = sorted(folder.glob("worker-*"))
    if checkpoints and not journals:
        raise JournalError(
            f"expected a journal of each server in {folder}, which contains {checkpoints[0].name} "
            "of a worker; restore them, or pass another folder"
        )


def _serve(
    packed: bytes, number: int, address: str, journal: str | None, *report: ReportLosses
) -> None:
    open_server(Job.unpack(packed), number, address, journal=journal).serve(*report)


def _run_worker(
    packed: bytes,
    rank: int,
    addresses: Sequence[str],
    journal: str | None,
    report_join: Callable[[], object],
) -> Any:
    job = Job.unpack(packed)
    checkpoint = None
    if journal is not None and as_local_steps(job.consistency):
        Path(journal).mkdir(parents=True, exist_ok=True)
        checkpoint = f"{journal}/worker-{rank}"
    with join_servers(job, rank, addresses, checkpoint=checkpoint) as worker:
        report_join()
        return job.train(worker, *job.args)

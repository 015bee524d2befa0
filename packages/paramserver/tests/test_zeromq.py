"""Killed processes are restarted, and no push is lost or applied twice."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Job,
    LocalSteps,
    PeerLost,
    StaleSynchronous,
    run,
)
from paramserver import __main__ as command_line
from paramserver.journal.disk_journal import DiskJournal
from paramserver.protocol.messages import Kind, Message
from paramserver.running import launch, supervise
from paramserver.running.supervise import join_servers, open_server, read_final_state
from paramserver.transport import zeromq, zeromq_connection
from paramserver.transport.zeromq_connection import Keys, ZeroMQConnection
from paramserver_training import (
    SGD,
    assert_equal_parameters,
    build_model,
    draw_batch,
    train_alone,
)

zmq = pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is not installed")


UNIT_SGD = partial(torch.optim.SGD, lr=1.0)


class Vector(nn.Module):
    """Each push of worker w adds one to element w of every row."""

    def __init__(self, workers=3, rows=20):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(rows, workers, dtype=torch.float64))


def count(worker, steps, seconds):
    """Push until `steps` pushes of this rank are accepted, including those before restarts."""
    while worker.pushes < steps:
        worker.pull()
        rows = worker.module.x
        assert (rows == rows[0]).all()  # one version
        worker.module.x.grad = torch.zeros_like(rows)
        worker.module.x.grad[:, worker.rank] = -1.0
        time.sleep(seconds)
        worker.push()
    return worker.pushes


def run_and_kill(consistency, kills, seed, steps, servers=2, longest_pause=0.6):
    """Return the result of a run during which processes are killed, and their names.

    The pauses before the kills take 0.05 to `longest_pause` seconds.
    """
    chance = random.Random(seed)
    killed = []
    done = threading.Event()

    def killer():
        while len(killed) < kills and not done.wait(chance.uniform(0.05, longest_pause)):
            children = [
                p for p in multiprocessing.active_children() if p.name[:6] in ("server", "worker")
            ]
            if children:
                victim = chance.choice(children)
                killed.append(victim.name)
                os.kill(victim.pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        result = run(
            count,
            Vector(),
            UNIT_SGD,
            consistency,
            args=(steps, 0.02),
            workers=3,
            servers=servers,
            transport="zeromq",
            restarts=kills + 1,
            timeout=120.0,
        )
    finally:
        done.set()
        thread.join()
    return result, killed


@pytest.mark.parametrize(
    "consistency",
    [pytest.param(Asynchronous(), marks=pytest.mark.exhaustive), StaleSynchronous(2)],
    ids=repr,
)
def test_nothing_is_lost_or_doubled_when_processes_are_killed(consistency):
    result, killed = run_and_kill(consistency, 1, seed=1, steps=16)
    assert killed
    assert result.values == [16, 16, 16]
    assert result.versions == [48, 48]
    assert result.parameters["x"].unique().tolist() == [16.0]


def test_bulk_synchronous_training_survives_a_kill():
    result, killed = run_and_kill(BulkSynchronous(), 1, seed=2, steps=16)
    assert killed
    assert result.values == [16, 16, 16]
    assert result.versions == [16, 16]  # no step was applied without a worker
    x = result.parameters["x"]
    assert (x == x[0]).all()
    torch.testing.assert_close(x[0], torch.full((3,), 16 / 3, dtype=torch.float64))


def train_from_position(worker, steps, marker=None):
    """Train this rank up to step `steps`; worker 1 kills itself once, when it creates `marker`."""
    for step in range(worker.position, steps):
        worker.pull()
        inputs, targets = draw_batch(step, worker.rank)
        F.mse_loss(worker.module(inputs), targets).backward()
        if worker.rank == 1 and step == 3 and marker and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.push()
    return worker.pushes


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_bulk_synchronous_steps_wait_for_a_restarted_worker(servers, tmp_path):
    result = run(
        train_from_position,
        build_model(),
        SGD,
        args=(6, tmp_path / "marker"),
        workers=2,
        servers=servers,
        transport="zeromq",
        restarts=1,
    )
    assert (tmp_path / "marker").exists()
    assert_equal_parameters(result.parameters, train_alone(6, 2, SGD))
    assert result.versions == [6] * servers
    assert result.values == [6, 6]


def test_a_continued_run_equals_an_undisturbed_one(tmp_path):
    for steps in (3, 6):
        result = run(
            train_from_position,
            build_model(),
            SGD,
            args=(steps,),
            workers=2,
            servers=2,
            transport="zeromq",
            journal=tmp_path,
        )
        assert_equal_parameters(result.parameters, train_alone(steps, 2, SGD))
        assert result.versions == [steps] * 2


def test_a_continued_run_waits_for_additional_workers(tmp_path):
    """Worker 2 is new in the second run, in which all three contribute to each of its two steps."""
    options = {"transport": "zeromq", "journal": tmp_path}
    run(count, Vector(), UNIT_SGD, args=(3, 0.0), workers=2, **options)
    result = run(count_more, Vector(), UNIT_SGD, args=(2,), workers=3, **options)
    assert result.versions == [5]
    expected = torch.tensor([3 / 2 + 2 / 3, 3 / 2 + 2 / 3, 2 / 3], dtype=torch.float64)
    torch.testing.assert_close(result.parameters["x"][0], expected)


def count_more(worker, steps):
    return count(worker, worker.pushes + steps, 0.0)


def test_a_step_is_not_completed_without_a_lost_worker(served):
    job = Job(count, Vector(2), UNIT_SGD, workers=2, timeout=0.5)
    server = served(job)
    with ExitStack() as stack:
        first = stack.enter_context(join_servers(job, 0, [server.address]))
        second = stack.enter_context(join_servers(job, 1, [server.address]))
        count(first, 1, 0.0)
        second.abort("its machine is gone")
        for connection in second._connections:
            connection.close()
        with pytest.raises(
            TimeoutError, match=r"at clock 1 for worker 1 at clock 0, silent for 0.5 s"
        ):
            first.pull()
        assert server.core.replica.version == 0
        with join_servers(job, 1, [server.address]) as restarted:
            count(restarted, 1, 0.0)
            first.pull()
            assert first.module.x[0].tolist() == [0.5, 0.5]
            first.leave()
        for worker in (first, second):
            worker.finish = lambda: None


def test_a_step_may_be_completed_without_a_lost_worker(served):
    job = Job(count, Vector(2), UNIT_SGD, workers=2, timeout=0.5, allow_missing=True)
    server = served(job)
    with ExitStack() as stack:
        first = stack.enter_context(join_servers(job, 0, [server.address]))
        second = stack.enter_context(join_servers(job, 1, [server.address]))
        count(first, 1, 0.0)
        second.abort("its machine is gone")
        first.pull()
        # The mean of the gradients of one worker.
        assert first.module.x[0].tolist() == [1.0, 0.0]
        assert server.core.replica.version == 1
        for worker in (first, second):
            worker.finish = lambda: None


def test_a_suspended_process_requests_again_before_it_gives_up(served, monkeypatch):
    """The clock of worker and server jumps by an hour while a request waits for its answer."""
    job = Job(count, Vector(2), UNIT_SGD, workers=2, timeout=5.0)
    jumps = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumps[0])
    monkeypatch.setattr(zeromq, "time", clock)
    monkeypatch.setattr(zeromq_connection, "time", clock)
    server = served(job)
    with ExitStack() as stack:
        first = stack.enter_context(join_servers(job, 0, [server.address]))
        second = stack.enter_context(join_servers(job, 1, [server.address]))
        count(first, 1, 0.0)
        pulls = threading.Thread(target=first.pull)
        pulls.start()
        while 0 not in server.core.waits.waiting:
            time.sleep(0.01)
        jumps[0] = 3600.0
        pulls.join(0.5)
        assert pulls.is_alive()
        count(second, 1, 0.0)
        pulls.join()
        assert first.version == 1
        second.leave()
        second.finish = lambda: None


def test_a_suspended_worker_requests_again_although_no_message_arrived(served, monkeypatch):
    """The clock jumps by an hour while the server is down; it answers when it is back."""
    jumps = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumps[0])
    monkeypatch.setattr(zeromq, "time", clock)
    monkeypatch.setattr(zeromq_connection, "time", clock)
    monkeypatch.setattr(zeromq_connection, "_RETRY_SECONDS", 0.1)
    server = served(make_job())
    with join_servers(make_job(), 0, [server.address]) as worker:
        server.stop()
        server.threads[-1].join()
        with ThreadPoolExecutor(1) as pool:
            version = pool.submit(worker.pull)
            jumps[0] = 3600.0
            with pytest.raises(TimeoutError):
                version.result(0.5)  # it has polled at least once after the jump
            server.serve_again()
            assert version.result() == 0


class SuspendedSocket:
    """A socket whose first poll lasts an hour, because its process is suspended."""

    def __init__(self, socket, jumps):
        self._socket = socket
        self._jumps = jumps

    def poll(self, milliseconds):
        if not self._jumps[0]:
            self._jumps[0] = 3600.0
            return 0
        return self._socket.poll(milliseconds)

    def __getattr__(self, name):
        return getattr(self._socket, name)


@pytest.mark.parametrize("timeout", [1.5, 2.0, 60.0])
def test_a_worker_that_is_suspended_during_a_poll_requests_again(served, monkeypatch, timeout):
    jumps = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumps[0])
    monkeypatch.setattr(zeromq_connection, "time", clock)
    job = replace(make_job(), timeout=timeout)
    server = served(job)
    with join_servers(job, 0, [server.address]) as worker:
        connection = worker._connections[0]
        connection._socket = SuspendedSocket(connection._socket, jumps)
        assert worker.pull() == 0
        assert jumps == [3600.0]


@pytest.mark.parametrize(
    "name", ["server 0", pytest.param("server 1", marks=pytest.mark.exhaustive)]
)
def test_server_killed_after_all_workers_finished_is_restarted(monkeypatch, name):
    def kill_and_read(*arguments):
        (victim,) = (p for p in multiprocessing.active_children() if p.name == name)
        os.kill(victim.pid, signal.SIGKILL)
        return read_final_state(*arguments)

    monkeypatch.setattr(supervise, "read_final_state", kill_and_read)
    result = run(
        count,
        Vector(2),
        UNIT_SGD,
        Asynchronous(),
        args=(3, 0.0),
        workers=2,
        servers=2,
        transport="zeromq",
        restarts=1,
        timeout=30.0,
    )
    assert result.versions == [6, 6]
    assert result.parameters["x"].unique().tolist() == [3.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "policy",
    [Asynchronous(), StaleSynchronous(1), BulkSynchronous(), LocalSteps(2, UNIT_SGD)],
    ids=["asynchronous", "stale", "bulk", "local"],
)
def test_two_hundred_kills(policy, seed):
    # The 80 steps take at least 1.6 s, longer than five pauses.
    result, killed = run_and_kill(policy, 5, seed=100 + seed, steps=80, longest_pause=0.3)
    assert len(killed) == 5
    assert result.values == [80, 80, 80]
    x = result.parameters["x"]
    assert (x == x[0]).all()
    if policy.averages:  # each update is the mean of all three workers
        added = policy.steps if isinstance(policy, LocalSteps) else 1
        assert result.versions == [80, 80]
        torch.testing.assert_close(x[0], torch.full((3,), added * 80 / 3, dtype=torch.float64))
    else:
        assert x.unique().tolist() == [80.0]


@pytest.fixture
def served():
    """Return a function that serves a job with one server in a thread."""
    open_servers = []

    def serve(job, keys=None, address="tcp://127.0.0.1:*"):
        server = open_server(job, 0, address, journal=None, keys=keys)
        server.threads = []
        server.serve_again = partial(serve_again, server)
        server.serve_again()
        open_servers.append(server)
        return server

    def serve_again(server):
        server._stopped.clear()
        server.threads.append(threading.Thread(target=server.serve))
        server.threads[-1].start()

    yield serve
    for server in open_servers:
        server.stop()
        server.threads[-1].join()
        server.close()


def make_job(**options):
    return Job(count, Vector(), UNIT_SGD, Asynchronous(), workers=0, timeout=5.0, **options)


def test_invalid_and_incomplete_messages_do_not_disturb_a_job(served):
    server = served(make_job())
    port = int(server.address.rsplit(":", 1)[1])
    slow = socket.create_connection(("127.0.0.1", port))
    slow.sendall(b"\xff\x00")  # the start of a greeting
    chance = random.Random(0)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(chance.randbytes(200))
    context = zmq.Context()
    unknown = context.socket(zmq.DEALER)
    unknown.connect(server.address)
    for frames in (
        [b""],
        [b"{"],
        [b"[1,2,3]"],
        [b'[0,0,0,0,3,0,0,0,0,0,-1,-1,""]', b"short"],
        [b'[0,0,0,0,3,0,0,0,0,-9,-1,-1,""]', b"short"],
        [b"[0,0,0,77]", b"a later chunk"],
        [b'[0,0,0,0,3,0,0,0,0,0,-1,-1,""]', *[b"x"] * 8],
    ):
        unknown.send_multipart(frames)
    with join_servers(make_job(), 1, [server.address]) as worker:
        assert count(worker, 5, 0.0) == 5
    unknown.close(linger=0)
    context.term()
    slow.close()
    assert read_final_state(make_job(), [server.address])[0].version == 5


def connect_raw(port):
    """Return a connection to the server that has completed the handshake of ZMTP 3.0."""
    raw = socket.create_connection(("127.0.0.1", port))
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    assert len(raw.recv(64, socket.MSG_WAITALL)) == 64
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    raw.sendall(bytes([4, len(ready)]) + ready)
    assert raw.recv(1000)
    return raw


def test_a_frame_is_limited_before_it_is_stored(served):
    """A connection that announces a frame of more than 2 MiB is closed at once."""
    server = served(make_job())
    port = int(server.address.rsplit(":", 1)[1])
    largest = zeromq.CHUNK_BYTES + 2**20
    for size, is_closed in ((largest, False), (largest + 1, True), (2**62, True)):
        with connect_raw(port) as raw:
            raw.settimeout(0.2 if not is_closed else 30)
            raw.sendall(b"\x02" + struct.pack(">Q", size) + b"x")
            if is_closed:
                with suppress(ConnectionResetError):
                    assert raw.recv(1) == b""
            else:
                with pytest.raises(TimeoutError):
                    raw.recv(1)
    with join_servers(make_job(), 0, [server.address]) as worker:
        assert count(worker, 3, 0.0) == 3


def test_a_message_of_many_frames_is_dropped(served):
    server = served(make_job())
    with join_servers(make_job(), 0, [server.address]) as worker:
        with zmq.Context() as context, context.socket(zmq.DEALER) as unknown:
            unknown.connect(server.address)
            unknown.send_multipart([b'[0,0,1,0,3,0,0,0,0,0,-1,-1,""]', *[b"x"] * 10_000])
            unknown.send(b'[0,0,2,0,3,0,0,0,0,0,-1,-1,""]')
            assert unknown.poll(30_000)
            assert json.loads(unknown.recv())[:2] == [0, 2]  # the first message has no answer
        assert count(worker, 3, 0.0) == 3


def read_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("connections", [50, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_many_connections_neither_disturb_a_job_nor_remain(served, connections):
    server = served(make_job())
    port = int(server.address.rsplit(":", 1)[1])
    random_bytes = random.Random(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with join_servers(make_job(), 0, [server.address]) as worker:
            count(worker, 2, 0.0)
            before = len(os.listdir("/proc/self/fd"))
            resident = read_resident_bytes()
            with ExitStack() as stack:
                for i in range(connections):
                    raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    # The signature of a greeting for every third one, or random bytes.
                    start = b"\xff" + bytes(8) + b"\x7f\x03" if i % 3 == 0 else b""
                    with suppress(ConnectionError):  # the server has closed the connection
                        raw.sendall(start + random_bytes.randbytes(i % 200))
                assert count(worker, 20, 0.0) == 20
            deadline = time.monotonic() + 60
            while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(os.listdir("/proc/self/fd")) <= before
            assert read_resident_bytes() - resident < 2**25
            assert count(worker, 22, 0.0) == 22
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.core.ledger.members.keys() == {0}
    assert read_final_state(make_job(), [server.address])[0].version == 22


def test_only_workers_with_known_keys_may_join(served, monkeypatch):
    monkeypatch.setattr(zeromq_connection, "_RETRY_SECONDS", 0.2)
    (server_public, server_secret), (ours, our_secret), (theirs, their_secret) = (
        tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3)
    )
    server = served(make_job(), Keys(server_public, server_secret, workers={0: ours, 1: ours}))
    known = Keys(ours, our_secret, server_public)
    with join_servers(make_job(), 0, [server.address], keys=known) as worker:
        assert count(worker, 3, 0.0) == 3
    unknown = Keys(theirs, their_secret, server_public)
    impatient = replace(make_job(), timeout=0.3)
    for keys in (unknown, None):
        with (
            pytest.raises(PeerLost, match=r"was silent for 0\.3 s.*check that it knows this key"),
            join_servers(impatient, 1, [server.address], keys=keys),
        ):
            pass


def test_a_key_may_act_only_as_its_ranks(served):
    (server_public, server_secret), (first, first_secret), (second, second_secret) = (
        tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3)
    )
    server = served(make_job(), Keys(server_public, server_secret, workers={0: first, 1: second}))
    of_first = Keys(first, first_secret, server_public)
    of_second = Keys(second, second_secret, server_public)
    with join_servers(make_job(), 0, [server.address], keys=of_first) as worker:
        count(worker, 2, 0.0)
        for rank in (0, 2):  # the rank of another worker, and a rank without a key
            with (
                pytest.raises(ValueError, match=f"a rank of this key, got one of worker {rank}"),
                join_servers(make_job(), rank, [server.address], keys=of_second),
            ):
                pass
        session = worker._connections[0].session
        for kind in (Kind.READ, Kind.STAGE, Kind.LEAVE):
            with pytest.raises(ValueError, match="a rank of this key, got one of worker 0"):
                send_request_as(
                    0, session, server.address, of_second, Message(kind, epoch=1, clock=2)
                )
        abort_as(0, session, server.address, of_second)  # has no effect
        with join_servers(make_job(), 1, [server.address], keys=of_second) as other:
            count(other, 2, 0.0)
            other.leave()
            other.finish = lambda: None
        count(worker, 4, 0.0)
        assert read_final_state(make_job(), [server.address], of_second)[0].version == 6
    assert server.core.ledger.members.keys() == {0, 1}
    assert server.core.ledger.members[0].epoch == 1


def test_a_later_chunk_of_another_key_is_ignored(tmp_path):
    (server_public, server_secret), (first, _), (second, _) = (
        tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3)
    )
    job = Job(count, Vector(1, 2 * zeromq.CHUNK_BYTES // 8), UNIT_SGD, Asynchronous(), workers=0)
    keys = Keys(server_public, server_secret, workers={0: first, 1: second})
    server = open_server(job, 0, f"ipc://{tmp_path}/s", journal=None, keys=keys)

    def receive(key, number, start, fields, chunk=b""):
        head = json.dumps([0, 5, number, start, *fields]).encode()
        user = {"User-Id": key}
        frames = [SimpleNamespace(bytes=raw, buffer=raw, get=user.get) for raw in (b"w", head)]
        server._receive([*frames, SimpleNamespace(buffer=memoryview(bytearray(chunk)))])

    layout = server.core.replica.layout
    receive(first, 1, 0, Message(Kind.JOIN, clock=5, text=layout).to_fields())
    push = Message(Kind.STAGE, epoch=1, size=2 * zeromq.CHUNK_BYTES)
    receive(first, 2, 0, push.to_fields(), bytes(zeromq.CHUNK_BYTES))
    receive(second, 2, zeromq.CHUNK_BYTES, (), b"\xff" * zeromq.CHUNK_BYTES)
    assert server.core.replica.version == 0
    assert server._incoming[0].data.received == zeromq.CHUNK_BYTES
    receive(first, 2, zeromq.CHUNK_BYTES, (), bytes(zeromq.CHUNK_BYTES))
    receive(first, 3, 0, Message(Kind.COMMIT, epoch=1).to_fields())
    assert server.core.replica.version == 1
    server.close()


def send_request_as(rank, session, address, keys, message):
    """Send a request as the worker `rank`, in its session, with keys of another worker."""
    connection = ZeroMQConnection(address, rank, 0, session=1, keys=keys)
    connection.session = session
    try:
        connection.request(message)
    finally:
        connection.close()


def abort_as(rank, session, address, keys):
    """Report that the worker `rank` has failed, in its session, with keys of another worker."""
    connection = ZeroMQConnection(address, rank, 0, session=1, keys=keys)
    # Not earlier: the connection would replace the worker's connections, which have its session.
    connection.session = session
    connection.abort("an attack")
    connection.close()


def test_rejoined_worker_continues_at_its_position(served):
    policy = LocalSteps(6, fragments=2)
    job = Job(run_local_steps, nn.Linear(2, 2), UNIT_SGD, policy, workers=0, timeout=5.0)
    server = served(job)
    with join_servers(job, 3, [server.address]) as worker:
        run_local_steps(worker, 7)  # two exchanges of three steps, and one step that is lost
        worker.leave()
        worker.finish = lambda: None
    with join_servers(job, 3, [server.address]) as worker:
        assert worker.position == 6
        run_local_steps(worker, 12)
        assert worker.position == 12


def run_local_steps(worker, steps):
    for _ in range(worker.position, steps):
        worker.pull()
        worker.module(torch.ones(1, 2)).sum().backward()
        worker.push()


@pytest.mark.parametrize(
    "policy",
    [pytest.param(Asynchronous(), marks=pytest.mark.exhaustive), BulkSynchronous()],
    ids=["async", "bulk"],
)
def test_a_server_waits_while_its_disk_is_full(policy, tmp_path, monkeypatch, caplog):
    job = Job(count, Vector(1), UNIT_SGD, policy, workers=1, timeout=30.0)
    server = open_server(job, 0, f"ipc://{tmp_path}/s", journal=tmp_path / "state")
    append = DiskJournal._append
    is_full = threading.Event()
    was_refused = threading.Event()

    def append_if_there_is_room(self, kind, parts):
        if is_full.is_set():
            was_refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, kind, parts)

    monkeypatch.setattr(DiskJournal, "_append", append_if_there_is_room)
    thread = threading.Thread(target=server.serve)
    thread.start()
    with ThreadPoolExecutor(1) as pool, join_servers(job, 0, [server.address]) as worker:
        count(worker, 2, 0.0)
        is_full.set()
        pushes = pool.submit(count, worker, 5, 0.0)
        assert was_refused.wait(30)
        with pytest.raises(TimeoutError):
            pushes.result(0.2)
        assert server.core.replica.version <= 3
        assert "No space left on device; all workers wait until there is room" in caplog.text
        is_full.clear()
        assert pushes.result() == 5
    server.stop()
    thread.join()
    server.close()
    restored = open_server(job, 0, f"ipc://{tmp_path}/r", journal=tmp_path / "state")
    assert restored.core.replica.version == 5
    restored.close()


def test_a_lost_journal_of_one_server_is_refused_before_the_others_change(tmp_path):
    options = {"workers": 1, "servers": 3, "transport": "zeromq", "journal": tmp_path}
    run(count, Vector(1), UNIT_SGD, args=(2, 0.0), **options)
    with pytest.raises(RuntimeError, match=r"each of 4 .* got server-0, server-1, server-2"):
        run(count, Vector(1), UNIT_SGD, args=(4, 0.0), **options | {"servers": 4})
    shutil.rmtree(tmp_path / "server-1")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*-*") if path.is_file()}
    with pytest.raises(RuntimeError, match=r"each of 3 .* got server-0, server-2"):
        run(count, Vector(1), UNIT_SGD, args=(4, 0.0), **options)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*-*") if path.is_file()}
    assert before == after


def test_fsync_of_a_job_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(1), fsync(descriptor)))

    def syncs_per_join(job, folder):
        server = open_server(job, 0, f"ipc://{tmp_path}/s", journal=folder)
        synced.clear()
        layout = server.core.replica.layout
        server.core.handle(0, Message(Kind.JOIN, clock=5, text=layout), None, 0.0)
        server.close()
        return len(synced)

    assert syncs_per_join(make_job(), tmp_path / "a") == 0
    assert syncs_per_join(make_job(fsync=True), tmp_path / "b") == 1


def test_options_of_a_job_reach_run_and_serve(tmp_path, monkeypatch):
    jobs = []

    def capture(job, *args, **kwargs):
        jobs.append(job)
        raise RuntimeError("captured")

    monkeypatch.setattr(launch, "run_on_zeromq", capture)
    with pytest.raises(RuntimeError, match="captured"):
        run(
            count,
            Vector(),
            UNIT_SGD,
            transport="zeromq",
            journal=tmp_path,
            fsync=True,
            allow_missing=True,
        )
    with pytest.raises(ValueError, match="expected a journal with fsync=True"):
        run(count, Vector(), UNIT_SGD, transport="zeromq", fsync=True)
    monkeypatch.setattr(command_line, "open_server", capture)
    monkeypatch.setattr(command_line, "_load_job", lambda _: make_job())
    command = ["serve", "mine:job", "--address", "ipc://x", "--journal", str(tmp_path)]
    for options in ((), ("--fsync",), ("--allow-missing",)):
        assert command_line.main([*command, *options]) == 2
    options_of_jobs = [(job.fsync, job.allow_missing) for job in jobs]
    assert options_of_jobs == [(True, True), (False, False), (True, False), (False, True)]


def test_command_line_names_the_argument_that_is_wrong(tmp_path, monkeypatch, capsys):
    def error_of(*command):
        assert command_line.main(command) == 2
        return capsys.readouterr().err

    serve = "--address", "ipc://x"
    for name in ("mine", "no_such_module:job", "math:job"):
        assert f"MODULE:FUNCTION, got '{name}'" in error_of("serve", name, *serve)
    monkeypatch.setattr(command_line, "_load_job", lambda _: make_job())
    for number in ("-1", "1"):
        error = error_of("serve", "mine:job", *serve, "--server", number)
        assert (
            f"expected a server number from 0 to 0, because the job has 1 servers, got {number}"
            in error
        )
    (tmp_path / "key.public").write_text("A" * 40)
    error = error_of(
        "join", "mine:job", *serve, "--rank", "0", "--keys", str(tmp_path / "key.public")
    )
    assert "pass the file that `keys FILE` wrote, not FILE.public" in error
    command_line.main(["keys", str(tmp_path / "pair")])
    both = "--keys", str(tmp_path / "pair"), "--peer"
    for command in (
        ("serve", "mine:job", *serve, *both, f"0={tmp_path / 'pair'}"),
        ("join", "mine:job", *serve, "--rank", "0", *both, str(tmp_path / "pair")),
    ):
        assert "expected a public key of 40 characters in" in error_of(*command)
    key = f"0={tmp_path / 'pair.public'}"
    twice = "serve", "mine:job", *serve, *both, key, "--peer", key
    assert "expected --peer once per rank, got 0=" in error_of(*twice)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "127.0.0.1.example.com", "localhost.example.com"])
def test_an_open_address_needs_keys(host):
    with pytest.raises(ValueError, match="pass keys, or bind tcp://127"):
        open_server(make_job(), 0, f"tcp://{host}:5555", journal=None)


def test_loopback_addresses_need_no_keys(served):
    for host in ("localhost", "127.0.0.2"):
        address = served(make_job(), address=f"tcp://{host}:*").address
        with join_servers(make_job(), 0, [address]) as worker:
            assert count(worker, 1, 0.0) == 1


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_an_address_that_is_taken_is_named(served, transport, tmp_path):
    new = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s"
    address = served(make_job(), address=new).address
    with pytest.raises(RuntimeError, match=f"listen at {address}: .*Address already in use"):
        open_server(make_job(), 0, address, journal=None)
    with join_servers(make_job(), 0, [address]) as worker:
        assert count(worker, 1, 0.0) == 1


def test_workers_join_and_leave_while_others_train(served):
    server = served(make_job())
    with join_servers(make_job(), 0, [server.address]) as first:
        count(first, 3, 0.0)
        with join_servers(make_job(), 1, [server.address]) as second:
            assert second.pull() >= 3
            assert second.module.x[0, 0] == 3  # it has caught up
            count(second, 4, 0.0)
            second.leave()
            second.finish = lambda: None
        count(first, 6, 0.0)
    with join_servers(make_job(), 1, [server.address]) as rejoined:
        assert rejoined.pushes == 4  # its position in the data
    assert read_final_state(make_job(), [server.address])[0].version == 10


def test_restarted_server_keeps_its_random_initial_parameters(tmp_path):
    def opened():  # as in `serve`, the job is rebuilt each time
        job = Job(count, nn.Linear(3, 3), UNIT_SGD, Asynchronous(), workers=0)
        server = open_server(job, 0, f"ipc://{tmp_path}/x", journal=tmp_path / "state")
        server.close()
        return server.core.replica.newest

    assert torch.equal(opened(), opened())


@pytest.mark.exhaustive
def test_serve_and_join_by_hand(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "paramserver"]
    for name in ("server", "worker"):
        subprocess.run([*command, "keys", str(tmp_path / name)], check=True, cwd=tmp_path)
    (tmp_path / "by_hand.py").write_text(
        "from test_zeromq import Vector, count, UNIT_SGD\nfrom paramserver import *\n"
        "def job():\n"
        "    return Job(count, Vector(), UNIT_SGD, Asynchronous(), args=(4, 0.0), workers=0)\n"
    )
    serve = [
        *command,
        "serve",
        "by_hand:job",
        "--address",
        "tcp://127.0.0.1:*",
        "--journal",
        "state",
        "--keys",
        "server",
        *(f"--peer={rank}=worker.public" for rank in range(3)),
    ]
    for ranks in ("01", "2"):  # the second server continues from the journal of the first one
        server = subprocess.Popen(
            serve, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
        )
        address = server.stdout.readline().split()[-1]
        for rank in ranks:
            join = [
                *command,
                "join",
                "by_hand:job",
                "--address",
                address,
                "--rank",
                rank,
                "--keys",
                "worker",
                "--peer",
                "server.public",
            ]
            done = subprocess.run(
                join, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
            )
            assert done.stdout.strip() == "4", done.stderr
        server.terminate()
        assert server.wait(30) == 0
        server.stdout.close()
    restored = open_server(
        Job(count, Vector(), UNIT_SGD, Asynchronous(), workers=0),
        0,
        f"ipc://{tmp_path}/x",
        journal=tmp_path / "state",
    )
    assert restored.core.replica.version == 12
    restored.close()

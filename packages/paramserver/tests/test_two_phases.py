"""Several servers apply a push everywhere or nowhere, and a pull returns one version."""

import copy
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Server,
    StaleSynchronous,
    Worker,
    partition,
    run,
)
from paramserver.protocol.ledger import Ledger
from paramserver.protocol.log import Accept, Join, Leave, Log, Norm, Read, Write
from paramserver.protocol.messages import Kind, Message
from paramserver.running.serving import serve
from paramserver.transport.connection import RemoteConnection
from paramserver.transport.shared_memory import create_channel_pairs
from paramserver_training import run_in_threads, wait_until_started

UNIT_SGD = partial(torch.optim.SGD, lr=1.0)
SIZE = 60


class Vector(nn.Module):
    """Every push adds one to all elements, so different values are different versions."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))

    def push_one(self, worker):
        self.x.grad = torch.full_like(self.x, -1.0)
        worker.push()

    def value(self):
        assert self.x.min() == self.x.max(), self.x
        return int(self.x[0])


def create_servers(module, servers, workers, consistency, timeout=0.0):
    parameters = dict(module.named_parameters())
    return [
        Server(
            parameters,
            UNIT_SGD,
            consistency,
            workers=workers,
            shard=shard,
            timeout=timeout,
            allow_missing=True,
        )
        for shard in partition(parameters, servers)
    ]


class Dies(BaseException):
    """The simulated end of a worker process."""


class DyingConnection:
    """A connection whose worker dies after sending a number of requests."""

    session = None

    def __init__(self, connection, life):
        self._connection, self._life = connection, life

        self.parameters, self.gradients = connection.parameters, connection.gradients
        self.read = connection.read

    def request(self, message, written=()):
        if self._life["requests"] == 0:
            raise Dies
        self._life["requests"] -= 1
        return self._connection.request(message, written)


class Turns:
    """Workers that pull and push alternately, in any order."""

    def __init__(self, group, bound):
        self.group = group
        self.bound = bound
        self.alive = set(range(len(group)))
        #: Workers that have pulled since their last push.
        self.may_push = set()
        self.newest = 0

    def step(self, rank):
        """Let a worker push, or pull unless it would have to wait."""
        worker = self.group[rank]
        if rank not in self.alive:
            return
        if rank in self.may_push:
            worker.module.push_one(worker)
            self.may_push.remove(rank)
        elif worker.clock - min(self.group[w].clock for w in self.alive) <= self.bound:
            version = worker.pull()
            # The parameters are of one version, which is never older than the last one.
            assert worker.module.value() == version >= self.newest
            self.newest = version
            self.may_push.add(rank)


@settings(max_examples=8)
@given(data=st.data())
def test_a_death_at_any_message_leaves_no_half_push(data):
    servers, workers = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 3))
    consistency = data.draw(
        st.sampled_from([Asynchronous(), StaleSynchronous(1), BulkSynchronous()])
    )
    hosts = create_servers(Vector(), servers, workers, consistency)
    lives = [{"requests": 10**9} for _ in range(workers)]
    group = [
        Worker(Vector(), [DyingConnection(h.connect(rank), lives[rank]) for h in hosts], rank=rank)
        for rank in range(workers)
    ]
    for life in lives[1:]:
        life["requests"] = data.draw(st.integers(0, 30))
    turns = Turns(group, consistency.bound)
    for rank in data.draw(st.lists(st.integers(0, workers - 1), min_size=20, max_size=50)):
        try:
            turns.step(rank)
        except Dies:
            turns.alive.remove(rank)
            for host in data.draw(st.permutations(hosts)):
                host.mark_lost(rank, "its process has ended")
    for rank in turns.alive:
        lives[rank]["requests"] = 10**9
    for rank in turns.alive - turns.may_push:
        hosts[0].mark_lost(rank, "the end")  # so that no worker waits for it
    for rank in turns.alive & turns.may_push:
        group[rank].module.push_one(group[rank])
    log = hosts[0].core.ledger.get_log_from(0)
    for host in hosts:
        host.core.replica.replay(log)
    assert len({host.version for host in hosts}) == 1
    elements = torch.cat([host.core.replica.newest.view(torch.float32) for host in hosts])
    assert set(elements.tolist()) <= {0.0, float(hosts[0].version)}  # padding and one version
    assert sum(hosts[0].staleness.values()) <= sum(worker.clock for worker in group) + workers


def die_in_third_push(worker):
    """Worker 1 dies in its third push, when the first server has its gradients."""
    values = []
    for step in range(6):
        worker.pull()
        values.append(worker.module.value())
        if worker.rank == 1 and step == 2:
            worker.module.x.grad = torch.full_like(worker.module.x, -1.0)
            worker._exchange.request(next(worker._exchange.session.push())[0])
            os._exit(3)
        worker.module.push_one(worker)
    return values


def test_a_process_that_dies_between_two_servers_leaves_nothing():
    result = run(
        die_in_third_push,
        Vector(),
        UNIT_SGD,
        Asynchronous(),
        workers=2,
        servers=2,
        allow_missing=True,
    )
    assert result.versions == [6 + 2] * 2
    assert result.parameters["x"].unique().tolist() == [8.0]
    assert result.lost == {1: "worker 1 died with exit code 3"}


@pytest.mark.parametrize(
    "consistency",
    [
        Asynchronous(),
        pytest.param(StaleSynchronous(2), marks=pytest.mark.exhaustive),
        BulkSynchronous(),
    ],
)
def test_a_pull_over_several_servers_reads_one_version(consistency):
    hosts = create_servers(Vector(200_000), 3, 3, consistency, timeout=60.0)
    seen = []

    def work(worker):
        for _ in range(10):
            version = worker.pull()
            seen.append((worker.module.value(), version))
            worker.module.push_one(worker)
        worker.finish()
        seen.append((worker.module.value(), worker.version))

    workers = [Worker(Vector(200_000), hosts, rank=rank) for rank in range(3)]
    run_in_threads(*(partial(work, worker) for worker in workers))
    assert all(value == version for value, version in seen)
    assert {host.version for host in hosts} == {10 if consistency.averages else 30}


def test_log_entries_are_discarded_after_all_servers_replay_them():
    hosts = create_servers(Vector(), 2, 2, Asynchronous())
    group = [Worker(Vector(), hosts, rank=rank) for rank in range(2)]
    for _ in range(50):
        for worker in group:
            worker.pull()
            worker.module.push_one(worker)
    log = hosts[0].core.ledger.get_log_from(0)
    assert log.stop == 200
    assert len(log.entries) < 10


@settings(max_examples=12)
@given(
    servers=st.integers(1, 3),
    where=st.integers(0, SIZE - 1),
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    kind=st.sampled_from([BulkSynchronous(), StaleSynchronous(0), Asynchronous()]),
)
def test_a_gradient_that_is_not_finite_is_refused_everywhere(servers, where, value, kind):
    hosts = create_servers(Vector(), servers, 2, kind)
    bad, good = (Worker(Vector(), hosts, rank=rank) for rank in range(2))
    for worker in (bad, good):
        worker.pull()
    bad.module.x.grad = torch.full((SIZE,), -1.0)
    bad.module.x.grad[where] = value
    with pytest.raises(ValueError, match=r"worker 0's gradient of x is not finite in 1 of"):
        bad.push()
    assert bad.module.x.grad is not None  # for inspection
    good.module.push_one(good)
    bad.module.push_one(bad)  # the same step with a finite gradient
    for worker in (bad, good):
        assert worker.pull() == (1 if kind.averages else 2)
        assert worker.module.value() == worker.version


def test_push_refused_by_one_server_is_discarded_by_all(monkeypatch):
    hosts = create_servers(Vector(), 2, 2, BulkSynchronous())
    bad, good = (Worker(Vector(), hosts, rank=rank) for rank in range(2))
    write, seconds = bad._payload.write, [0.3]
    writes_to_second_server = threading.Semaphore(0)

    def late(server):
        time.sleep(seconds[0] if server == 1 else 0)
        written = write(server)
        if server == 1:
            writes_to_second_server.release()
        return written

    for worker in (bad, good):
        worker.pull()
    monkeypatch.setattr(bad._payload, "write", late)
    bad.module.x.grad = torch.full((SIZE,), -1.0)
    bad.module.x.grad[0] = float("nan")
    with pytest.raises(ValueError, match="not finite in 1 of"):
        bad.push()
    seconds[0] = 0
    bad.module.push_one(bad)
    for _ in ("the refused push", "the accepted push"):
        assert writes_to_second_server.acquire(timeout=10)
    good.module.push_one(good)
    for worker in (good, bad):
        worker.pull()
        assert worker.module.value() == 1


def train_at_own_speed(worker, steps, seconds, folder):
    wait_until_started(folder, worker, 2)
    for _ in range(steps):
        worker.pull()
        worker.module.push_one(worker)
        if worker.rank == 1:
            time.sleep(seconds)
    return worker.rank


def test_run_waits_for_a_much_slower_worker(tmp_path):
    # The fast worker waits at the end for longer than the timeout; no step takes that long.
    result = run(
        train_at_own_speed,
        Vector(),
        UNIT_SGD,
        Asynchronous(),
        args=(6, 0.25, tmp_path),
        workers=2,
        servers=2,
        timeout=1.0,
    )
    assert result.values == [0, 1]
    assert result.versions == [12, 12]


def test_a_server_that_keeps_a_worker_waiting_is_not_blamed(monkeypatch):
    monkeypatch.setattr("paramserver.server._KEEP_ALIVE_SECONDS", 0.1)
    host = create_servers(Vector(), 1, 2, BulkSynchronous(), timeout=30.0)[0]
    channels = create_channel_pairs(["worker 0", "worker 1"], "server 0", host.shard.buffer_bytes)
    threads = serve(host, {w: pair[1] for w, pair in enumerate(channels)})
    slow, fast = (
        Worker(Vector(), [RemoteConnection(pair[0], 0.6)], rank=w)
        for w, pair in enumerate(channels)
    )
    fast.pull()
    fast.module.push_one(fast)
    pull = threading.Thread(target=fast.pull)
    pull.start()
    time.sleep(1.2)  # twice the time that the server may be silent
    slow.pull()
    slow.module.push_one(slow)
    pull.join(10)
    assert fast.module.value() == 1
    for worker in (slow, fast):
        worker.abort("the end")
    for thread in threads:
        thread.join(10)


def test_a_worker_that_waits_for_a_third_is_not_silent():
    # Worker 2 is slow, and workers 0 and 1 wait for it; neither of the two may be blamed.
    hosts = create_servers(Vector(), 1, 3, BulkSynchronous(), timeout=0.6)

    def work(worker):
        for _ in range(1 if worker.rank == 0 else 3):
            worker.pull()
            if worker.rank == 2:
                time.sleep(0.4)
            worker.module.push_one(worker)
        worker.finish()

    workers = [Worker(Vector(), hosts, rank=rank) for rank in range(3)]
    run_in_threads(*(partial(work, worker) for worker in workers))
    assert hosts[0].version == 3


NUMBER = st.integers(0, 10**12)
PUSH = st.tuples(NUMBER, NUMBER, NUMBER)


@settings(max_examples=15)
@given(
    start=NUMBER,
    entries=st.lists(
        st.one_of(
            st.builds(Join, NUMBER, NUMBER, NUMBER, NUMBER),
            st.builds(Accept, PUSH),
            st.builds(Read, NUMBER, NUMBER, NUMBER),
            st.builds(Leave, NUMBER),
            st.builds(Norm, st.floats(min_value=0.0)),
            st.builds(lambda pushes: Write(tuple(pushes), (3,) * len(pushes)), st.lists(PUSH)),
        )
    ),
)
def test_log_is_encoded_without_loss(start, entries):
    log = Log(start, tuple(entries))
    assert Log.from_text(log.to_text()) == log


@pytest.mark.parametrize("text", ['[0,["write",3]]', '[0,["fly",1]]', "[0,3]"])
def test_invalid_log_is_refused(text):
    with pytest.raises(ValueError, match="expected an entry of a ledger"):
        Log.from_text(text)


@pytest.mark.parametrize("text", ["[]", "7", "[1,2,3,4,5,6,7]", '[1,2,3,4,5,"x","y"]', "{", ""])
def test_invalid_message_text_is_refused(text):
    with pytest.raises(
        ValueError, match=r"expected the fields of a message|is not a valid Kind|Expecting"
    ):
        Message.from_text(text)


def test_saved_ledger_state_does_not_change_with_the_ledger():
    ledger = Ledger(3, BulkSynchronous())
    ledger.commit((0, 0, 0))
    saved = ledger.to_state()
    before = copy.deepcopy(saved)
    ledger.commit((1, 0, 0))
    assert saved == before
    ledger.commit((2, 0, 0))
    assert saved == before


@pytest.mark.parametrize("consistency", [BulkSynchronous(), Asynchronous()])
def test_a_worker_finishes_after_all_workers_of_a_restarted_job(consistency):
    """A worker that has nothing left to do also waits for workers that have not joined yet."""
    module = Vector()
    parameters = dict(module.named_parameters())
    server = Server(parameters, UNIT_SGD, consistency, workers=2, elastic=True)

    def join(worker, session):
        text = server.core.replica.layout
        message = Message(Kind.JOIN, clock=session, text=text)
        return server.core.handle(worker, message, None, 0.0).epoch

    def finish(worker, epoch):
        return server.core.handle(worker, Message(Kind.FINISH, epoch=epoch), None, 0.0)

    for session in (10, 20):
        first = join(0, session)
        assert finish(0, first) is None
        second = join(1, session + 1)
        assert finish(0, first) is None
        assert finish(1, second).kind is finish(0, first).kind is Kind.OK


@pytest.mark.parametrize("consistency", [BulkSynchronous(), Asynchronous()])
def test_a_worker_that_rejoins_a_finished_job_waits_for_the_others_up_to_the_timeout(consistency):
    """The worker died after its FINISH and was restarted; the other worker has finished."""
    module = Vector()
    parameters = dict(module.named_parameters())
    server = Server(parameters, UNIT_SGD, consistency, workers=2, timeout=0.2, elastic=True)
    workers = [Worker(copy.deepcopy(module), [server], rank=rank) for rank in range(2)]
    run_in_threads(*(worker.finish for worker in workers))
    restarted = Worker(module, [server], rank=0)
    run_in_threads(restarted.finish)
    assert not server.core.lost

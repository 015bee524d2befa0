"""Clipping by the norm of all servers is exact, although servers and workers are killed."""

import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    LocalSteps,
    OptimizerSpec,
    Server,
    StaleSynchronous,
    Worker,
    partition,
    run,
)
from paramserver.journal.disk_journal import DiskJournal
from paramserver.protocol.ledger import Ledger
from paramserver.protocol.log import Accept, Join, Log, Norm, Read, Write
from paramserver.protocol.messages import Kind, Message
from paramserver_training import SGD, assert_equal_parameters, build_model, draw_batch

SPEC = OptimizerSpec(SGD, max_norm=0.5)
POLICIES = [BulkSynchronous(), StaleSynchronous(1), Asynchronous()]
STEPS = 3


class Dies(BaseException):
    """The simulated end of a worker process."""


class Job:
    """Two workers and their servers in one process; a fault strikes at one message.

    `fault` is the number of the message and the event: the receiving server is killed and restarted
    before or after it handles the message, or the sending worker dies then. With "snapshot", the
    server writes a snapshot before it is killed.
    """

    def __init__(self, folder, policy, servers, fault=(-1, "")):
        self.policy = policy
        self.at, self.event = fault
        self.messages = []
        parameters = dict(build_model().named_parameters())
        self.shards = partition(parameters, servers)
        self.folder = folder
        self.hosts = {}
        self.journals = {}
        for number in range(servers):
            self.start(number)
        self.workers = [self.join(rank) for rank in range(2)]

    def start(self, number):
        parameters = dict(build_model().named_parameters())
        shard = self.shards[number]
        host = Server(parameters, SPEC, self.policy, workers=2, shard=shard, elastic=True)
        self.hosts[number] = host
        self.journals[number] = DiskJournal.start(self.folder / f"server-{number}", host.core)

    def restart(self, number):
        if self.event.endswith("snapshot"):
            self.journals[number].snapshot(self.hosts[number].core)
        self.journals[number].close()
        self.start(number)

    def join(self, rank):
        while True:
            connections = [Connection(self, number, rank) for number in self.hosts]
            try:
                return Worker(build_model(), connections, rank=rank)
            except Dies:
                pass

    def strike(self, number, when):
        if self.at == len(self.messages) and self.event.startswith(when):
            if "worker" in self.event:
                self.at = -1
                raise Dies
            self.restart(number)
            return True
        return False

    def call(self, rank, method, *args):
        """Call a method of a worker; return False if the worker has died and joined again."""
        try:
            method(self.workers[rank], *args)
        except Dies:
            self.workers[rank] = self.join(rank)
            return False
        return True

    def train(self):
        """Train to the end; return the parameters that all workers have pulled."""
        while (step := min(worker.position for worker in self.workers)) < STEPS:
            for rank, worker in enumerate(self.workers):
                if worker.position == step:
                    self.call(rank, take_step, step)
        for rank in range(2):
            while not self.call(rank, Worker.pull):
                pass
        trained, other = (dict(w.module.named_parameters()) for w in self.workers)
        for journal in self.journals.values():
            journal.close()
        assert_bit_equal(trained, other)
        return trained


def assert_bit_equal(parameters, others):
    for name, parameter in parameters.items():
        assert torch.equal(parameter, others[name])


def take_step(worker, step):
    worker.pull()
    inputs, targets = draw_batch(step, worker.rank)
    F.mse_loss(worker.module(inputs), targets).backward()
    worker.push()


class Connection:
    session = None

    def __init__(self, job, number, rank):
        self.job, self.number, self.rank = job, number, rank
        local = job.hosts[number].connect(rank)
        self.parameters, self.gradients, self.read = local.parameters, local.gradients, local.read

    def request(self, message, write_chunks=()):
        for _ in write_chunks:
            pass
        job = self.job
        job.strike(self.number, "before")
        answer = self.send(message)
        if job.strike(self.number, "after"):
            answer = self.send(message)  # the first answer is lost
        job.messages.append(message.kind)
        return answer

    def send(self, message):
        local = self.job.hosts[self.number].connect(self.rank)
        local.parameters, local.gradients = self.parameters, self.gradients
        return local.request(message)

    def abort(self, reason):
        pass


def kill_at_messages(tmp_path, policy, servers, event, every=1):
    """Train with a fault at every message; compare with an undisturbed job and with one server."""
    undisturbed = Job(tmp_path / "undisturbed", policy, servers)
    expected = undisturbed.train()
    assert undisturbed.messages.count(Kind.NORMS) == undisturbed.hosts[0].version
    one_server = Job(tmp_path / "one", policy, 1)
    assert_equal_parameters(one_server.train(), expected)
    assert Kind.NORMS not in one_server.messages
    for at in range(0, len(undisturbed.messages), every):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            job = Job(Path(folder), policy, servers, (at, event))
            assert_bit_equal(job.train(), expected)
            assert {h.version for h in job.hosts.values()} == {undisturbed.hosts[0].version}


EVENTS = ["before", "after", "before snapshot", "after snapshot", "before worker", "after worker"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_clipped_job_killed_at_some_messages_equals_the_undisturbed_one(tmp_path, event):
    kill_at_messages(tmp_path, BulkSynchronous(), 2, event, every=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=["bulk", "stale", "asynchronous"])
def test_a_clipped_job_killed_at_any_message_equals_the_undisturbed_one(
    tmp_path, policy, servers, event
):
    kill_at_messages(tmp_path, policy, servers, event)

"""Clipping by the norm of all servers is exact, although servers and workers are killed."""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

import paramserver
from paramserver import (
    Asynchronous,
    BulkSynchronous,
    LocalSteps,
    OptimizerSpec,
    Server,
    StaleSynchronous,
    Worker,
    convert_journal,
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
            for rank in range(2):
                while self.workers[rank].position == step:  # the order of the pushes is fixed
                    self.call(rank, take_step, step)
        for rank in range(2):
            while not self.call(rank, Worker.pull):
                pass
        trained, other = (dict(w.module.named_parameters()) for w in self.workers)
        self.close()
        assert_bit_equal(trained, other)
        return trained

    def close(self):
        for journal in self.journals.values():
            journal.close()


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
        self.job = job
        self.number = number
        self.rank = rank
        local = job.hosts[number].connect(rank)
        self.parameters = local.parameters
        self.gradients = local.gradients
        self.read = local.read

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


@pytest.mark.parametrize("transport", ["shared_memory", "zeromq"])
def test_processes_limit_the_norm_of_all_servers(transport):
    """Worker 1 has fewer batches, so its end completes a step."""
    options = {"args": ([4, 3],), "workers": 2, "transport": transport}
    expected = run(train_unequally, build_model(), SPEC, **options)
    result = run(train_unequally, build_model(), SPEC, servers=2, **options)
    assert result.versions == [4] * 2
    assert_equal_parameters(result.parameters, expected.parameters)
    unclipped = run(train_unequally, build_model(), SGD, **options)
    weight = expected.parameters["0.weight"]
    assert (unclipped.parameters["0.weight"] - weight).abs().max() > 1e-3


def train_unequally(worker, steps):
    for step in range(steps[worker.rank]):
        take_step(worker, step)


def test_the_outer_norm_of_local_steps_is_the_norm_of_all_servers():
    def train(servers):
        parameters = dict(build_model().named_parameters())
        policy = LocalSteps(2, OptimizerSpec(SGD, max_norm=0.05))
        shards = partition(parameters, servers)
        hosts = [Server(parameters, SGD, policy, workers=1, shard=shard) for shard in shards]
        with Worker(build_model(), hosts, optimizer=SGD) as worker:
            for step in range(6):
                take_step(worker, step)
        return dict(worker.module.named_parameters())

    assert_equal_parameters(train(3), train(1))


def test_the_journals_of_an_update_without_its_norm_are_converted(tmp_path):
    policy = BulkSynchronous()
    job = Job(tmp_path / "old", policy, 3)
    for rank in range(2):
        take_step(job.workers[rank], 0)
    assert job.hosts[0].core.ledger.awaits_norm
    job.close()
    whole = paramserver.Job(print, build_model(), SPEC, policy)
    convert_journal(whole, tmp_path / "old", tmp_path / "new")
    undisturbed = Job(tmp_path / "undisturbed", policy, 3)
    assert_equal_parameters(Job(tmp_path / "new", policy, 1).train(), undisturbed.train())


@pytest.mark.parametrize(
    "text", ["[]", "[1.0, 1.0]", "[1]", "[-1.0]", "[NaN]", '["x"]', "1.0", "{", "[[1.0]]"]
)
def test_invalid_norms_change_nothing(tmp_path, text):
    job = Job(tmp_path, BulkSynchronous(), 2)
    for rank in range(2):
        take_step(job.workers[rank], 0)
    core = job.hosts[0].core
    epoch = core.ledger.members[0].epoch
    before = core.ledger.to_state()

    def send(text, version):
        message = Message(Kind.NORMS, epoch=epoch, number=version, text=text)
        return core.handle(0, message, None, 0.0).kind

    with pytest.raises(ValueError, match=r"expected|Expecting"):
        send(text, 0)
    assert send("[1.0]", 7) is Kind.OK  # of another update
    assert core.ledger.to_state() == before
    assert core.replica.version == 0
    send("[1.0]", 0)
    assert core.replica.version == 1
    after = core.ledger.to_state()
    send("[2.0]", 0)  # of the second worker
    assert core.ledger.to_state() == after
    job.close()


def test_a_log_must_contain_the_norm_after_an_update_and_nowhere_else():
    def replay(*entries):
        ledger = Ledger(1, BulkSynchronous(), uses_norms=True)
        ledger.replay(Log(0, entries))
        return ledger

    update = Accept((0, 0, 0)), Write(((0, 0, 0),), (0,))
    assert replay(*update).awaits_norm
    assert not replay(*update, Norm(1.0), Read(0, 0, 1)).awaits_norm
    joined = Join(0, 1, 1, 5)
    assert replay(*update, joined, Norm(1.0)).members[0].epoch == 1
    for wrong in (
        (Norm(1.0),),
        (*update, Read(0, 0, 1)),
        (*update, Accept((0, 0, 1))),
        (*update, Norm(1.0), Norm(1.0)),
    ):
        with pytest.raises(ValueError, match="expected a valid entry"):
            replay(*wrong)

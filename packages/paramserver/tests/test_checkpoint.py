"""A job of local steps that is killed anywhere and resumed equals the undisturbed job."""

import errno
import functools
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import (
    Integers,
    LocalSteps,
    OptimizerSpec,
    PeerLost,
    Server,
    Worker,
    partition,
    run,
)
from paramserver.journal.disk_journal import DiskJournal
from paramserver.local_steps.checkpoint import read_checkpoint, write_checkpoint
from paramserver_training import draw_batch

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
INNER = OptimizerSpec(
    partial(torch.optim.AdamW, lr=0.02),
    partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=30),
    max_norm=0.5,
)
POLICIES = {
    "diloco": LocalSteps(4, OUTER),
    "streaming": LocalSteps(6, OUTER, fragments=2, overlap=2, alpha=0.25),
    "compressed": LocalSteps(3, OUTER, Integers(4)),
}
STEPS = 12


class Killed(BaseException):
    pass


def build_noisy_model():
    """Return a module with random numbers, buffers and batch statistics in its steps."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 3)
    return nn.Sequential(*layers).float()


def train(worker, steps, die_at=None):
    if not worker.position:
        torch.manual_seed(worker.rank)  # the state of the generator is in the checkpoint
    for step in range(worker.position, steps):
        worker.pull()
        inputs, targets = draw_batch(step, worker.rank)
        F.mse_loss(worker.module(inputs.float()), targets.float()).backward()
        if step == die_at and worker.rank == 0:
            os._exit(3)
        worker.push()


def train_to_the_end(worker):
    train(worker, STEPS)
    worker.finish()  # receives the last exchange


class Fleet:
    """Servers and one worker that can be killed and restarted."""

    def __init__(self, folder, policy, servers):
        self.folder = folder
        self.policy = policy
        self.servers = servers
        self.journals = []

    def start(self):
        torch.manual_seed(99)  # a restarted process has another state than the killed one
        module = build_noisy_model()
        parameters = dict(module.named_parameters())
        self.hosts = []
        for shard in partition(parameters, self.servers):
            host = Server(parameters, INNER, self.policy, workers=1, shard=shard, elastic=True)
            self.journals.append(DiskJournal(self.folder / f"server-{shard.number}"))
            self.journals[-1].load(host.core)
            self.hosts.append(host)
        checkpoint = self.folder / "worker"
        return Worker(module, self.hosts, optimizer=INNER, checkpoint=checkpoint)

    def kill(self):
        while self.journals:
            self.journals.pop().close()


def die_at_push(worker, when, at):
    """Let the worker die before or after the commit of push number `at`."""
    push = worker._exchange.session.push

    def dying_push():
        if worker.pushes == at and when == "before":
            raise Killed
        yield from push()
        if worker.pushes == at + 1 and when == "after":
            raise Killed

    worker._exchange.session.push = dying_push


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that returns the module's state after an undisturbed job."""

    @functools.cache
    def train_undisturbed(name, servers):
        fleet = Fleet(tmp_path_factory.mktemp("undisturbed"), POLICIES[name], servers)
        with fleet.start() as worker:
            train(worker, STEPS)
        fleet.kill()
        return worker.module.state_dict()

    return train_undisturbed


# DiLoCo is tested with compression, the only state that an accepted push changes.
KILLED = [("compressed", "before"), ("compressed", "after"), ("streaming", "before")]
KILLED_EXHAUSTIVELY = [("diloco", "before"), ("diloco", "after"), ("streaming", "after")]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *KILLED,
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in KILLED_EXHAUSTIVELY),
    ],
)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_job_killed_at_any_push_equals_the_undisturbed_one(
    tmp_path, undisturbed, name, servers, when
):
    policy = POLICIES[name]
    for at in range(STEPS // policy.interval):
        fleet = Fleet(tmp_path / str(at), policy, servers)
        worker = fleet.start()
        die_at_push(worker, when, at)
        with pytest.raises(Killed):
            train_to_the_end(worker)
        fleet.kill()
        with fleet.start() as worker:
            assert worker.position == (at + 1) * policy.interval
            train(worker, STEPS)
        fleet.kill()
        for key, value in worker.module.state_dict().items():
            assert torch.equal(value, undisturbed(name, servers)[key]), key


def test_a_job_killed_between_exchanges_equals_the_undisturbed_one(tmp_path, undisturbed):
    fleet = Fleet(tmp_path, POLICIES["streaming"], 1)
    for steps in (4, 5, 8, 9, 11):  # twice within the same round
        train(fleet.start(), steps)
        fleet.kill()
    with fleet.start() as worker:
        train(worker, STEPS)
    fleet.kill()
    for key, value in worker.module.state_dict().items():
        assert torch.equal(value, undisturbed("streaming", 1)[key]), key


def test_a_job_of_processes_that_is_killed_and_run_again_equals_the_undisturbed_one(tmp_path):
    pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    policy = LocalSteps(4, OUTER)
    options = {"workers": 2, "servers": 2, "transport": "zeromq"}
    start = partial(run, train, build_noisy_model(), INNER, policy, **options)
    with pytest.raises(PeerLost, match="worker 0 died with exit code 3"):
        start(args=(STEPS, 6), journal=tmp_path / "killed")
    resumed = start(args=(STEPS,), journal=tmp_path / "killed")
    undisturbed = start(args=(STEPS,), journal=tmp_path / "undisturbed")
    for name, parameter in undisturbed.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter)


def test_position_counts_local_steps_while_an_exchange_is_in_flight(tmp_path):
    fleet = Fleet(tmp_path, POLICIES["streaming"], 1)
    worker = fleet.start()
    for step in range(7):
        assert worker.position == step
        train(worker, step + 1)
    fleet.kill()
    assert fleet.start().position == 6  # the steps after the last exchange are repeated
    fleet.kill()


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_a_finished_job_that_is_extended_skips_no_data(tmp_path, name):
    interval = POLICIES[name].interval
    fleet = Fleet(tmp_path, POLICIES[name], 2)
    position = 0
    for steps in (interval + 1, interval + 2, 3 * interval, 5 * interval):
        with fleet.start() as worker:  # finishes with a round that is not complete
            assert worker.position == position
            train(worker, steps)
            assert worker.position == steps
        fleet.kill()
        position = steps
    assert fleet.start().position == position
    fleet.kill()


def test_a_checkpoint_of_another_state_or_policy_is_refused(tmp_path):
    fleet = Fleet(tmp_path, LocalSteps(2, OUTER), 1)
    train(fleet.start(), 2)
    old = (tmp_path / "worker").read_bytes()
    train(Worker(build_noisy_model(), fleet.hosts, optimizer=INNER), 8)
    fleet.kill()
    (tmp_path / "worker").write_bytes(old)
    with pytest.raises(
        ValueError, match=r"4 accepted pushes.*got one of worker 0 with 0.*remove .*worker to"
    ):
        fleet.start()
    fleet.kill()
    (tmp_path / "worker").unlink()
    train(fleet.start(), 10)
    fleet.kill()
    faster = OptimizerSpec(partial(torch.optim.AdamW, lr=0.03), INNER.scheduler, max_norm=0.5)
    assert fleet.start().position == 10
    with pytest.raises(ValueError, match=r"options of 0\.weight lr=0\.03.*got one with lr=0\.02"):
        Worker(build_noisy_model(), fleet.hosts, optimizer=faster, checkpoint=tmp_path / "worker")
    fleet.kill()
    with pytest.raises(ValueError, match="expected checkpoint=None without LocalSteps"):
        Worker(build_noisy_model(), [], checkpoint=tmp_path / "worker")


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        (LocalSteps(2, OUTER), LocalSteps(4, OUTER)),
        (LocalSteps(4, OUTER, fragments=2), LocalSteps(6, OUTER, fragments=3)),
    ],
    ids=["interval", "fragments"],
)
def test_a_checkpoint_of_another_policy_is_refused_also_without_its_journal(
    tmp_path, policy, other
):
    fleet = Fleet(tmp_path, policy, 1)
    train(fleet.start(), 2)
    fleet.kill()
    shutil.rmtree(tmp_path / "server-0")
    fleet.policy = other
    with pytest.raises(ValueError, match="expected a checkpoint of worker 0 with 0 accepted"):
        fleet.start()
    fleet.kill()


def test_a_checkpoint_of_another_worker_is_refused(tmp_path):
    parameters = dict(nn.Linear(2, 1).named_parameters())
    server = Server(parameters, OUTER, LocalSteps(1, OUTER), workers=2, elastic=True)

    def join(rank, file):
        return Worker(nn.Linear(2, 1), server, rank=rank, optimizer=OUTER, checkpoint=file)

    for rank in range(2):
        worker = join(rank, tmp_path / f"worker-{rank}")
        worker.pull()
        worker.push()
    with pytest.raises(ValueError, match=r"a checkpoint of worker 1 with .*, got one of worker 0"):
        join(1, tmp_path / "worker-0")
    assert join(1, tmp_path / "worker-1").position == 1


def test_workers_do_not_overwrite_the_checkpoint_of_each_other(tmp_path):
    server = Server(
        dict(nn.Linear(2, 1).named_parameters()), OUTER, LocalSteps(1, OUTER), workers=2
    )
    workers = [
        Worker(nn.Linear(2, 1), server, rank=rank, optimizer=OUTER, checkpoint=tmp_path / "same")
        for rank in range(2)
    ]
    for worker in workers:
        worker.pull()
    workers[0].push()
    with pytest.raises(RuntimeError, match="pass a different file to each worker"):
        workers[1].push()
    assert read_checkpoint(tmp_path / "same")["worker"] == 0


@pytest.mark.parametrize("content", ["truncated", "text", "tensors"])
def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "worker"
    torch.save({"weight": torch.zeros(3)}, path)
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:200])
    elif content == "text":
        path.write_text("a file of another program")
    module = nn.Linear(2, 1)
    server = Server(dict(module.named_parameters()), OUTER, LocalSteps(2), workers=1, elastic=True)
    with pytest.raises(ValueError, match=f"expected a checkpoint of a worker in {path}, got"):
        Worker(module, server, optimizer=OUTER, checkpoint=path)


def test_damage_in_any_byte_of_a_checkpoint_is_refused(tmp_path):
    path = tmp_path / "worker"
    write_checkpoint(path, {"position": 3, "module": {"weight": torch.arange(64.0)}})
    content = path.read_bytes()
    assert read_checkpoint(path)["position"] == 3
    for byte in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="whose checksum is wrong; restore it from a copy"):
            read_checkpoint(path)
    for length in range(0, len(content), 50):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="whose checksum is wrong"):
            read_checkpoint(path)


class Labeled(nn.Linear):
    """A module whose state contains a path after the first step."""

    path = None

    def get_extra_state(self):
        return {"path": self.path}

    def set_extra_state(self, state):
        self.path = state["path"]


def test_a_state_that_could_not_be_loaded_does_not_replace_the_checkpoint(tmp_path):
    file = tmp_path / "worker"
    module = Labeled(2, 1)
    server = Server(dict(module.named_parameters()), OUTER, LocalSteps(1), workers=1, elastic=True)
    worker = Worker(module, server, optimizer=OUTER, checkpoint=file)
    worker.pull()
    worker.push()
    content = file.read_bytes()
    worker.pull()
    module.path = file
    with pytest.raises(ValueError, match="expected only numbers, strings and tensors"):
        worker.push()
    assert file.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["worker"]


def test_a_full_disk_is_named_and_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    file = tmp_path / "worker"
    module = nn.Linear(2, 1)
    server = Server(dict(module.named_parameters()), OUTER, LocalSteps(1), workers=1, elastic=True)
    worker = Worker(module, server, optimizer=OUTER, checkpoint=file)
    worker.pull()
    worker.push()
    content = file.read_bytes()
    worker.pull()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RuntimeError, match=r"cannot write the checkpoint .*worker.*No space"):
            worker.push()
    assert [path.name for path in tmp_path.iterdir()] == ["worker"]
    assert file.read_bytes() == content
    resumed = Worker(nn.Linear(2, 1), server, optimizer=OUTER, checkpoint=file)
    assert resumed.position == 1

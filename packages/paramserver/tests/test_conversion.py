"""Journals continue with another number of servers, and workers are refused if one is lost."""

import copy
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Integers,
    Job,
    LocalSteps,
    OptimizerSpec,
    Worker,
    convert_journal,
)
from paramserver import __main__ as command_line
from paramserver.journal.disk_journal import DiskJournal
from paramserver.journal.files import JournalError
from paramserver_training import ADAMW, SGD, assert_equal_parameters, build_model, draw_batch


def disable_decay(name, shape):
    return {"weight_decay": 0.0} if len(shape) < 2 else {}


SCHEDULED = OptimizerSpec(
    ADAMW, partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20), disable_decay
)
MASTERS = replace(SCHEDULED, master_dtype=torch.float64)
JOBS = {
    "adamw with a schedule and groups": Job(print, build_model(), SCHEDULED, BulkSynchronous()),
    "clipping": Job(print, build_model(), OptimizerSpec(SGD, max_norm=0.1), BulkSynchronous()),
    "master weights": Job(print, build_model(torch.float32), MASTERS, BulkSynchronous()),
    "momentum, every gradient": Job(print, build_model(), SGD, Asynchronous()),
    "local steps": Job(print, build_model(), SCHEDULED, LocalSteps(2)),
}


OPEN = []


@pytest.fixture(autouse=True)
def _close_all():
    yield
    while OPEN:
        OPEN.pop().close()


class Fleet:
    """The servers and two workers of a job, in one process; they start from `folder`."""

    def __init__(self, job, folder):
        OPEN.append(self)
        self.journals = []
        self.servers = []
        for shard in job.shards():
            self.servers.append(job.server(shard, elastic=True))
            path = folder / f"server-{shard.number}"
            self.journals.append(DiskJournal.start(path, self.servers[-1].core))
        local = job.consistency if isinstance(job.consistency, LocalSteps) else None
        self.workers = []
        for rank in range(2):
            module = build_model(next(job.module.parameters()).dtype)
            options = {"local": local}
            if local is not None:
                options["optimizer"] = job.optimizer
            checkpoint = folder / f"worker-{rank}" if local else None
            self.workers.append(
                Worker(module, self.servers, rank=rank, checkpoint=checkpoint, **options)
            )

    def train(self, first, stop):
        for step in range(first, stop):
            for worker in self.workers:
                worker.pull()
            for worker in self.workers:
                self.push(worker, step)

    def push(self, worker, step):
        inputs, targets = draw_batch(step, worker.rank)
        dtype = next(worker.module.parameters()).dtype
        F.mse_loss(worker.module(inputs.to(dtype)), targets.to(dtype)).backward()
        worker.push()

    def close(self):
        for journal in self.journals:
            journal.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (3, 2),
        pytest.param(1, 2, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "job",
    [
        # Master weights are tested with the same schedule and groups.
        pytest.param(job, id=name, marks=[pytest.mark.exhaustive] * name.startswith("adamw"))
        for name, job in JOBS.items()
    ],
)
def test_a_job_continues_with_another_number_of_servers(tmp_path, job, before, after):
    old = Fleet(replace(job, servers=before), tmp_path / "old")
    old.train(0, 4)
    has_push = job.consistency.averages and not isinstance(job.consistency, LocalSteps)
    if has_push:  # the journals end in the middle of a step, or before the norms are exchanged
        old.workers[0].pull()
        old.push(old.workers[0], 4)
    old.close()
    files = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    convert_journal(replace(job, servers=after), tmp_path / "old", tmp_path / "new")
    assert all(path.read_bytes() == content for path, content in files.items())
    new = Fleet(replace(job, servers=after), tmp_path / "new")
    if has_push:
        assert [worker.pushes for worker in new.workers] == [5, 4]
        new.workers[1].pull()
        new.push(new.workers[1], 4)
    new.train(4 + has_push, 8)
    new.workers[0].pull()
    new.close()
    same = Fleet(replace(job, servers=before), tmp_path / "undisturbed")
    same.train(0, 8)
    same.workers[0].pull()
    same.close()
    trained = dict(new.workers[0].module.named_parameters())
    assert_equal_parameters(trained, dict(same.workers[0].module.named_parameters()))
    assert [server.version for server in new.servers] == [same.servers[0].version] * after
    assert new.servers[0].staleness == same.servers[0].staleness


def choose_group_options(name, shape):
    return {} if len(shape) > 1 else {"lr": 0.3}


@pytest.mark.parametrize("servers", [3, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_parameters_of_one_element_and_rates_of_groups_are_converted(tmp_path, servers):
    """Some servers store parameters of one group only, or of the groups in another order.

    torch's `load_state_dict` would round NAdam's `mu_product` to the type of the parameters.
    """
    torch.manual_seed(0)
    initial = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    spec = OptimizerSpec(partial(torch.optim.NAdam, lr=0.1), schedule, choose_group_options)
    job = Job(print, initial, spec, BulkSynchronous(), workers=1)

    def train(folder, steps, servers):
        journals = []
        hosts = []
        for shard in replace(job, servers=servers).shards():
            hosts.append(replace(job, servers=servers).server(shard, elastic=True))
            journals.append(DiskJournal.start(folder / f"server-{shard.number}", hosts[-1].core))
        module = copy.deepcopy(initial)
        worker = Worker(module, hosts)
        while worker.position < steps:
            worker.pull()
            module(torch.full((1, 3), 0.1 * worker.position).double()).sum().backward()
            worker.push()
        worker.finish()
        for journal, host in zip(journals, hosts, strict=True):
            journal.snapshot(host.core)
            journal.close()
        return dict(module.named_parameters())

    undisturbed = train(tmp_path / "undisturbed", 9, 1)
    train(tmp_path / "1", 3, 1)
    convert_journal(replace(job, servers=servers), tmp_path / "1", tmp_path / "many")
    train(tmp_path / "many", 6, servers)
    convert_journal(job, tmp_path / "many", tmp_path / "back")
    for name, parameter in train(tmp_path / "back", 9, 1).items():
        assert torch.equal(parameter, undisturbed[name])


def test_another_number_of_servers_is_refused_with_the_command_that_converts(tmp_path):
    job = Job(print, build_model(), SGD, servers=2)
    for servers in (1, 3):
        folder = tmp_path / str(servers)
        fleet = Fleet(replace(job, servers=servers), folder)
        fleet.train(0, 1)
        fleet.close()
        with pytest.raises(ValueError, match="paramserver convert MODULE:JOB OLD NEW"):
            Fleet(job, folder)


def test_results_that_depend_on_the_number_of_servers_are_not_converted(tmp_path):
    for policy in (LocalSteps(2, fragments=2), LocalSteps(2, compression=Integers(8))):
        job = Job(print, build_model(), SGD, policy, servers=2)
        with pytest.raises(ValueError, match="continue with the former number"):
            convert_journal(job, tmp_path, tmp_path / "new")
    whole_tensors = Job(print, build_model(), partial(torch.optim.Adafactor, lr=0.05), servers=1)
    fleet = Fleet(whole_tensors, tmp_path / "old")
    fleet.train(0, 2)
    fleet.close()
    with pytest.raises(ValueError, match="expected an elementwise optimizer"):
        convert_journal(replace(whole_tensors, servers=2), tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=f"expected journals of servers in {tmp_path}, got none"):
        convert_journal(whole_tensors, tmp_path, tmp_path / "new")


def test_journals_that_do_not_match_or_are_overwritten_are_refused(tmp_path, capsys, monkeypatch):
    job = Job(print, build_model(), SGD, Asynchronous(), servers=2)
    fleet = Fleet(job, tmp_path / "old")
    fleet.train(0, 1)
    shutil.copytree(tmp_path / "old", tmp_path / "mixed")
    fleet.train(1, 4)
    fleet.close()
    shutil.rmtree(tmp_path / "mixed" / "server-0")
    shutil.copytree(tmp_path / "old" / "server-0", tmp_path / "mixed" / "server-0")
    with pytest.raises(JournalError, match=r"does not match .*paramserver recover"):
        convert_journal(replace(job, servers=1), tmp_path / "mixed", tmp_path / "new")
    monkeypatch.setattr(command_line, "_load_job", lambda _: replace(job, servers=1))
    command = ["convert", "mine:job", str(tmp_path / "old"), str(tmp_path / "new")]
    assert command_line.main(command) == 0
    assert command_line.main(command) == 2
    assert "which exists" in capsys.readouterr().err


def read_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("number", "steps"), [(0, 4), pytest.param(1, 4, marks=pytest.mark.exhaustive), (2, 4), (2, 1)]
)
def test_servers_are_not_touched_if_one_has_lost_its_journal(tmp_path, number, steps):
    job = Job(print, build_model(), SGD, Asynchronous(), servers=3)
    fleet = Fleet(job, tmp_path / "state")
    fleet.train(0, steps)
    fleet.close()
    shutil.rmtree(tmp_path / "state" / f"server-{number}")  # not visible to the other servers
    before = read_files(tmp_path / "state")
    with pytest.raises(RuntimeError, match=r"(a|its) journal was lost"):
        Fleet(job, tmp_path / "state")
    assert {path: read_files(tmp_path / "state")[path] for path in before} == before

"""A job that is killed at any change of its journals equals an undisturbed one."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
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
)
from paramserver.journal.disk_journal import DiskJournal
from paramserver.running.launch import PRELOADED
from paramserver_training import ADAMW, build_model, draw_batch

SPEC = OptimizerSpec(
    ADAMW, partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), max_norm=0.3
)
STEPS = 4
KILLED = 9
#: Number of parts into which the points of a kill are divided; the fast test takes one of each.
PARTS = 4


class Injector:
    """Counts the changes of the disk, and ends the process at number `kill_at`."""

    def __init__(self, kill_at=None):
        self.kill_at = kill_at
        self.count = 0

    def tick(self):
        if self.count == self.kill_at:
            os._exit(KILLED)
        self.count += 1

    def install(self):
        switch_to = DiskJournal._switch_to

        def counted_switch_to(journal, file):
            switch_to(journal, CountedFile(file, self))

        DiskJournal._switch_to = counted_switch_to
        for owner, name in (
            (Path, "rename"),
            (Path, "unlink"),
            (os, "truncate"),
            (os, "fsync"),
        ):
            setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.tick()
            result = function(*args, **kwargs)
            self.tick()
            return result

        return call


class CountedFile:
    """A file of records, whose process may die before, within or after each write."""

    def __init__(self, file, injector):
        self._file = file
        self._injector = injector

    def write(self, part):
        self._injector.tick()
        written = self._file.write(part[: len(part) // 2])
        self._injector.tick()
        return written + self._file.write(part[written:])

    def fileno(self):
        return self._file.fileno()

    def __getattr__(self, name):
        return getattr(self._file, name)


#: An update with this optimizer adds the gradient, so the order of updates has no effect.
ADD = partial(torch.optim.SGD, lr=1.0)


def set_gradients(worker, step, policy):
    """Set gradients that depend on the pulled parameters, except for a stale policy."""
    if isinstance(policy, StaleSynchronous):
        for parameter in worker.module.parameters():
            parameter.grad = torch.full_like(parameter, -0.5 * (step + 1) * (worker.rank + 1))
        return
    inputs, targets = draw_batch(step, worker.rank)
    F.mse_loss(worker.module(inputs), targets).backward()


def train(folder, policy, servers):
    """Train from the state of the journals; return the version, parameters and staleness.

    An asynchronous policy has one worker, because the gradients of two depend on the order in which
    they pull. The staleness of a stale policy depends on it too, so its gradients are counted.
    """
    count = 1 if isinstance(policy, Asynchronous) else 2
    is_stale = isinstance(policy, StaleSynchronous)
    spec = ADD if is_stale else SPEC
    parameters = dict(build_model().named_parameters())
    hosts, journals = [], []
    for shard in partition(parameters, servers):
        hosts.append(Server(parameters, spec, policy, workers=count, shard=shard, elastic=True))
        path = folder / f"server-{shard.number}"
        journals.append(DiskJournal.start(path, hosts[-1].core, fsync=True))
    local = {"optimizer": SPEC} if isinstance(policy, LocalSteps) else {}
    workers = []
    for rank in range(count):
        if local:
            local["checkpoint"] = folder / f"worker-{rank}"
        workers.append(Worker(build_model(), hosts, rank=rank, **local))
    for step in range(min(worker.position for worker in workers), STEPS):
        active = [worker for worker in workers if worker.position == step]
        for worker in active:
            worker.pull()
        for worker in active:
            set_gradients(worker, step, policy)
            worker.push()
        for host, journal in zip(hosts, journals, strict=True):
            if step in (1, 2):
                journal.snapshot(host.core)
                journal.wait()
    version = workers[0].pull()
    for journal in journals:
        journal.close()
    trained = [p.detach() for p in workers[0].module.parameters()]
    staleness = [host.staleness for host in hosts]
    return version, trained, [s.total() for s in staleness] if is_stale else staleness


def run_in_fork(function, *args):
    """Call `function` in a child process and return the exit status of the child."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_changes(folder, policy, servers):
    injector = Injector()
    injector.install()
    train(folder, policy, servers)
    (folder / "count").write_text(str(injector.count))


def die_at(kill_at, folder, policy, servers):
    Injector(kill_at).install()
    train(folder, policy, servers)


def kill_at_points(tmp_path, policy, servers, points):
    version, expected, staleness = train(tmp_path / "undisturbed", policy, servers)
    counted = tmp_path / "counted"
    counted.mkdir()
    # autograd refuses to run in a fork of a process in which it has started threads. Optimizers
    # import torch._dynamo, which takes seconds if every fork does it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context, import_module, ("torch._dynamo",)) as clean:
        assert clean.submit(run_in_fork, count_changes, counted, policy, servers).result() == 0
        changes = int((counted / "count").read_text())
        assert changes > 100
        for kill_at in points(changes):
            folder = tmp_path / f"killed-{kill_at}"
            killed = clean.submit(run_in_fork, die_at, kill_at, folder, policy, servers)
            assert killed.result() == KILLED, kill_at
            resumed = train(folder, policy, servers)
            assert resumed[0] == version, kill_at
            for parameter, other in zip(resumed[1], expected, strict=True):
                assert torch.equal(parameter, other), kill_at
            assert resumed[2] == staleness, kill_at


def test_a_job_killed_at_some_changes_of_its_journals_equals_the_undisturbed_one(tmp_path):
    def points(changes):
        return range(changes // PARTS // 2, changes, changes // PARTS)

    kill_at_points(tmp_path, BulkSynchronous(), 2, points)


@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "policy",
    [BulkSynchronous(), Asynchronous(), StaleSynchronous(1), LocalSteps(2, ADD)],
    ids=["bulk", "asynchronous", "stale", "local"],
)
def test_a_job_killed_at_any_change_of_its_journals_equals_the_undisturbed_one(
    tmp_path, policy, servers
):
    kill_at_points(tmp_path, policy, servers, range)

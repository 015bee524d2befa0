"""A change is in the journal before it is answered; an error of the disk is named."""

import errno
import itertools
import re
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from paramserver import (
    Asynchronous,
    BulkSynchronous,
    LocalSteps,
    Server,
    StaleSynchronous,
    Worker,
    partition,
)
from paramserver.compression import Integers
from paramserver.journal.disk_journal import DiskFullError, DiskJournal
from paramserver.server import LocalConnection
from torch import nn

OPEN = []


@pytest.fixture(autouse=True)
def _close_all():
    yield
    _close(len(OPEN))


def _close(count):
    for _ in range(count):
        OPEN.pop().close()


def create_server(folder, optimizer=torch.optim.Adam, **options):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    parameters = dict(module.named_parameters())
    server = Server(parameters, optimizer, Asynchronous(), workers=1, elastic=True)
    journal = DiskJournal(folder, **options)
    journal.load(server.core)
    OPEN.append(journal)
    return server, journal


def run_steps(server, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    worker = Worker(nn.Linear(3, 2), server)
    for _ in range(count):
        worker.pull()
        for parameter in worker.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        worker.push()
    return worker


def get_state(server):
    state = server.core.replica.snapshot()
    return state["parameters"].tolist(), state["version"], str(state["optimizer"])


@pytest.mark.parametrize("snapshots", [(), (2,), (1, 3)])
def test_new_server_continues_at_the_end_of_the_journal(tmp_path, snapshots):
    server, journal = create_server(tmp_path)
    for number in range(5):
        run_steps(server, 3, number)
        if number in snapshots:
            journal.snapshot(server.core)
    journal.wait()
    restarted, _ = create_server(tmp_path)
    assert get_state(restarted) == get_state(server)
    assert run_steps(restarted, 1).pushes == 16
    assert len(list(tmp_path.glob("*-*"))) == (2 if snapshots else 1)


class FullDisk:
    """A file with room for a number of bytes, after which writes are incomplete."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, part):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = part[: max(1, min(len(part), self.room))]
        self.room -= len(part)
        return self._file.write(part)

    def __getattr__(self, name):
        return getattr(self._file, name)


def push_often(worker):
    for _ in range(3):
        worker._exchange.run(worker._exchange.session.push())


@pytest.mark.parametrize("room", [0, 1, 20, 100, 150, 200])
def test_a_full_disk_is_reported_and_nothing_is_lost_or_doubled(tmp_path, room):
    server, journal = create_server(tmp_path)
    worker = run_steps(server, 2)
    journal._file = FullDisk(journal._file, room)
    worker.pull() if room > 150 else None
    for parameter in worker.module.parameters():
        parameter.grad = torch.ones(parameter.shape)
    with pytest.raises(RuntimeError, match=r"cannot write a journal in .*No space left"):
        push_often(worker)
    journal._file.room = 10**9  # the disk has room
    worker = run_steps(server, 1)
    assert worker.pushes == server.version
    assert get_state(create_server(tmp_path)[0]) == get_state(server)


class Killed(BaseException):
    """The process of a server was killed."""


class RepeatingConnection(LocalConnection):
    """Repeats a request while the disk is full, as a server over ZeroMQ does."""

    def request(self, message, written=()):
        while True:
            try:
                return super().request(message, written)
            except DiskFullError:
                self.on_full_disk()

    def on_full_disk(self):
        pass


class KilledConnection(RepeatingConnection):
    """Stands for servers that are killed while a request waits for room on the disk."""

    def on_full_disk(self):
        raise Killed


def start_servers(folder, policy, servers):
    """Return the servers of a job, restored from their journals."""
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
    parameters = dict(linear.named_parameters())
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    hosts = []
    for shard in partition(parameters, servers):
        hosts.append(Server(parameters, sgd, policy, workers=2, shard=shard, elastic=True))
        OPEN.append(DiskJournal.start(folder / f"server-{shard.number}", hosts[-1].core))
    return hosts


def train_two_steps(hosts, connection=RepeatingConnection):
    """Train two workers from the state of the servers up to step 2; return the servers' states."""
    connections = [[connection(host, rank) for host in hosts] for rank in range(2)]
    workers = [Worker(nn.Linear(3, 2), connections[rank], rank=rank) for rank in range(2)]
    for step in range(min(worker.position for worker in workers), 2):
        active = [worker for worker in workers if worker.position == step]
        for worker in active:
            worker.pull()
        for worker in active:
            for parameter in worker.module.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step + worker.rank)
            worker.push()
    workers[0].pull()  # all servers apply the last update
    _close(len(OPEN))
    return [get_state(host) for host in hosts]


def train_on_full_disk(started, policy, servers, full_at, monkeypatch, *, is_killed=False):
    """Train while record `full_at` fails twice; return the state of the servers and the records.

    The servers continue from a copy of the journals in `started`. With `is_killed`, they are killed
    then, and start again when there is room.
    """
    folder = started.with_name(f"full-{full_at}")
    shutil.copytree(started, folder)
    append = DiskJournal._append
    records = itertools.count()
    failures = iter([False] * full_at + [True] * 4)  # `record` tries twice

    def append_if_there_is_room(self, kind, parts):
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, kind, parts)
        next(records)

    hosts = start_servers(folder, policy, servers)
    with monkeypatch.context() as patch:
        patch.setattr(DiskJournal, "_append", append_if_there_is_room)
        if is_killed:
            with pytest.raises(Killed):
                train_two_steps(hosts, KilledConnection)
            _close(len(OPEN))
        else:
            trained = train_two_steps(hosts)
    restarted = start_servers(folder, policy, servers)
    if is_killed:
        return train_two_steps(restarted), next(records)
    assert [get_state(host) for host in restarted] == trained
    return trained, next(records)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("servers", "is_killed"),
    [
        *((1, False), (2, True)),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in ((1, True), (2, False))),
    ],
)
@pytest.mark.parametrize(
    "policy",
    [BulkSynchronous(), pytest.param(Asynchronous(), marks=pytest.mark.exhaustive)],
    ids=repr,
)
def test_a_request_that_found_a_full_disk_at_any_record_is_repeated(
    policy, servers, is_killed, stride, tmp_path, monkeypatch
):
    """With a stride of 2, each record is tested either with a kill or without one."""
    started = tmp_path / "started"
    start_servers(started, policy, servers)
    _close(len(OPEN))
    expected, records = train_on_full_disk(started, policy, servers, 10**6, monkeypatch)
    assert records > 10
    for full_at in range(stride - 1 if is_killed else 0, records, stride):
        trained, _ = train_on_full_disk(
            started, policy, servers, full_at, monkeypatch, is_killed=is_killed
        )
        assert trained == expected, full_at


def test_a_job_that_is_continued_with_fewer_workers_names_the_remedy(tmp_path):
    """Worker 1 of the killed job does not join again, so the others wait for its gradients."""
    train_two_steps(start_servers(tmp_path, BulkSynchronous(), 1))
    parameters = dict(nn.Linear(3, 2).named_parameters())
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for allow_missing in (False, True):
        options = {"elastic": True, "timeout": 0.0, "allow_missing": allow_missing}
        server = Server(parameters, sgd, workers=1, **options)
        OPEN.append(DiskJournal.start(tmp_path / "server-0", server.core))
        worker = Worker(nn.Linear(3, 2), server)
        if not allow_missing:
            worker.pull()
            worker.push()
            message = r"clock 3 for worker 1 at clock 2, .* or allow_missing=True to continue"
            with pytest.raises(TimeoutError, match=message):
                worker.pull()
        else:
            assert worker.pull() == 3
        _close(len(OPEN))


class FailingDisk(FullDisk):
    """A full disk on which a file cannot be truncated either."""

    def truncate(self, size):
        if self.room <= 0:
            raise OSError(errno.EIO, "Input/output error")
        return self._file.truncate(size)


def test_a_record_never_follows_an_incomplete_one_that_could_not_be_removed(tmp_path):
    server, journal = create_server(tmp_path)
    run_steps(server, 2)
    journal._file = FailingDisk(journal._file, 40)
    with pytest.raises(RuntimeError, match="cannot write a journal"):
        run_steps(server, 1)
    copy = tmp_path.with_name(f"{tmp_path.name}-killed")
    shutil.copytree(tmp_path, copy)
    assert create_server(copy)[0].version == 2
    journal._file.room = 10**9
    run_steps(server, 2)
    assert server.version == 4
    assert get_state(create_server(tmp_path)[0]) == get_state(server)


def test_a_snapshot_removes_what_a_killed_server_has_written_of_an_earlier_one(tmp_path):
    server, journal = create_server(tmp_path)
    run_steps(server, 1)
    journal.snapshot(server.core)
    journal.wait()
    (tmp_path / "unfinished-00000001").write_bytes(b"the server was killed")
    journal.snapshot(server.core)
    journal.wait()
    assert sorted(path.name for path in tmp_path.glob("*-*")) == [
        "journal-00000002",
        "snapshot-00000002",
    ]


def test_failed_snapshot_does_not_change_the_journal(tmp_path, monkeypatch, caplog):
    server, journal = create_server(tmp_path, snapshot_bytes=1)
    run_steps(server, 2)
    assert journal.is_snapshot_due()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        journal.snapshot(server.core)
        run_steps(server, 1)  # the server continues
        journal.wait()
    assert "No space left" in caplog.text
    assert journal.error
    assert get_state(create_server(tmp_path)[0]) == get_state(server)
    journal.snapshot(server.core)  # the disk has room
    run_steps(server, 1)
    journal.wait()
    assert not journal.error
    assert get_state(create_server(tmp_path)[0]) == get_state(server)
    assert sorted(p.name.split("-")[0] for p in tmp_path.glob("*-*")) == ["journal", "snapshot"]


def test_files_that_a_snapshot_could_not_remove_are_reported_and_removed_later(
    tmp_path, monkeypatch, caplog
):
    server, journal = create_server(tmp_path)
    run_steps(server, 1)

    def refused(path, *_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        journal.snapshot(server.core)
        journal.wait()
    assert "Operation not permitted" in caplog.text
    assert isinstance(journal.error, PermissionError)
    assert get_state(create_server(tmp_path)[0]) == get_state(server)
    journal.snapshot(server.core)
    journal.wait()
    assert not journal.error
    assert sorted(path.name for path in tmp_path.glob("*-*")) == [
        "journal-00000002",
        "snapshot-00000002",
    ]


def test_a_failed_start_of_a_file_does_not_try_again_before_every_record(tmp_path, monkeypatch):
    server, journal = create_server(tmp_path, snapshot_bytes=100)
    while not journal.is_snapshot_due():
        run_steps(server, 1)

    def refused(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        journal.snapshot(server.core)
    assert isinstance(journal.error, OSError)
    assert not journal.is_snapshot_due()
    assert get_state(create_server(tmp_path)[0]) == get_state(server)
    while not journal.is_snapshot_due():
        run_steps(server, 1)
    journal.snapshot(server.core)
    journal.wait()
    assert not journal.error
    assert get_state(create_server(tmp_path)[0]) == get_state(server)


def test_record_waits_for_a_snapshot_that_fills_the_disk(tmp_path, monkeypatch):
    server, journal = create_server(tmp_path)
    run_steps(server, 2)
    may_continue = threading.Event()

    def fills_the_disk(*_):
        may_continue.wait(60)
        disk.room = 10**9  # the failed snapshot frees its space
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fills_the_disk)
    journal.snapshot(server.core)
    disk = journal._file = FullDisk(journal._file, 10)
    threading.Timer(0.2, may_continue.set).start()
    run_steps(server, 2)
    assert journal.error
    assert get_state(create_server(tmp_path)[0]) == get_state(server)


def test_server_may_be_killed_while_a_snapshot_is_written(tmp_path, monkeypatch):
    server, journal = create_server(tmp_path)
    run_steps(server, 2)
    may_continue, save = threading.Event(), torch.save

    def slow(state, file):
        file.write(b"half")
        may_continue.wait(60)
        file.seek(0)
        save(state, file)

    monkeypatch.setattr(torch, "save", slow)
    journal.snapshot(server.core)
    assert run_steps(server, 3).pushes == 5  # each is answered before the snapshot is complete
    assert journal.is_writing()
    copy = tmp_path.with_name(f"{tmp_path.name}-killed")
    shutil.copytree(tmp_path, copy)  # the folder after a kill at this moment
    restarted, _ = create_server(copy)
    assert get_state(restarted) == get_state(server)
    run_steps(restarted, 1)
    assert get_state(create_server(copy)[0]) == get_state(restarted)
    may_continue.set()
    journal.wait()
    assert get_state(create_server(tmp_path)[0]) == get_state(server)


class WithArray(torch.optim.SGD):
    """An optimizer whose state contains an array after the first step."""

    elementwise = True

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = np.ones(1)


def test_snapshot_that_could_not_be_loaded_does_not_replace_the_journal(tmp_path, caplog):
    server, journal = create_server(tmp_path, optimizer=partial(WithArray, lr=0.1))
    run_steps(server, 3)
    journal.snapshot(server.core)
    journal.close()
    assert "expected only numbers, strings and tensors" in caplog.text
    restarted, _ = create_server(tmp_path, optimizer=partial(WithArray, lr=0.1))
    assert get_state(restarted) == get_state(server)


def test_optimizer_whose_options_cannot_be_stored_is_refused_before_training(tmp_path):
    server = Server(dict(nn.Linear(2, 1).named_parameters()), build_with_function, workers=1)
    with pytest.raises(RuntimeError, match="expected only numbers, strings and tensors"):
        DiskJournal.start(tmp_path, server.core)


def build_with_function(parameters):
    optimizer = torch.optim.SGD(parameters)
    optimizer.param_groups[0]["function"] = lambda: None
    return optimizer


def test_journal_folder_that_cannot_be_created_is_named_in_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write a journal in .*file"):
        DiskJournal(tmp_path / "file" / "folder")


STALE = StaleSynchronous(2)


def of(consistency=STALE, outer=None, module=None, servers=1, lr=0.1, number=0):
    """Return a server of a job with these settings."""
    parameters = dict((module or nn.Linear(3, 2)).named_parameters())
    shard = partition(parameters, servers)[number]
    optimizer = outer or partial(torch.optim.SGD, lr=lr)
    return Server(parameters, optimizer, consistency, workers=1, shard=shard, elastic=True)


def build_slower(parameters):  # its address must not appear in the settings
    return torch.optim.SGD(parameters, lr=0.2)


OTHERS = {
    "policy": (of(), of(Asynchronous())),
    "bound": (of(), of(StaleSynchronous(3))),
    "averages": (of(BulkSynchronous()), of(LocalSteps(2))),
    "steps": (of(LocalSteps(4)), of(LocalSteps(2))),
    "fragments": (of(LocalSteps(4)), of(LocalSteps(4, fragments=2))),
    "compression": (of(LocalSteps(4)), of(LocalSteps(4, compression=Integers(4)))),
    "bits": (
        of(LocalSteps(4, compression=Integers(8))),
        of(LocalSteps(4, compression=Integers(4))),
    ),
    "optimizer": (of(), of(outer=torch.optim.Adam)),
    "rate": (of(), of(lr=0.2)),
    "outer": (of(LocalSteps(4)), of(LocalSteps(4, partial(torch.optim.Adam, lr=0.7)))),
    "outer rate": (of(LocalSteps(4)), of(LocalSteps(4, build_slower))),
    "names": (of(module=nn.ModuleList([nn.Linear(3, 2)])), of()),
    "shapes": (of(module=nn.Linear(2, 3)), of()),
    "types": (of(module=nn.Linear(3, 2).double()), of()),
    "cut": (of(servers=2), of(servers=3)),
    "number": (of(servers=2), of(servers=2, number=1)),
}


OTHER_PARAMETERS = "expected the state of a shard with layout"
#: The start of each error; by default, the policy is named.
ERRORS = {
    "optimizer": "expected a journal with optimizer Adam,",
    "rate": "expected a journal with options of weight lr=0.2,",
    "outer": "expected a journal with optimizer Adam,",
    "outer rate": "expected a journal with options of weight lr=0.2,",
    **dict.fromkeys(("names", "shapes", "types", "cut", "number"), OTHER_PARAMETERS),
}


@pytest.mark.parametrize("setting", OTHERS)
def test_journal_of_other_settings_is_refused_by_name(tmp_path, setting):
    written, restarted = OTHERS[setting]
    DiskJournal.start(tmp_path, written.core).close()
    before = restarted.core.replica.newest.clone()
    error = ERRORS.get(
        setting, f"expected a journal with policy {type(restarted.consistency).__name__}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        DiskJournal(tmp_path).load(restarted.core)
    assert torch.equal(restarted.core.replica.newest, before)
    assert restarted.core.journal is None


@pytest.mark.parametrize("policy", [LocalSteps(2, lambda p: build_slower(p)), Asynchronous()])
def test_journal_of_equal_settings_is_continued(tmp_path, policy):
    DiskJournal.start(tmp_path, of(policy, lambda p: build_slower(p)).core).close()
    restarted = of(policy, lambda p: build_slower(p))
    journal = DiskJournal(tmp_path)
    assert journal.load(restarted.core)
    journal.close()

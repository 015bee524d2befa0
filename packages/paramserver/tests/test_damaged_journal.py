"""A damaged journal is refused with file and byte, and is recovered only on request."""

import errno
import functools
import itertools
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from paramserver import Asynchronous, Server, Worker, partition
from paramserver.__main__ import main
from paramserver.journal.disk_journal import DiskJournal
from paramserver.journal.files import JournalError
from paramserver.journal.recovery import recover
from paramserver.protocol.core import Core
from torch import nn


def create_server(number=0, servers=1):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    parameters = dict(module.named_parameters())
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    shard = partition(parameters, servers)[number]
    return Server(parameters, sgd, Asynchronous(), workers=1, elastic=True, shard=shard)


OPEN = []


@pytest.fixture(autouse=True)
def _close_all():
    yield
    while OPEN:
        OPEN.pop().close()


def open_journal(folder, **kwargs):
    server, journal = create_server(**kwargs), DiskJournal(folder)
    OPEN.append(journal)
    journal.load(server.core)
    return server, journal


def get_state(server):
    state = server.core.replica.snapshot()
    return state["version"], state["parameters"].numpy().tobytes(), str(state["optimizer"])


def push(worker, times, states=None, folder=None, value=None):
    for _ in range(times):
        worker.pull()
        for parameter in worker.module.parameters():
            new = torch.randn(parameter.shape) if value is None else value
            parameter.grad = torch.zeros_like(parameter) + new
        worker.push()
        if states is not None:
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            states.append((sizes, get_state(worker._connections[0]._server)))


def fail_to_snapshot(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def write_journal(tmp_path_factory):
    """Return a function that writes the folder of `written`, once for each kind of first file."""

    @functools.cache
    def write(first):
        torch.manual_seed(0)
        folder, states = tmp_path_factory.mktemp(first) / "journal", []
        server, journal = open_journal(folder)
        states.append(({}, get_state(server)))
        worker = Worker(nn.Linear(3, 2), server)
        for part in range(3):
            push(worker, 2, states, folder)
            with pytest.MonkeyPatch.context() as patch:
                if part or first != "snapshot":
                    patch.setattr(torch, "save", fail_to_snapshot)
                if part < 2:
                    journal.snapshot(server.core)
                journal.wait()
        journal.close()
        return folder, states

    return write


@pytest.fixture
def written(tmp_path, request, write_journal):
    """Return a folder with three files of two pushes each, and the state after each push.

    The first file is a snapshot or a journal, depending on the parameter.
    """
    folder, states = write_journal(request.param)
    return shutil.copytree(folder, tmp_path / "journal"), states


def read_contents(folder):
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "lock"]
    return {path.name: path.read_bytes() for path in files}


@functools.cache
def create_fresh_server():
    """Return a server for `assert_refused`, which no test changes, and its state."""
    server = create_server()
    return server, get_state(server)


def assert_refused(folder, name, offset):
    """Assert that the error names the file and the byte `offset`, and that nothing changes."""
    before = read_contents(folder)
    server, fresh = create_fresh_server()
    with pytest.raises(JournalError) as error:
        DiskJournal(folder).load(server.core)
    assert read_contents(folder) == before
    assert get_state(server) == fresh
    assert server.core.journal is None
    text = str(error.value)
    assert f"python -m paramserver recover {folder}" in text
    damaged_name, byte = re.search(r"(\w+-\d+) is damaged at byte (\d+)", text).groups()
    assert (damaged_name, int(byte)) == (name, offset)


def start_of_part(name, raw, offset):
    """Return the start of the record, head, state or end of a snapshot that contains a byte."""
    starts = [0, len(raw) - 40]
    if name.startswith("journal"):
        starts = [0, *(start for start, _ in list_records(raw))]
    return max(start for start in starts if start <= offset)


BOTH = pytest.mark.parametrize("written", ["snapshot", "journal"], indirect=True)
#: Distance of the tested bytes between the fields of records, of which the first byte is tested.
STRIDES = pytest.mark.parametrize("stride", [997, pytest.param(1, marks=pytest.mark.exhaustive)])


def list_offsets(name, raw, stride):
    """Return every `stride`-th byte of a file and the first bytes of its parts and their fields."""
    bounds = [0, 8, 16, 24, 28, len(raw) - 48, len(raw) - 1]
    if name.startswith("journal"):
        for start, stop in list_records(raw):
            bounds += [start, start + 1, start + 9, start + 13, start + 17, stop - 1]
    return sorted(o for o in {*bounds, *range(0, len(raw), stride)} if 0 <= o < len(raw))


@BOTH
@STRIDES
def test_a_byte_that_is_flipped_anywhere_is_refused(written, stride):
    folder, _ = written
    assert len(read_contents(folder)) == 3
    for name, raw in read_contents(folder).items():
        path = folder / name
        for offset in list_offsets(name, raw, stride):
            flipped = bytearray(raw)
            flipped[offset] ^= 1 << offset % 8
            path.write_bytes(flipped)
            assert_refused(folder, name, start_of_part(name, raw, offset))
        path.write_bytes(raw)


@BOTH
@STRIDES
def test_a_file_before_the_last_one_that_is_cut_short_anywhere_is_refused(written, stride):
    folder, _ = written
    for name, raw in read_contents(folder).items():
        if name == "journal-00000002":
            continue
        for stop in list_offsets(name, raw, stride):
            (folder / name).write_bytes(raw[:stop])
            # The last bytes of a file are read as the end of a snapshot.
            is_journal = name.startswith("journal")
            damaged = start_of_part(name, raw, stop) if is_journal else max(0, stop - 40)
            assert_refused(folder, name, damaged)
        (folder / name).write_bytes(raw)


@pytest.mark.parametrize(
    "written",
    ["snapshot", pytest.param("journal", marks=pytest.mark.exhaustive)],
    indirect=True,
)
@STRIDES
def test_truncated_last_file_restores_all_complete_records(written, stride, caplog):
    """A server that dies during a write leaves such a file, which contains all answered pushes."""
    folder, states = written
    path = folder / "journal-00000002"
    raw = path.read_bytes()
    for number, stop in enumerate([*list_offsets(path.name, raw, stride), len(raw)]):
        path.write_bytes(raw[:stop])
        if stop < 28:  # a file gets its name after its header is written
            assert_refused(folder, path.name, 0)
            continue
        acknowledged = [state for sizes, state in states if sizes.get(path.name, 0) <= stop]
        server, journal = open_journal(folder)
        assert get_state(server) == acknowledged[-1]
        journal.close()
        cut = path.stat().st_size
        assert raw.startswith(path.read_bytes())
        assert (cut < stop) == ("an incomplete record" in caplog.text)
        caplog.clear()
        if stride > 1 and number % 4:
            continue
        restarted, journal = open_journal(folder)
        push(Worker(nn.Linear(3, 2), restarted), 1)  # the restored server accepts pushes
        journal.close()
        shown = get_state(restarted)
        restarted, journal = open_journal(folder)
        assert get_state(restarted) == shown
        journal.close()


@BOTH
def test_a_missing_file_is_refused(written):
    folder, _ = written
    for name, raw in read_contents(folder).items():
        (folder / name).unlink()
        missing = name.replace("snapshot-00000001", "journal-00000000")
        assert_refused(folder, missing, 0)
        (folder / name).write_bytes(raw)


@BOTH
def test_misplaced_files_are_refused(written, tmp_path, monkeypatch):
    folder, _ = written
    files = read_contents(folder)
    journals = [name for name in files if name.startswith("journal")]
    for first, second in itertools.combinations(journals, 2):
        (folder / first).write_bytes(files[second])
        (folder / second).write_bytes(files[first])
        assert_refused(folder, first, 0)
        (folder / first).write_bytes(files[first])
        (folder / second).write_bytes(files[second])
    another, journal = open_journal(tmp_path / "other")  # a journal of an equal job
    journal.snapshot(another.core)
    journal.wait()
    if "snapshot-00000001" not in files:
        monkeypatch.setattr(torch, "save", fail_to_snapshot)
    journal.snapshot(another.core)
    journal.close()
    for name, raw in read_contents(tmp_path / "other").items():
        if name in files:
            (folder / name).write_bytes(raw)
            with pytest.raises(JournalError, match=r"is damaged at byte 0: .*another journal"):
                DiskJournal(folder).load(create_server().core)
            (folder / name).write_bytes(files[name])


def list_records(raw):
    """Return the bounds of the records of a file, computed from the format alone."""
    places, start = [], 28
    while start < len(raw):
        size = 17 + int.from_bytes(raw[start + 1 : start + 9], "little")
        places.append((start, start + size))
        start += size
    assert start == len(raw)
    return places


@BOTH
def test_misplaced_records_are_refused(written):
    folder, _ = written
    path = folder / "journal-00000002"
    raw = path.read_bytes()
    places = list_records(raw)
    for start, stop in places[:-1]:
        path.write_bytes(raw[:start] + raw[stop:])  # a record is missing
        assert_refused(folder, path.name, start)
        path.write_bytes(raw[:stop] + raw[start:])  # a record is repeated
        assert_refused(folder, path.name, stop)
    path.write_bytes(raw + bytes(50))  # a file system may leave zeros after a power failure
    assert_refused(folder, path.name, len(raw))
    path.write_bytes(raw)
    assert open_journal(folder)[0].version == 6


@BOTH
@pytest.mark.parametrize("stride", [401, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_recovery_truncates_to_the_last_good_record_and_keeps_discarded_bytes(
    written, stride, capsys
):
    folder, states = written
    possible = [state for _, state in states]
    for name, raw in read_contents(folder).items():
        if not name.startswith("journal"):
            continue
        for offset in range(0, len(raw), stride):
            copy = folder.with_name(f"{name}-{offset}")
            shutil.copytree(folder, copy)
            flipped = bytearray(raw)
            flipped[offset] ^= 4
            (copy / name).write_bytes(flipped)
            if name == "journal-00000000" and offset < 28:  # no record precedes it
                with pytest.raises(JournalError, match="expected a good record in "):
                    recover(copy)
                shutil.rmtree(copy)
                continue
            assert main(["recover", str(copy)]) == 0
            output = capsys.readouterr().out
            assert f"{copy / name} is damaged at byte" in output
            assert (copy / "discarded-0" / name).read_bytes() == bytes(flipped)
            server, journal = open_journal(copy)
            good = [
                state
                for sizes, state in states
                if not any(
                    sizes.get(n, 0) > (offset if n == name else 0)
                    for n in read_contents(folder)
                    if n.startswith("journal") and n >= name
                )
            ]
            assert get_state(server) == good[-1]
            assert get_state(server) in possible
            push(Worker(nn.Linear(3, 2), server), 1)
            journal.close()
            assert open_journal(copy)[0].version == server.version
            shutil.rmtree(copy)
    assert recover(folder) == [
        f"{folder} ends at entry 13 of the log"
    ]  # an undamaged journal is not changed
    assert read_contents(folder)
    assert open_journal(folder)[0].version == 6


@BOTH
def test_a_file_whose_new_name_was_lost_in_a_power_failure_is_read(written):
    folder, states = written
    (folder / "journal-00000002").rename(folder / "next-00000002")
    server, _ = open_journal(folder)
    assert get_state(server) == states[-1][1]
    assert (folder / "journal-00000002").exists()


def wrap_with_counter(change, call):
    """Return a function, also usable as a method, that passes `change` and its arguments on."""
    return lambda *args, **kwargs: call(change, *args, **kwargs)


@pytest.mark.parametrize(
    ("written", "name", "at_head"),
    [
        pytest.param(first, name, at_head, marks=[] if is_usual else pytest.mark.exhaustive)
        for first in ("snapshot", "journal")
        for name in ("journal-00000001", "journal-00000002")
        for at_head in (False, True)
        for is_usual in [(first == "snapshot") == (at_head == name.endswith("2"))]
    ],
    indirect=["written"],
)
def test_recovery_that_is_killed_at_any_change_is_repeated(written, name, at_head, monkeypatch):
    folder, _ = written
    raw = bytearray((folder / name).read_bytes())
    raw[10 if at_head else -60] ^= 4
    (folder / name).write_bytes(raw)
    undisturbed = folder.with_name("undisturbed")
    shutil.copytree(folder, undisturbed)
    recover(undisturbed)
    expected = get_state(open_journal(undisturbed)[0])
    is_killed = True
    kill_at = 0
    while is_killed:
        copy = folder.with_name(f"killed-{kill_at}")
        shutil.copytree(folder, copy)
        changes = itertools.count()

        def die(change, *args, changes=changes, kill_at=kill_at, **kwargs):
            if next(changes) == kill_at:
                raise KeyboardInterrupt  # not caught, so the disk is as after a kill
            return change(*args, **kwargs)

        with monkeypatch.context() as patch:
            changes_of_disk = [(Path, "rename"), (Path, "mkdir"), (os, "truncate"), (os, "fsync")]
            for owner, change in changes_of_disk:
                patch.setattr(owner, change, wrap_with_counter(getattr(owner, change), die))
            try:
                recover(copy)
                is_killed = False
            except KeyboardInterrupt:
                kill_at += 1
        recover(copy)
        assert get_state(open_journal(copy)[0]) == expected, kill_at
    assert kill_at > 2


@pytest.mark.parametrize("written", ["snapshot"], indirect=True)
def test_record_that_cannot_be_applied_is_named(written):
    folder, _ = written

    class Fails(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps == 3:
                raise ZeroDivisionError("in the third step")
            return super().step(closure)

    Fails.__name__ = "SGD"
    parameters = dict(nn.Linear(3, 2).named_parameters())
    make = partial(Fails, lr=0.1, momentum=0.9)
    server = Server(parameters, make, Asynchronous(), workers=1, elastic=True)
    before = read_contents(folder)
    with pytest.raises(JournalError, match="cannot be applied: ZeroDivisionError") as error:
        DiskJournal(folder).load(server.core)
    assert read_contents(folder) == before
    assert re.search(r"journal-\d+: the record at byte \d+ cannot", str(error.value))


def test_server_killed_while_it_starts_a_new_file_is_restored(tmp_path, monkeypatch):
    server, journal = open_journal(tmp_path / "a")
    push(Worker(nn.Linear(3, 2), server), 2)
    monkeypatch.setattr(torch, "save", fail_to_snapshot)
    journal.snapshot(server.core)
    journal.close()
    (tmp_path / "a/journal-00000001").rename(
        tmp_path / "a/next-00000001"
    )  # the server was killed before it renamed the file
    restarted, journal = open_journal(tmp_path / "a")
    assert get_state(restarted) == get_state(server)
    push(Worker(nn.Linear(3, 2), restarted), 1)
    journal.close()
    assert open_journal(tmp_path / "a")[0].version == 3
    assert list(read_contents(tmp_path / "a")) == ["journal-00000000", "journal-00000001"]


def open_two_servers(folder):
    return zip(
        *(open_journal(folder / f"server-{i}", number=i, servers=2) for i in (0, 1)), strict=True
    )


def pull_value(worker):
    """Return the version of the servers and the common value of all elements."""
    version = worker.pull()
    elements = {x for p in worker.module.parameters() for x in p.flatten().tolist()}
    assert len(elements) == 1
    return version, elements


@pytest.mark.parametrize(
    ("damaged", "fraction"),
    [
        *((0, 0.3), (1, 0.6), (0, 0.9), (1, 0.97)),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in ((1, 0.3), (0, 0.6), (1, 0.9), (0, 0.97))
        ),
    ],
)
def test_recovered_servers_agree_or_are_refused(tmp_path, damaged, fraction):
    """Each update changes all elements equally, so elements of different versions differ."""
    servers, journals = open_two_servers(tmp_path / "job")
    push(Worker(nn.Linear(3, 2), servers), 6, value=1.0)
    for journal in journals:
        journal.close()
    path = tmp_path / f"job/server-{damaged}/journal-00000000"
    raw = bytearray(path.read_bytes())
    raw[int(fraction * len(raw))] ^= 1
    path.write_bytes(raw)
    alone = shutil.copytree(tmp_path / "job", tmp_path / "alone")

    recover(alone / f"server-{damaged}")  # the other server may be ahead of it
    servers, journals = open_two_servers(alone)
    refused = []
    for _ in range(3):
        try:
            worker = Worker(nn.Linear(3, 2), servers)
            push(worker, 2, value=3.0)
            pull_value(worker)
        except (RuntimeError, ValueError) as error:
            refused.append(str(error))
    for text in refused:
        assert re.search(
            "restored from an older copy|another history|expected a log from entry|was not staged",
            text,
        )

    recover(tmp_path / "job")
    servers, journals = open_two_servers(tmp_path / "job")
    worker = Worker(nn.Linear(3, 2), servers)
    before = worker.pushes
    push(worker, 2, value=1.0)
    assert pull_value(worker)[0] == before + 2
    assert [server.version for server in servers] == [before + 2] * 2


def test_record_discarded_on_one_server_is_discarded_on_all(tmp_path):
    servers, journals = open_two_servers(tmp_path)
    push(Worker(nn.Linear(3, 2), servers), 6, value=1.0)
    for journal in journals:
        journal.close()
    path = tmp_path / "server-1/journal-00000000"
    raw = bytearray(path.read_bytes())
    start, _ = list_records(raw)[len(list_records(raw)) // 2]
    raw[start] ^= 1
    path.write_bytes(raw)
    recover(tmp_path)
    servers, _ = open_two_servers(tmp_path)
    worker = Worker(nn.Linear(3, 2), servers)
    before = worker.pushes
    assert 0 < before < 6
    push(worker, 2, value=1.0)
    assert pull_value(worker)[0] == before + 2


@pytest.mark.parametrize("holder_state", ["starts", "continues", "serves"])
def test_a_journal_that_another_process_uses_is_refused(tmp_path, monkeypatch, holder_state):
    """The error is also raised while the first process still reads the journal."""
    if holder_state == "continues":
        open_journal(tmp_path / "job")[1].close()
    is_open, opens = os.pipe()
    ends, may_end = os.pipe()

    def hold():
        os.write(opens, b"1")
        os.read(ends, 1)

    holder = os.fork()
    if not holder:  # another process, because a process does not exclude itself
        try:
            if holder_state != "serves":
                monkeypatch.setattr(Core, "restore", lambda *_: hold())
            open_journal(tmp_path / "job")
            hold()
        finally:
            os._exit(0)
    try:
        assert os.read(is_open, 1) == b"1"
        for use in (open_journal, recover):
            with pytest.raises(RuntimeError, match="in use by another process"):
                use(tmp_path / "job")
    finally:
        os.write(may_end, b"12")
        os.waitpid(holder, 0)
        for descriptor in (is_open, opens, ends, may_end):
            os.close(descriptor)
    assert open_journal(tmp_path / "job")[0].version == 0

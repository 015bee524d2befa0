"""All processes end with their run, and a hanging worker does not block the others."""

import multiprocessing
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import Asynchronous, BulkSynchronous, run
from paramserver.running import launch, supervise
from paramserver.running.job import Outcome
from paramserver.running.launch import PRELOADED
from paramserver.running.processes import Processes, collect
from paramserver_training import SGD, build_model, train, wait_until_started


def write_process_file(folder):
    """Create a file that is named by the id of this process."""
    (Path(folder) / str(os.getpid())).touch()


class Noted(torch.optim.SGD):
    """The optimizer of a server that notes its process."""

    def __init__(self, parameters, folder):
        super().__init__(parameters, lr=0.1)
        write_process_file(folder)


def compute_for_long(worker, folder):
    """Sleep without any message to the servers."""
    train(worker, 2)
    write_process_file(folder)
    time.sleep(600)


def run_for_long(transport, method, folder, temporary):
    """Call `run` in this process, which is then killed; `method` starts the processes."""
    tempfile.tempdir = temporary
    context = multiprocessing.get_context(method)
    multiprocessing.get_context = lambda _: context
    run(
        compute_for_long,
        build_model(),
        partial(Noted, folder=folder),
        args=(folder,),
        workers=1,
        transport=transport,
        restarts=int(transport == "zeromq"),
    )


def is_alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("transport", "method"),
    [
        ("zeromq", "fork"),  # a fork server of the caller would take seconds to start
        pytest.param("shared_memory", "forkserver", marks=pytest.mark.exhaustive),
        pytest.param("zeromq", "forkserver", marks=pytest.mark.exhaustive),
    ],
)
def test_no_process_outlives_a_killed_caller(transport, method, tmp_path):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    noted, temporary = tmp_path / "noted", Path(f"/tmp/{os.getpid()}-{transport[0]}-{method}")
    noted.mkdir()
    temporary.mkdir()  # a socket's address has at most a hundred characters
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = transport, method, str(noted), str(temporary)
    caller = context.Process(target=run_for_long, args=arguments)
    caller.start()
    try:
        assert wait_until(lambda: len(list(noted.iterdir())) == 2, 300)
    finally:
        caller.kill()
        caller.join()
    numbers = [int(path.name) for path in noted.iterdir()]
    assert wait_until(lambda: not any(map(is_alive, numbers)), 20)
    left = [path.name for path in temporary.iterdir() if path.name.startswith("tmp")]
    assert left == []  # the folder of sockets, journal and store is removed
    shutil.rmtree(temporary)


def stop(worker, how, folder, workers):
    wait_until_started(folder, worker, workers)
    train(worker, 2)
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(600)
    return len(train(worker, 3))


@pytest.mark.parametrize(
    ("transport", "policy"),
    [
        ("shared_memory", BulkSynchronous()),
        pytest.param("zeromq", None, marks=pytest.mark.exhaustive),
    ],
)
def test_other_workers_continue_and_end_without_a_hanging_worker(
    transport, policy, tmp_path, monkeypatch
):
    if transport == "zeromq":  # a thread of a sleeping worker sends HEARTBEATs
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    timeout = 3.0 if transport == "zeromq" else 1.0  # HEARTBEATs are a second apart
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1 - timeout)  # killed 0.1 s after the loss
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.1 - timeout)
    start = time.monotonic()
    how = "stopped" if transport == "zeromq" else "asleep"
    result = run(
        stop,
        build_model(),
        SGD,
        policy,
        args=(how, tmp_path, 3),
        workers=3,
        servers=2,
        transport=transport,
        allow_missing=True,
        timeout=timeout,
    )
    assert result.values == [3, None, 3]
    assert list(result.lost) == [1]
    assert f"it sent no request for {timeout:g} s" in result.lost[1]
    assert time.monotonic() - start < 100
    assert multiprocessing.active_children() == []


class SlowToLoad:
    """An argument that takes `seconds` to load once `folder` contains the file `stopped`."""

    def __init__(self, folder, seconds):
        self.folder = folder
        self.seconds = seconds

    def __setstate__(self, state):
        self.__dict__.update(state)
        if (self.folder / "stopped").exists():
            time.sleep(self.seconds)


def stop_once(worker, folder, slow):
    wait_until_started(folder, worker, 2)
    if worker.rank == 1 and not worker.position:
        train(worker, 2)
        (slow.folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return len(train(worker, 5 - worker.position))


@pytest.mark.parametrize(
    ("seconds", "period", "values"),
    [
        (4.0, 3.5, [5, 3]),  # a restarted process may take longer than one period to join
        (600.0, 1.0, [5, None]),  # it is killed after two periods
    ],
)
def test_hanging_worker_is_restarted(seconds, period, values, tmp_path, monkeypatch):
    pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    monkeypatch.setattr(supervise, "GRACE_SECONDS", period - 3.0)
    result = run(
        stop_once,
        build_model(),
        SGD,
        Asynchronous(),
        args=(tmp_path, SlowToLoad(tmp_path, seconds)),
        workers=2,
        transport="zeromq",
        timeout=3.0,
        allow_missing=values[1] is None,
        restarts=1,
    )
    assert result.values == values
    if values[1] is None:
        assert "did not join within 2 s of its restart" in result.lost[1]
    else:
        assert result.versions == [10]


def train_and_note(worker, steps, folder, workers):
    wait_until_started(folder, worker, workers)
    for step in range(steps):
        train(worker, 1)
        (folder / f"{worker.rank}-{step}").touch()
        time.sleep(0.1)
    return worker.pushes


@pytest.mark.parametrize(
    "suspended", [pytest.param("worker 0", marks=pytest.mark.exhaustive), "all"]
)
def test_processes_that_are_suspended_for_longer_than_the_timeout_continue(suspended, tmp_path):
    """As if a machine had slept: a worker waits for its own answers only, and no peer is blamed."""
    pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    workers = 1 if suspended == "worker 0" else 2

    def suspend():
        assert wait_until(lambda: (tmp_path / "0-2").exists(), 60)
        children = [
            process.pid
            for process in multiprocessing.active_children()
            if process.name == suspended or suspended == "all"
        ]
        for number in children:
            os.kill(number, signal.SIGSTOP)
        time.sleep(2.5)
        for number in children:
            os.kill(number, signal.SIGCONT)
        return len(children)

    with ThreadPoolExecutor(1) as pool:
        count = pool.submit(suspend)
        result = run(
            train_and_note,
            build_model(),
            SGD,
            args=(6, tmp_path, workers),
            workers=workers,
            transport="zeromq",
            timeout=2.0,
        )
        assert count.result() == (1 if suspended == "worker 0" else 3)
    assert result.values == [6] * workers
    assert result.versions == [6]
    assert result.lost == {}


def die_within_a_message(report_join):
    """Send the length and the first bytes of an outcome, as a process does that is killed."""
    pipe = sys._getframe(1).f_locals["pipe"]
    os.write(pipe.fileno(), struct.pack("!i", 1000) + b"first")
    os._exit(3)


def test_a_process_that_dies_while_it_sends_its_outcome_is_named():
    context = multiprocessing.get_context("fork")
    with Processes(context, None, 1.0) as processes:
        processes.start("worker 0", die_within_a_message)
        outcomes = collect(processes, allow_missing=False)
    assert outcomes == {"worker 0": Outcome("worker 0", exit_code=3)}


@pytest.mark.parametrize(
    "transport",
    [
        "shared_memory",
        pytest.param("zeromq", marks=pytest.mark.exhaustive),
    ],
)
def test_error_of_the_caller_leaves_no_process(transport, tmp_path, monkeypatch):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")

    def fails(processes, seconds):
        assert multiprocessing.active_children() != []
        raise KeyboardInterrupt

    monkeypatch.setattr(Processes, "iter_outcomes", fails)
    with pytest.raises(KeyboardInterrupt):
        run(stop, build_model(), SGD, args=("asleep", tmp_path, 2), workers=2, transport=transport)
    assert multiprocessing.active_children() == []

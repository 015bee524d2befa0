"""All remaining workers receive an error that names a dead, failed or hanging process."""

import os
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker_pool import try_ranks

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Job,
    LocalSteps,
    OptimizerSpec,
    PeerLost,
    Server,
    StaleSynchronous,
    Worker,
    join,
    partition,
    run,
)
from paramserver.parameters import get_trainable_parameters
from paramserver.protocol.messages import Kind, Message
from paramserver.running import launch
from paramserver.transport.connection import RemoteConnection
from paramserver.transport.shared_memory import create_channel_pairs
from paramserver_training import SGD, build_model, draw_batch, fail, train, wait_until_started

UNIT_SGD = partial(torch.optim.SGD, lr=1.0)


def test_a_dead_worker_is_named():
    start = time.monotonic()
    with pytest.raises(PeerLost, match="worker 1 died with exit code 3"):
        run(fail, build_model(), SGD, args=(1, "die"), workers=3, servers=2, timeout=300)
    assert time.monotonic() - start < 200  # much earlier than the timeout


@pytest.mark.parametrize(
    ("transport", "how", "code"),
    [
        ("shared_memory", "exit 4", 4),
        ("zeromq", "exit 'bad'", 1),
        pytest.param("shared_memory", "die", 3, marks=pytest.mark.exhaustive),
        pytest.param("shared_memory", "exit 'bad'", 1, marks=pytest.mark.exhaustive),
        pytest.param("zeromq", "exit 4", 4, marks=pytest.mark.exhaustive),
        pytest.param("zeromq", "die", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_worker_that_exits_is_named_and_disturbs_nobody(transport, how, code):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    result = run(
        fail,
        build_model(),
        SGD,
        Asynchronous(),
        args=(1, how),
        workers=3,
        servers=2,
        transport=transport,
        allow_missing=True,
        timeout=10.0,
    )
    assert result.lost == {1: f"worker 1 died with exit code {code}"}
    assert [len(value or ()) for value in result.values] == [3, 0, 3]
    assert result.versions == [2 * 5 + 2] * 2


@pytest.mark.parametrize("how", ["exit 0", pytest.param("exit 4", marks=pytest.mark.exhaustive)])
def test_a_worker_that_exits_ends_the_run_and_not_its_caller(how):
    with pytest.raises(PeerLost, match=f"worker 0 died with exit code {how[5:]}"):
        run(fail, build_model(), SGD, args=(0, how), workers=2)


def test_exception_of_training_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError, match="seven") as caught:
        run(fail, build_model(), SGD, args=(0, "raise"), workers=2)
    assert "raised in worker 0" in "".join(caught.value.__notes__)


def test_a_hanging_worker_is_named_after_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", -0.9)  # the hanging worker is killed 0.1 s later
    with pytest.raises(
        TimeoutError, match=r"waited at clock 3 for worker 1 at clock 2, silent for 1 s"
    ):
        run(hang, build_model(), SGD, args=(1, tmp_path), workers=2, timeout=1.0)


def hang(worker, rank, folder):
    wait_until_started(folder, worker, 2)
    train(worker, 2)
    if worker.rank == rank:
        time.sleep(600)
    return train(worker, 3)


def lose_a_worker_and_continue(worker, seconds, folder):
    wait_until_started(folder, worker, 3)
    train(worker, 2)
    if worker.rank == 1:
        os._exit(3)
    for _ in range(10):
        time.sleep(seconds / 10)
        worker.pull()
        worker.push()
    return "well"


def test_other_workers_may_train_longer_than_the_timeout_after_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.0)
    result = run(
        lose_a_worker_and_continue,
        build_model(),
        SGD,
        Asynchronous(),
        args=(1.2, tmp_path),
        workers=3,
        servers=2,
        allow_missing=True,
        timeout=1.0,
    )
    assert result.values == ["well", None, "well"]
    assert result.lost == {1: "worker 1 died with exit code 3"}


class StopsServing(torch.optim.SGD):
    """A server whose process ends in the middle of an update."""

    def step(self, closure=None):
        os._exit(5)


def test_a_dead_server_is_named():
    optimizer = partial(StopsServing, lr=0.1)
    with pytest.raises(PeerLost, match="server 0 died with exit code 5"):
        run(train, build_model(), optimizer, args=(3,), workers=2, timeout=20.0)


class Raises(torch.optim.SGD):
    """An optimizer that raises an exception."""

    def step(self, closure=None):
        raise KeyError("moment")


def test_an_error_of_the_optimizer_reaches_the_workers():
    with pytest.raises(RuntimeError, match="server 0: KeyError: 'moment'"):
        run(train, build_model(), partial(Raises, lr=0.1), args=(3,), workers=2, timeout=20.0)


def test_beat_after_a_failure_does_not_end_the_server():
    server, workers = pair(allow_missing=False)
    server.mark_lost(1, "the power went out")
    assert server.core.handle(0, Message(Kind.HEARTBEAT), None, 0.0) == Message(Kind.OK)
    with pytest.raises(PeerLost, match="the power went out"):
        workers[0].pull()


def test_workers_see_a_dead_server():
    pull = Message(Kind.READ)
    ((ours, theirs),) = create_channel_pairs(["worker 0"], "server 7", 64)
    theirs.close()
    with pytest.raises(PeerLost, match=r"server 7 is gone: .*ended"):
        RemoteConnection(ours, 1.0).request(pull)
    ((ours, theirs),) = create_channel_pairs(["worker 0"], "server 7", 64)
    with pytest.raises(TimeoutError, match=r"server 7 did not answer for 0\.1 s"):
        RemoteConnection(ours, 0.1).request(pull)
    assert theirs.receive() == pull


def join_and_fail(how):
    module = build_model()
    with join(module, SGD, timeout=5.0) as worker:
        train(worker, 2)
        if dist.get_rank() == 2:
            if how == "raise":
                raise ZeroDivisionError("seven")
            os._exit(3)
        train(worker, 2)


@pytest.mark.parametrize("how", ["raise", "die"])
def test_every_rank_of_a_group_names_the_failed_rank(how):
    outcomes = try_ranks(join_and_fail, 3, how, timeout=40)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, PeerLost), outcome
        assert "worker 2 is gone" in str(outcome.error)
    if how == "raise":
        assert "ZeroDivisionError: seven" in str(outcomes[0].error)
        assert isinstance(outcomes[2].error, ZeroDivisionError)
    else:
        assert outcomes[2].exit_code == 3


def join_with_another_module():
    module = nn.Linear(3, 3 + dist.get_rank())
    with join(module, SGD, timeout=5.0) as worker:
        worker.pull()


def test_different_modules_are_refused_before_a_step():
    outcomes = try_ranks(join_with_another_module, 2, timeout=40)
    assert "worker 1 has layout" in str(outcomes[1].error)
    assert isinstance(outcomes[1].error, ValueError)
    assert "worker 1 is gone" in str(outcomes[0].error)


def pair(consistency=None, timeout=0.2, **options):
    server = Server(
        get_trainable_parameters(build_model()),
        UNIT_SGD,
        consistency,
        workers=2,
        timeout=timeout,
        **options,
    )
    return server, [Worker(build_model(), [server], rank=rank) for rank in range(2)]


def push(worker):
    inputs, targets = draw_batch(0, worker.rank)
    (worker.module(inputs) - targets).square().mean().backward()
    worker.push()


def test_timeout_of_a_request_that_was_answered_is_not_raised_later(monkeypatch):
    server, workers = pair(BulkSynchronous(), timeout=5.0)
    check = server.core.check
    # Another worker's request finds that worker 0 has waited too long, just before it is answered.
    monkeypatch.setattr(server.core, "check", lambda _: [(0, TimeoutError("worker 0 waited"))])
    workers[1].pull()
    push(workers[1])
    waiting = threading.Thread(target=workers[1].pull)
    waiting.start()
    while 0 not in server._errors:
        time.sleep(0.001)
    monkeypatch.setattr(server.core, "check", check)
    workers[0].pull()
    push(workers[0])
    waiting.join()
    assert not server._errors


def test_waiting_workers_do_not_wake_each_other():
    server = Server(get_trainable_parameters(build_model()), UNIT_SGD, workers=3)
    workers = [Worker(build_model(), [server], rank=rank) for rank in range(3)]
    handle, requests = server.core.handle, []

    def count(*arguments, **options):
        requests.append(arguments)
        return handle(*arguments, **options)

    server.core.handle = count
    threads = []
    for worker in workers[:2]:
        worker.pull()
        push(worker)
        threads.append(threading.Thread(target=worker.pull))
        threads[-1].start()
    while len(server.core.waits.waiting) < 2:
        time.sleep(0.001)
    time.sleep(0.1)
    requests.clear()
    time.sleep(0.3)
    assert len(requests) < 5  # one per worker every two seconds
    workers[2].pull()
    push(workers[2])
    for thread in threads:
        thread.join()
    assert [worker.version for worker in workers[:2]] == [1, 1]


def test_beats_keep_a_slow_worker():
    server, workers = pair(timeout=5.0, allow_missing=True)
    workers[0].pull()
    push(workers[0])
    now = time.monotonic()
    pull = Message(Kind.READ, clock=1, number=2)
    assert server.core.handle(0, pull, None, now) is None
    for second in range(1, 9):
        server.core.handle(1, Message(Kind.HEARTBEAT), None, now + second)
    assert server.core.check(now + 8.5) == []
    assert 1 in server.core.ledger.active


def test_beats_of_a_waiting_worker_do_not_excuse_a_silent_one():
    server, workers = pair(timeout=5.0, allow_missing=True)
    workers[0].pull()
    push(workers[0])
    now = time.monotonic()
    pull = Message(Kind.READ, clock=1, number=2)
    for second in range(7):
        server.core.handle(0, Message(Kind.HEARTBEAT), None, now + second)
        if server.core.handle(0, pull, None, now + second):
            break
        assert second <= 5
        server.core.check(now + second + 0.9)
    assert list(server.core.ledger.active) == [0]


def test_the_only_waiting_worker_continues_when_the_awaited_one_is_silent():
    """No other request wakes the waiting thread."""
    _, workers = pair(timeout=0.05, allow_missing=True)
    workers[0].pull()
    push(workers[0])
    pull = threading.Thread(target=workers[0].pull, daemon=True)
    pull.start()
    pull.join(30)
    assert not pull.is_alive()
    assert workers[0].version == 1


def test_pushing_twice_in_a_synchronous_step_is_refused_and_disturbs_nobody():
    _, workers = pair(BulkSynchronous(), timeout=20.0)
    workers[0].pull()
    push(workers[0])
    with pytest.raises(RuntimeError, match="worker 0 pushed twice in one bulk-synchronous step"):
        push(workers[0])
    exchange = workers[0]._exchange
    with pytest.raises(RuntimeError, match="worker 0 pushed twice in one bulk-synchronous step"):
        exchange.run(exchange.session.push())  # without the check of `prepare_push`
    workers[1].pull()
    push(workers[1])
    assert workers[1].pull() == workers[0].pull() == 1


def test_a_worker_must_pull_before_its_first_push():
    """After a restart its module has the initial parameters, and the servers have others."""
    server, workers = pair(Asynchronous())
    workers[0].pull()
    push(workers[0])
    restarted = Worker(build_model(), server, rank=0)
    with pytest.raises(RuntimeError, match="worker 0 must pull before its first push"):
        push(restarted)
    assert server.version == 1


def test_a_finished_or_unknown_worker_cannot_take_part():
    server, workers = pair(Asynchronous(), allow_missing=True)
    server.mark_lost(1, "done")  # so that finishing does not wait
    workers[0].finish()
    with pytest.raises(RuntimeError, match="worker 0 has finished"):
        workers[0].pull()
    with pytest.raises(ValueError, match="expected a worker below 2, got worker 2"):
        Worker(build_model(), [server], rank=2)


def test_two_workers_with_one_number_are_refused():
    server, workers = pair(Asynchronous())
    twin = Worker(build_model(), [server], rank=0)
    workers[0].pull()
    push(workers[0])
    with pytest.raises(ValueError, match="worker 0 is at clock 0, but the server has 1"):
        twin.pull()


def test_workers_that_train_one_module_are_refused():
    module = build_model()
    server = Server(get_trainable_parameters(module), SGD, workers=2)
    first = Worker(module, server, rank=0)
    with pytest.raises(ValueError, match=r"the module of worker 0 for worker 1.*copy\.deepcopy"):
        Worker(module, server, rank=1)
    assert Worker(module, server, rank=0).position == 0  # the same worker, created once more
    first.leave()
    Worker(module, server, rank=1)


def test_invalid_arguments_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="expected bound >= 0, got -1"):
        StaleSynchronous(-1)
    for policy in ("asynchronous", LocalSteps):
        with pytest.raises(TypeError, match=r"expected a policy, such as BulkSynchronous\(\), got"):
            Server(get_trainable_parameters(build_model()), SGD, policy, workers=1)
    with pytest.raises(ValueError, match="expected workers >= 1, got 0"):
        Server(get_trainable_parameters(build_model()), SGD, workers=0)
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected timeout in seconds >= 0, got"):
            Server(get_trainable_parameters(build_model()), SGD, workers=1, timeout=timeout)
    server = Server(get_trainable_parameters(build_model()), SGD, workers=1)
    with pytest.raises(ValueError, match=r"names, which torch\.compile\(module\) changes"):
        Worker(torch.compile(build_model(), backend="eager"), server)
    with pytest.raises(ValueError, match=r"expected transport 'zeromq' .* got 'shared_memory'"):
        run(train, build_model(), SGD, restarts=1)
    with pytest.raises(ValueError, match="expected workers >= 1, got 0"):
        run(train, build_model(), SGD, workers=0)
    with pytest.raises(ValueError, match="'shared_memory' or 'zeromq', got 'pigeon'"):
        run(train, build_model(), SGD, transport="pigeon")
    with pytest.raises(ValueError, match="expected parameters that require a gradient, got none"):
        run(train, nn.ReLU(), SGD)


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("timeout", None, "timeout in seconds to be a number, got None"),
        ("timeout", "60", "timeout in seconds to be a number, got '60'"),
        ("workers", None, "workers to be an integer >= 0, got None"),
        ("workers", 1.5, "workers to be an integer >= 0, got 1.5"),
        ("servers", "2", "servers to be an integer >= 1, got '2'"),
        ("restarts", None, "restarts to be an integer >= 0, got None"),
        ("args", None, "args to be a sequence of arguments of train, got None"),
        ("journal", 7, "journal to be the path of a folder, or None, got 7"),
        ("module", None, "module to be an nn.Module, got None"),
        ("optimizer", None, "optimizer to be a function of the parameters"),
        ("consistency", "bulk", "a policy, such as BulkSynchronous(), got 'bulk'"),
        ("train", None, "train to be a function of a worker, got None"),
    ],
)
def test_argument_of_a_wrong_type_is_named_before_a_process_starts(argument, value, expected):
    arguments = {"train": train, "module": build_model(), "optimizer": SGD, argument: value}
    with pytest.raises(TypeError, match=re.escape(f"expected {expected}")):
        run(**arguments)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda p: Server(p, SGD, workers=None), "workers to be an integer >= 1, got None"),
        (lambda p: Server(p, SGD, workers=1, timeout=None), "timeout in seconds to be a number"),
        (lambda p: Server(p, None, workers=1), "optimizer to be a function of the parameters"),
        (
            lambda p: Worker(build_model(), Server(p, SGD, workers=1), rank=None),
            "rank to be an integer",
        ),
        (lambda p: Worker(None, Server(p, SGD, workers=1)), "module to be an nn.Module, got None"),
        (lambda p: partition(p, None), "servers to be an integer >= 1, got None"),
        (lambda _: StaleSynchronous(1.5), r"bound to be an integer >= 0, got 1\.5"),
        (lambda _: LocalSteps(True), "steps to be an integer >= 1, got True"),
        (lambda _: LocalSteps(2, alpha=None), "alpha to be a number, got None"),
        (lambda _: OptimizerSpec(SGD, max_norm="1"), "max_norm to be a number, got '1'"),
        (
            lambda _: Job(train, build_model(), SGD, timeout=None),
            "timeout in seconds to be a number",
        ),
    ],
)
def test_constructors_name_an_argument_of_a_wrong_type(call, expected):
    with pytest.raises(TypeError, match=f"expected {expected}"):
        call(get_trainable_parameters(build_model()))


def test_integers_and_numbers_of_other_libraries_are_accepted():
    assert StaleSynchronous(np.int64(2)) == StaleSynchronous(2)
    assert LocalSteps(torch.tensor(4), alpha=torch.tensor(0.5)).interval == 4
    assert OptimizerSpec(SGD, max_norm=torch.tensor(1.0)).max_norm == 1
    job = Job(train, build_model(), SGD, workers=np.int64(1), timeout=np.float32(0.5))
    assert type(job.timeout) is float
    assert job.server(job.shards()[0]).core.waits.timeout == 0.5

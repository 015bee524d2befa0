"""Training is the same over every transport and in an existing process group."""

import math
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_pool import run_on_shared_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the processes that `run` starts import it by name


from paramserver import Asynchronous, StaleSynchronous, join, run
from paramserver_training import (
    ADAMW,
    SGD,
    assert_equal_parameters,
    build_model,
    train,
    train_alone,
)


@pytest.mark.parametrize("transport", ["shared_memory", "zeromq"])
def test_run_equals_one_process(transport):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    options = {"workers": 3, "servers": 2, "transport": transport, "timeout": math.inf}
    result = run(train, build_model(), SGD, args=(5,), **options)
    assert_equal_parameters(result.parameters, train_alone(5, 3, SGD))
    assert result.values == [[0, 1, 2, 3, 4]] * 3
    assert result.versions == [5, 5]
    assert result.staleness == {0: 15}


def keep_own_parameters(worker, folder):
    """Return True if the worker's module is not changed by the writes of other workers."""
    with torch.no_grad():
        worker.module[0].bias.fill_(worker.rank)
    (folder / str(worker.rank)).touch()
    while len(list(folder.iterdir())) < 3:  # until all workers have written
        time.sleep(0.001)
    return bool((worker.module[0].bias == worker.rank).all())


def test_workers_have_separate_modules(tmp_path):
    result = run(keep_own_parameters, build_model(), SGD, args=(tmp_path,), workers=3)
    assert result.values == [True] * 3


@pytest.mark.parametrize(
    "consistency",
    [pytest.param(StaleSynchronous(1), marks=pytest.mark.exhaustive), Asynchronous()],
    ids=repr,
)
def test_every_gradient_is_an_update_when_not_bulk_synchronous(consistency):
    result = run(train, build_model(), SGD, consistency, args=(5,), workers=3)
    assert result.versions == [15]
    assert sum(result.staleness.values()) == 15


def join_and_train(steps, servers, optimizer):
    module = build_model()
    if dist.get_rank() not in servers:
        for parameter in module.parameters():  # the first pull must replace these
            parameter.data.zero_()
    with join(module, optimizer, servers=servers, timeout=math.inf) as worker:
        train(worker, steps)
        dist.barrier()  # other traffic in the same group
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("world", "servers"), [(3, (1,)), (3, (0, 2))])
def test_ranks_of_an_existing_group_equal_one_process(world, servers):
    expected = train_alone(4, world, ADAMW)
    for parameters in run_on_shared_ranks(join_and_train, world, 4, servers, ADAMW):
        assert_equal_parameters(parameters, expected)


def join_repeatedly(steps):
    return [join_and_train(steps, (0,), ADAMW) for _ in range(3)]


def test_group_can_be_joined_repeatedly():
    expected = train_alone(2, 2, ADAMW)
    for results in run_on_shared_ranks(join_repeatedly, 2, 2):
        for parameters in results:
            assert_equal_parameters(parameters, expected)


def join_part_of_a_group(steps):
    part = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    module = build_model()
    with join(module, ADAMW, group=part) as worker:
        train(worker, steps)
        assert (
            worker.finish() == worker.finish() == steps
        )  # the end of the block calls it once more
        for late in (worker.push, worker.pull):
            with pytest.raises(RuntimeError, match="has finished; it can neither pull nor push"):
                late()
    return {name: p.detach() for name, p in module.named_parameters()}


def test_subset_of_ranks_can_join_and_finish_training():
    first, outside, third = run_on_shared_ranks(join_part_of_a_group, 3, 3)
    assert outside is None
    for parameters in (first, third):
        assert_equal_parameters(parameters, train_alone(3, 2, ADAMW))

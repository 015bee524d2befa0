"""The mean of 16-bit gradients is rounded once, with any transport."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # the processes that `run` starts import it by name

from paramserver import BulkSynchronous, LocalSteps, Server, Worker, partition, run
from paramserver.compression import Integers
from paramserver_training import run_in_threads

UNIT_SGD = partial(torch.optim.SGD, lr=1.0)
HALVES = [torch.bfloat16, torch.float16]
WORKERS = 7


class Table(nn.Module):
    """A parameter of 300 zeros."""

    def __init__(self, dtype):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(60, 5, dtype=dtype))


def draw_push(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(60, 5, generator=generator).to(dtype)


def push_once(worker):
    worker.pull()
    worker.module.x.grad = draw_push(worker.rank, worker.module.x.dtype)
    worker.push()


def step_with_one_rounding(gradients):
    """Return the parameters after one step of SGD from zero: the negated mean, rounded once."""
    return -(sum(g.double() for g in gradients) / len(gradients)).to(gradients[0].dtype)


def take_step_in_threads(dtype, policy, push, servers=2):
    """Return the flat parameters of the servers after one push per worker."""
    start = dict(Table(dtype).named_parameters())
    shards = partition(start, servers)
    hosts = [Server(start, UNIT_SGD, policy, workers=WORKERS, shard=shard) for shard in shards]
    optimizer = UNIT_SGD if isinstance(policy, LocalSteps) else None
    group = [Worker(Table(dtype), hosts, rank=rank, optimizer=optimizer) for rank in range(WORKERS)]

    def work(worker):
        push(worker)
        worker.finish()

    run_in_threads(*(partial(work, worker) for worker in group))
    views = [host.shard.views(host.core.replica._buffer) for host in hosts]
    return torch.cat([view.view(-1) for some in views for view in some])


BULK, LOCAL = BulkSynchronous(), LocalSteps(1, UNIT_SGD)


@pytest.mark.parametrize(
    ("policy", "transport"),
    [
        (BULK, "shared_memory"),
        (LOCAL, "zeromq"),
        pytest.param(LOCAL, "shared_memory", marks=pytest.mark.exhaustive),
        pytest.param(BULK, "zeromq", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_mean_is_rounded_once_over_every_transport(policy, transport):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    result = run(
        push_once,
        Table(torch.bfloat16),
        UNIT_SGD,
        policy,
        workers=3,
        servers=2,
        transport=transport,
    )
    expected = step_with_one_rounding([draw_push(rank, torch.bfloat16) for rank in range(3)])
    assert torch.equal(result.parameters["x"], expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "policy", [BulkSynchronous(), LocalSteps(1, UNIT_SGD)], ids=["bulk", "local"]
)
def test_a_mean_of_many_is_rounded_once(policy, dtype):
    stored = take_step_in_threads(dtype, policy, push_once)
    expected = step_with_one_rounding([draw_push(rank, dtype) for rank in range(WORKERS)])
    assert torch.equal(stored, expected.view(-1))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compression", [Integers(8), Integers(4)], ids=repr)
def test_mean_of_compressed_changes_is_rounded_once(compression, dtype):
    stored = take_step_in_threads(dtype, LocalSteps(1, UNIT_SGD, compression), push_once, servers=1)
    changes = [draw_push(rank, dtype).view(-1).float() for rank in range(WORKERS)]
    received = [
        compression.decode(compression.encode(gradient), len(gradient)) for gradient in changes
    ]
    assert torch.equal(
        stored, -(sum(gradient.double() for gradient in received) / WORKERS).to(dtype)
    )

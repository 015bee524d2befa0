"""The tests of ps-lite's continuous integration, on its numbers of nodes.

- `test_connection`: nodes start and end without any message of the application.
- `test_kv_app`: every worker pushes its values 50 times to its own keys, pulls the sums, and then
  pushes and pulls 50 times. One process per worker.
- `test_kv_app_multi_workers`: the same with all workers in one process.

`test_simple_app` has no counterpart: its scheduler sends texts of the application to servers and
workers, and this package has neither a scheduler nor such messages.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import Asynchronous, Server, Worker, partition, run
from paramserver_training import run_in_threads

ADD = partial(torch.optim.SGD, lr=1.0)
REPEAT = 50


class KeysOfWorkers(nn.Module):
    """Values of all keys: a row of keys per worker."""

    def __init__(self, workers, keys):
        super().__init__()
        self.values = nn.Parameter(torch.zeros(workers, keys))


def push_and_pull(worker):
    """Return the sums of the errors of the values that are pulled after 50 and 100 pushes."""
    table = worker.module.values
    generator = torch.Generator().manual_seed(worker.rank + 7)
    values = torch.randint(1000, table[0].shape, generator=generator).float()

    def push():
        table.grad = torch.zeros_like(table)
        table.grad[worker.rank] = -values
        worker.push()

    def error(pushes):
        return float((table[worker.rank].detach() - pushes * values).abs().sum())

    worker.pull()
    for _ in range(REPEAT):
        push()
    worker.pull()
    errors = [error(REPEAT)]
    for _ in range(REPEAT):
        push()
        worker.pull()
    return [*errors, error(2 * REPEAT)]


def do_nothing(worker):
    return worker.pushes


TRANSPORTS = ("shared_memory", "zeromq")
NODES = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2))


def require(transport):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")


@pytest.mark.parametrize(
    "transport", [pytest.param("shared_memory", marks=pytest.mark.exhaustive), "zeromq"]
)
def test_nodes_connect_and_end(transport):
    require(transport)
    module = KeysOfWorkers(2, 10)
    options = {"workers": 2, "servers": 2, "transport": transport}
    result = run(do_nothing, module, ADD, Asynchronous(), **options)
    assert result.values == [0, 0]
    assert result.versions == [0, 0]


@pytest.mark.parametrize(
    ("transport", "servers", "workers", "keys"),
    [
        ("shared_memory", 2, 2, 10_000),
        *(
            pytest.param(transport, servers, workers, keys, marks=pytest.mark.exhaustive)
            for transport in TRANSPORTS
            for servers, workers in NODES
            for keys in (10, 10_000)
        ),
    ],
)
def test_pushed_values_are_added_and_pulled(transport, servers, workers, keys):
    require(transport)
    module = KeysOfWorkers(workers, keys)
    options = {"workers": workers, "servers": servers, "transport": transport}
    result = run(push_and_pull, module, ADD, Asynchronous(), **options)
    assert result.values == [[0.0, 0.0]] * workers
    assert result.versions == [2 * REPEAT * workers] * servers


@pytest.mark.parametrize("keys", [10, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_workers_in_one_process_push_and_pull(keys):
    parameters = dict(KeysOfWorkers(2, keys).named_parameters())
    hosts = [
        Server(parameters, ADD, Asynchronous(), workers=2, shard=shard)
        for shard in partition(parameters, 2)
    ]
    errors = []

    def work(rank):
        with Worker(KeysOfWorkers(2, keys), hosts, rank=rank) as worker:
            errors.extend(push_and_pull(worker))

    run_in_threads(*(partial(work, rank) for rank in range(2)))
    assert errors == [0.0] * 4
    assert [host.version for host in hosts] == [4 * REPEAT] * 2

"""The tests of ps-lite: `test_kv_app` and `test_kv_app_multi_workers`, on its numbers of nodes.

Every worker pushes its values 50 times to its own keys, servers add them, and the worker pulls 50
times the values.
"""

from functools import partial

import pytest
import torch
from paramserver import Asynchronous, run
from torch import nn

ADD = partial(torch.optim.SGD, lr=1.0)
REPEAT = 50


class KeysOfWorkers(nn.Module):
    """Values of all keys: a row of keys per worker."""

    def __init__(self, workers, keys):
        super().__init__()
        self.values = nn.Parameter(torch.zeros(workers, keys))


def push_and_pull(worker):
    """Return the sum of the errors of the pulled values."""
    table = worker.module.values
    generator = torch.Generator().manual_seed(worker.rank + 7)
    values = torch.randint(1000, table[0].shape, generator=generator).float()
    for _ in range(REPEAT):
        table.grad = torch.zeros_like(table)
        table.grad[worker.rank] = -values
        worker.push()
    worker.pull()
    return float((table[worker.rank].detach() - REPEAT * values).abs().sum())


@pytest.mark.parametrize(
    ("transport", "servers", "workers", "keys"),
    [
        ("shared_memory", 2, 2, 10_000),
        *(
            pytest.param(transport, servers, workers, keys, marks=pytest.mark.exhaustive)
            for transport in ("shared_memory", "zeromq")
            for servers, workers in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2))
            for keys in (10, 10_000)
        ),
    ],
)
def test_pushed_values_are_added_and_pulled(transport, servers, workers, keys):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    module = KeysOfWorkers(workers, keys)
    options = {"workers": workers, "servers": servers, "transport": transport}
    result = run(push_and_pull, module, ADD, Asynchronous(), **options)
    assert result.values == [0.0] * workers
    assert result.versions == [REPEAT * workers] * servers

"""Parameters in any memory format train like contiguous ones, by their logical order."""

from functools import partial

import pytest
import torch
from paramserver import BulkSynchronous, LocalSteps, Server, Worker, partition
from torch import nn

INNER = partial(torch.optim.AdamW, lr=0.05)
POLICIES = [
    BulkSynchronous(),
    LocalSteps(2),
    LocalSteps(4, fragments=2, overlap=1, alpha=0.25),
]


def build_convolutions():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)
    return nn.Sequential(*layers).double()


def train_module(module, policy, servers, convert_after=False):
    parameters = dict(module.named_parameters())
    shards = partition(parameters, servers)
    hosts = [Server(parameters, INNER, policy, workers=1, shard=shard) for shard in shards]
    local = policy if isinstance(policy, LocalSteps) else None
    generator = torch.Generator().manual_seed(1)
    with Worker(module, hosts, local=local, optimizer=INNER if local else None) as worker:
        if convert_after:  # replaces the memory of every parameter
            module.to(memory_format=torch.channels_last)
        for _ in range(8):
            worker.pull()
            inputs = torch.randn(2, 3, 7, 7, generator=generator, dtype=torch.float64)
            module(inputs).square().mean().backward()
            worker.push()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("convert_after", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_channels_last_parameters_train_like_contiguous_ones(policy, convert_after):
    module = build_convolutions()
    if not convert_after:
        module.to(memory_format=torch.channels_last)
    ours = train_module(module, policy, 2, convert_after)
    assert not ours[0].is_contiguous()
    for parameter, expected in zip(
        ours, train_module(build_convolutions(), policy, 2), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)


def test_a_transposed_parameter_is_updated_in_its_logical_order():
    module = nn.Linear(3, 2, bias=False)
    module.weight.data = torch.arange(6.0).view(3, 2).t()
    server = Server(dict(module.named_parameters()), partial(torch.optim.SGD, lr=1.0), workers=1)
    with Worker(module, server) as worker:
        worker.pull()
        module.weight.grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        worker.push()
    assert module.weight.tolist() == [[-1.0, 0.0, 1.0], [-3.0, -2.0, -1.0]]

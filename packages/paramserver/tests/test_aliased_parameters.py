"""Parameters that share memory train like in one process, or are refused."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import LocalSteps, Server, Worker, run

SGD = partial(torch.optim.SGD, lr=0.1)
KINDS = ["same memory", "view", "transposed", "partly"]


class TwoLayers(nn.Module):
    """Two layers whose weights are aliased in the way that `kind` names."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        weight = self.first.weight
        memory = torch.randn(17)
        if kind == "same nn.Parameter":
            self.second.weight = weight
        elif kind == "view":
            self.second.weight.data = weight.data.view(-1).view(3, 3)
        elif kind == "transposed":
            self.second.weight.data = weight.data.t()
        elif kind == "partly":
            weight.data = memory[:9].view(3, 3)
            self.second.weight.data = memory[8:17].view(3, 3)
        else:
            self.second.weight.data = weight.data
        self.second.weight.requires_grad_(kind != "frozen")
        if kind == "buffer":
            self.second = nn.Identity()
            self.register_buffer("transposed", weight.data.t())

    def forward(self, inputs):
        outputs = self.second(self.first(inputs).tanh())
        return outputs @ self.transposed if hasattr(self, "transposed") else outputs


def compute_loss(module, step):
    generator = torch.Generator().manual_seed(step)
    return module(torch.randn(5, 3, generator=generator)).square().mean()


def train(worker):
    for step in range(4):
        worker.pull()
        compute_loss(worker.module, step).backward()
        worker.push()
    worker.finish()
    return [tensor.tolist() for tensor in worker.module.state_dict().values()]


def train_alone(module):
    optimizer = SGD(module.parameters())
    for step in range(4):
        optimizer.zero_grad()
        compute_loss(module, step).backward()
        optimizer.step()
    return [tensor.tolist() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("policy", [None, LocalSteps(2)], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_parameters_that_share_memory_are_refused(kind, policy):
    module = TwoLayers(kind)
    server = Server(dict(module.named_parameters()), SGD, policy, workers=1)
    message = "own memory.*first.weight.*second.weight.*same nn.Parameter"
    with pytest.raises(ValueError, match=message):
        Worker(module, server, optimizer=SGD if policy else None)


def test_trained_parameters_that_share_memory_are_refused_before_processes_start():
    with pytest.raises(ValueError, match=r"first\.weight.*second\.weight"):
        run(train, TwoLayers("same memory"), SGD, workers=1)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (0, 1), (6, 1)])
def test_a_parameter_that_overlaps_itself_or_has_gaps_is_refused(strides):
    module = nn.Linear(3, 4, bias=False)
    module.weight.data = torch.zeros(24).as_strided((4, 3), strides)
    server = Server(dict(module.named_parameters()), SGD, workers=1)
    with pytest.raises(ValueError, match=f"own memory.*weight.*{re.escape(str(strides))}"):
        Worker(module, server)


@pytest.mark.parametrize("kind", ["same nn.Parameter", "frozen", "buffer"])
def test_a_tied_module_trains_like_in_one_process(kind):
    module = TwoLayers(kind)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    results = train(Worker(module, Server(trained, SGD, workers=1)))
    torch.testing.assert_close(results, train_alone(TwoLayers(kind)))


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        *((kind, "shared_memory") for kind in ("same nn.Parameter", "frozen", "buffer")),
        ("buffer", "zeromq"),
    ],
)
def test_a_tied_module_remains_tied_in_other_processes(kind, transport):
    results = run(train, TwoLayers(kind), SGD, workers=1, transport=transport).values[0]
    torch.testing.assert_close(results, train_alone(TwoLayers(kind)))

"""FSDP inside a group of ranks, DiLoCo between the groups."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import LocalSteps, Server, join
from paramserver.parameters import get_trainable_parameters
from paramserver_training import assert_equal_parameters

INNER = partial(torch.optim.AdamW, lr=0.01)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def train_in_shards(policy, steps):
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    module.load_state_dict(even_model().state_dict())
    fully_shard(module, mesh=mesh["shard"])
    with pytest.raises(ValueError, match="is split, got Adafactor"):
        Server(get_trainable_parameters(module), torch.optim.Adafactor, workers=1)
    # The ranks with the same shard in both sites.
    with join(module, INNER, policy, group=mesh["site"].get_group()) as worker:
        for step in range(steps):
            worker.pull()
            half = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
            inputs, targets = even_batch(step, worker.rank)
            F.mse_loss(module(inputs[half]), targets[half]).backward()
            worker.push()
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def even_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def even_batch(step, worker):
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64),
        torch.randn(4, 4, generator=generator, dtype=torch.float64),
    )


def test_groups_of_fsdp_exchange_shard_by_shard(monkeypatch):
    import test_local_steps

    def loss_of_step(module, worker, step):
        inputs, targets = even_batch(step, worker)
        return F.mse_loss(module(inputs), targets)

    monkeypatch.setattr(test_local_steps, "build_model", even_model)
    monkeypatch.setattr(test_local_steps, "compute_loss", loss_of_step)
    policy = LocalSteps(4, OUTER)
    expected = test_local_steps.StreamingDiloco(2, policy, 1).train(8)
    for parameters in run_ranks(train_in_shards, 4, policy, 8):
        assert_equal_parameters(parameters, expected)

"""`plain.py` trains, and the real implementations are bit-equal to it."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import run_on_shared_ranks
from zero import FSDP, ShardedOptimizer
from zero.plain import PlainFSDP, PlainShardedOptimizer


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3)).double()


def compute_loss(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean()


def train(model, optimizer):
    for step in range(4):
        compute_loss(model, step).backward()
        optimizer.step()
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()


def compare_plain_and_real(stage):
    plain, real = make_model(), make_model()
    if stage < 3:
        simple = PlainShardedOptimizer(plain, torch.optim.AdamW, stage=stage, lr=0.1)
        train(plain, simple)
        fast = ShardedOptimizer(
            real.parameters(), torch.optim.AdamW, shard_gradients=stage == 2, lr=0.1
        )
        train(real, fast)
        whole = dict(real.named_parameters())
        state_numel = sum(s["exp_avg"].numel() for s in simple.optimizer.state.values())
    else:
        layers, plain = plain, PlainFSDP(plain)
        train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
        with torch.no_grad():
            compute_loss(plain, 0)
        plain, real = layers, FSDP(real)
        train(real, torch.optim.AdamW(real.parameters(), lr=0.1))
        whole = real.gather_full_params()
        state_numel = 0
    # Every rank sums in the same order, so the results are bit-equal.
    return all(torch.equal(whole[n].data, p.data) for n, p in plain.named_parameters()), state_numel


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_each_stage_is_bit_equal_to_plain(stage, world):
    for equal, state_numel in run_on_shared_ranks(compare_plain_and_real, world, stage):
        assert equal
        assert state_numel == (0 if stage == 3 else -(-78 // world))

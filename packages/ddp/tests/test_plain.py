"""The minimal implementation is the specification: `DDP` trains bit-equal to it."""

import copy
from pathlib import Path

import ddp.plain
import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from ddp.plain import PlainDDP
from torch import nn
from worker_pool import run_ranks


def train_both(bucket_bytes: int) -> list:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    models = [PlainDDP(module, bucket_bytes), DDP(copy.deepcopy(module), bucket_bytes / 2**20)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for _ in range(4):
        x = torch.randn(3, 5, generator=draw)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    minimal, complete = ([p.tolist() for p in model.parameters()] for model in models)
    assert minimal == complete
    return minimal


@pytest.mark.parametrize("bucket_bytes", [40, 200, 10**6])
def test_ddp_trains_bit_equal_to_the_minimal_implementation(bucket_bytes: int) -> None:
    first, second = run_ranks(train_both, 2, bucket_bytes)
    assert first == second


def test_minimal_implementation_is_short_and_imports_only_torch() -> None:
    source = Path(ddp.plain.__file__).read_text()
    assert len(source.splitlines()) <= 120
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert all(line.split()[1].split(".")[0] == "torch" for line in imports)

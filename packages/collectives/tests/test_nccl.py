"""CUDA tensors use NCCL's collectives."""

import collectives
import pytest
import torch
import torch.distributed as dist
from worker_pool import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]


def run_on_nccl():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    tensor = torch.full((100_003,), rank + 1.0, device="cuda")
    collectives.all_reduce(tensor)
    assert (tensor == world * (world + 1) / 2).all()
    gathered = torch.full((world * 5,), torch.nan, device="cuda")
    collectives.all_gather_into_tensor(gathered, gathered.new_full((5,), rank))
    assert torch.equal(gathered.view(world, 5)[:, 0].cpu(), torch.arange(float(world)))
    for algorithm in ("ring", "shared_memory"):
        with pytest.raises((TypeError, ValueError), match=r"CPU|shared_memory"):
            collectives.all_reduce(tensor, algorithm=algorithm)


def test_cuda_tensors_are_reduced():
    run_ranks(run_on_nccl, GPUS, backend="nccl")

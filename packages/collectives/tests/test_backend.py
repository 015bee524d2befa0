"""torch's own trainers run on the registered backend and give what they give on gloo."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_pool import run_ranks


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 5))


def batches():
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(4, 12, generator=generator) for _ in range(3)]


def steps(network, optimizer):
    for batch in batches():
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()


def train_ddp():
    network = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    steps(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    return [p.detach() for p in network.parameters()]


def train_zero():
    # Importing it warns of torch.jit on torch 2.11.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.01)
    steps(network, optimizer)
    return [p.detach() for p in network.parameters()]


def train_fsdp2():
    network = model()
    for layer in (network[0], network[2], network):
        fully_shard(layer)
    steps(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    return [p.full_tensor().detach() for p in network.parameters()]


def train_and_checkpoint(folder):
    network = model()
    fully_shard(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    steps(network, optimizer)
    state = network.state_dict()
    saved = {name: value.full_tensor().clone() for name, value in state.items()}
    dcp.save({"model": state}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    dcp.load({"model": network.state_dict()}, checkpoint_id=folder)
    loaded = {name: value.full_tensor() for name, value in network.state_dict().items()}
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    return list(loaded.values())


TRAINERS = {"ddp": train_ddp, "zero": train_zero, "fsdp2": train_fsdp2, "dcp": train_and_checkpoint}


def run(backend, trainer, *args):
    if backend == "collectives":
        import collectives.backend  # noqa: F401
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"] + backend, world)
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world)
    assert dist.get_backend() == backend
    result = TRAINERS[trainer](*args)
    dist.destroy_process_group()
    return [tensor.tolist() for tensor in result]


def both(trainer, folder):
    return [
        run(b, trainer, *[f"{folder}/{b}"] * (trainer == "dcp")) for b in ("gloo", "collectives")
    ]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_gives_what_it_gives_on_gloo(trainer, tmp_path):
    for on_gloo, on_ours in run_ranks(both, 2, trainer, str(tmp_path), backend=""):
        for a, b in zip(on_gloo, on_ours, strict=True):
            torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=1e-6, atol=1e-7)

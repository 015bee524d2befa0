"""The minimal implementation, compared with sums in float64 and with the package."""

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives import plain
from collectives.shared_memory import segment
from worker_pool import run_on_shared_ranks

SIZES = (0, 1, 3, 1000, 70_001)


def run_all():
    rank, world = dist.get_rank(), dist.get_world_size()
    segment.identify_host = lambda: f"host {rank}"
    pairs = {"ring": plain.ring_all_reduce, "tree": plain.tree_all_reduce}
    for numel in SIZES:
        everyone = torch.randn(world, numel, generator=torch.Generator().manual_seed(numel))
        for name, all_reduce in pairs.items():
            ours, spec = everyone[rank].clone(), everyone[rank].clone()
            all_reduce(spec)
            collectives.all_reduce(ours, algorithm=name)
            torch.testing.assert_close(
                spec.double(), everyone.double().sum(0), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(ours, spec, rtol=1e-6, atol=1e-6)
        part = plain.ring_reduce_scatter(everyone[rank].clone())
        want = everyone.double().sum(0).tensor_split(world)[rank]
        torch.testing.assert_close(part.double(), want, rtol=1e-5, atol=1e-5)
        gathered = torch.full((numel,), -1.0)
        mine = torch.arange(float(numel)).tensor_split(world)[rank]
        gathered.tensor_split(world)[rank].copy_(mine)
        plain.ring_all_gather(gathered)
        assert torch.equal(gathered, torch.arange(float(numel)))
        received = everyone[rank].clone()
        plain.tree_broadcast(received)
        assert torch.equal(received, everyone[0])


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 3, 4])
def test_minimal_implementation_sums_and_the_package_equals_it(world):
    run_on_shared_ranks(run_all, world)

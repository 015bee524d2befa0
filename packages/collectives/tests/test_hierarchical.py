"""The hierarchical algorithm between emulated hosts, and the measurement that ranks share."""

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.choice import tuning
from collectives.choice.cost import list_candidates
from collectives.groups import get_communicator
from collectives.shared_memory import segment
from sent_bytes import counted
from worker_pool import run_ranks


def get_host_name():
    return f"host {dist.get_rank() // 2}"


def emulate_two_hosts():
    """Emulate two hosts, with ranks 0 and 1 on the first one, and count the bytes sent."""
    segment.identify_host = get_host_name
    # Each algorithm is measured in one round and at two sizes only.
    tuning.SECONDS_PER_SIZE = 0.0
    tuning.CALLS_PER_ROUND = {1 << 10: 2, 1 << 20: 1}
    comm = get_communicator()
    rank, world = dist.get_rank(), dist.get_world_size()
    assert comm.topology.hosts == [[0, 1], list(range(2, world))]
    for algorithm in (*list_candidates("all_reduce", (2, world - 2)), "auto"):
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
            # The average is in range, and the sum of one host is not.
            tensor = torch.full((3,), 49152.0, dtype=dtype)
            collectives.all_reduce(tensor, dist.ReduceOp.AVG, algorithm=algorithm)
            assert tensor.tolist() == [49152.0] * 3, (algorithm, dtype)
        for numel in (1, 150_001):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                parts = torch.randint(
                    -3, 4, (world, numel), generator=torch.Generator().manual_seed(1)
                )
                tensor, wide = parts[rank].float(), parts.double()
                collectives.all_reduce(tensor, op, algorithm=algorithm)
                want = {"SUM": wide.sum(0), "AVG": wide.mean(0), "MAX": wide.amax(0)}[op.name]
                torch.testing.assert_close(tensor.double(), want, rtol=1e-6, atol=0)
            for root in (0, world - 1):
                tensor = parts[rank].clone()
                collectives.broadcast(tensor, root, algorithm=algorithm)
                assert torch.equal(tensor, parts[root])
    with pytest.raises(ValueError, match=r"ranks by host: \[\[0, 1\], \[2"):
        collectives.all_reduce(torch.ones(1), algorithm="shared_memory")
    with collectives.checked(), pytest.raises(collectives.Mismatch, match="rank 2 called"):
        collectives.all_reduce(torch.ones(3 if rank == 2 else 4))
    with counted() as messages:
        collectives.all_reduce(torch.ones(1 << 18), algorithm="hierarchical")
    return sum(messages) / (1 << 20), comm.cost_models


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_link_between_hosts_carries_a_tensor_once(world):
    sent, models = zip(*run_ranks(emulate_two_hosts, world), strict=True)
    # 2(H-1)/H for the leaders of the two hosts, nothing for the other ranks.
    assert sent == (1.0, 0.0, 1.0, 0.0)[:world]
    # All ranks share one measurement.
    assert set(models[0]) == {"all_reduce", "broadcast"}
    assert all(model == models[0] for model in models)

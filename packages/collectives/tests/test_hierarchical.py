"""Several hosts: which algorithm, how many bytes leave a host, what the model says."""

import os

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives import segment
from collectives.communicator import communicator
from collectives.cost import candidates
from emulated_hosts import why_not
from worker_pool import run_ranks

NO_HOSTS = why_not()


def two_hosts():
    return f"host {dist.get_rank() // 2}"


def on_two_hosts():
    """Ranks 0 and 1 on one host, 2 (and 3) on the other, as far as they know."""
    segment.host_identity = two_hosts
    comm, rank, world = communicator(), dist.get_rank(), dist.get_world_size()
    assert comm.topology.hosts == [[0, 1], list(range(2, world))]
    for algorithm in (*candidates("all_reduce", (2, world - 2)), "auto"):
        for numel in (1, 1000, 300_001):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                parts = torch.randint(
                    -3, 4, (world, numel), generator=torch.Generator().manual_seed(1)
                )
                tensor, wide = parts[rank].float(), parts.double()
                collectives.all_reduce(tensor, op, algorithm=algorithm)
                want = {"SUM": wide.sum(0), "AVG": wide.mean(0), "MAX": wide.amax(0)}[op.name]
                torch.testing.assert_close(tensor.double(), want, rtol=1e-6, atol=0)
            for root in range(world):
                tensor = parts[rank].clone()
                collectives.broadcast(tensor, root, algorithm=algorithm)
                assert torch.equal(tensor, parts[root])
    with pytest.raises(ValueError, match=r"ranks by host: \[\[0, 1\], \[2"):
        collectives.all_reduce(torch.ones(1), algorithm="shared_memory")
    with collectives.checked(), pytest.raises(collectives.Mismatch, match="rank 2 called"):
        collectives.all_reduce(torch.ones(3 if rank == 2 else 4))
    before = comm.wire.sent_bytes
    collectives.all_reduce(torch.ones(1 << 18), algorithm="hierarchical")
    return (comm.wire.sent_bytes - before) / (1 << 20), comm.model


@pytest.mark.parametrize("world", [3, 4])
def test_the_link_between_hosts_carries_a_tensor_once(world):
    sent, models = zip(*run_ranks(on_two_hosts, world), strict=True)
    # 2(H-1)/H for the first rank of each of two hosts, nothing for the others.
    assert sent == (1.0, 0.0, 1.0, 0.0)[:world]
    # Measured once, the same on every rank.
    assert models[0] is not None
    assert all(model == models[0] for model in models)


BENCH = ["-m", "collectives.bench", "--quick", "--sizes", str(16 << 20), "--json"]


@pytest.mark.timing
@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_on_a_slow_link_a_reduce_scatter_moves_half_of_gloos_bytes(tmp_path):
    import json
    import sys

    from emulated_hosts import emulated_hosts

    with emulated_hosts(2, "1gbit") as hosts:
        running = [
            host.popen(
                [sys.executable, *BENCH, str(tmp_path / "rows.json")],
                env=os.environ | host.environment(hosts) | {"OMP_NUM_THREADS": "1"},
            )
            for host in hosts
        ]
        assert [process.wait(120) for process in running] == [0, 0]
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(r["case"], r["algorithm"]): r for r in rows}
    gloo, ring = found["reduce_scatter", "gloo"], found["reduce_scatter", "ring"]
    assert ring["hosts"] == 2
    assert ring["wire_bytes"] <= 0.51 * gloo["wire_bytes"]
    assert 1 / ring["ratio_p50"] <= 0.55
    # Frames and acknowledgements add less than 2 %.
    assert 1.0 <= found["all_reduce", "ring"]["wire_bytes"] / (16 << 20) < 1.02
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        singles = [r["ratio_p50"] for (k, a), r in found.items()
                   if k == kind and a in candidates(kind, (1, 1))]  # fmt: skip
        # The upper end of its ratios, so that only a difference beyond the noise fails.
        assert found[kind, "auto"]["ratio_p90"] >= 0.9 * max(singles)

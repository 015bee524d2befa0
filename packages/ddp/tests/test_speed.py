"""A step takes no longer than under torch's own DDP, tuned: in turns, in one run."""

import pytest
import torch
from ddp.bench.measure import bench
from torch import nn
from worker_pool import run_ranks

WHOLE, SHARED, SMALL, ROUTED = 1.0, 0.87, 1.05, 1.0


def many_tensors(device: torch.device):
    """A small model of many tensors: 144 of them, 1.6 MB."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(12)
    ]
    model, x = nn.Sequential(*layers).to(device), torch.randn(2, 16, 64, device=device)
    return model, lambda wrapped: wrapped(x).square().mean()


def ratio(model: str, design: str, rounds: int, given: dict) -> float:
    rows = bench(model=model, designs=f"{design},torch tuned", rounds=rounds, **given)
    ours = [row for row in rows if row["case"] == "step"][:1]
    return ours[0]["ratio_to_torch_tuned_p50"] if ours else 0.0


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("model", "design", "most", "rounds"),
    [
        ("ddp.bench.designs:transformer", "25 MB", WHOLE, 10),
        ("ddp.bench.designs:transformer", "given 25 MB", SHARED, 10),
        ("ranks_test_speed:many_tensors", "25 MB", SMALL, 40),
    ],
)
def test_a_step_takes_no_longer_than_under_tuned_torch(model, design, most, rounds) -> None:
    given = {}
    if design.startswith("given"):
        pytest.importorskip("collectives", reason="gradients in memory that ranks share")
        given = {"all_reduce": "collectives:all_reduce", "allocate": "collectives:shared_empty"}
    measured = run_ranks(ratio, 2, model, design, rounds, given, timeout=600)
    assert 0 < measured[0] <= most


def routed(rounds: int) -> float:
    """Experts that only some ranks use: ours over torch's, median of alternating steps."""
    import time
    from statistics import median

    import torch.distributed as dist
    from ddp import DDP

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.trunk = nn.Linear(64, 64)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

        def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts[expert](self.trunk(x)).square().mean()

    x, times = torch.randn(8, 64), ([], [])
    ours = DDP(Experts(), find_unused_parameters=True)
    theirs = nn.parallel.DistributedDataParallel(
        Experts(), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    for step in range(rounds + 5):
        for model, taken in zip((ours, theirs), times, strict=True):
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            model(x, (step + 5 * dist.get_rank()) % 16).backward()
            taken.append(time.perf_counter() - begin)
    return median(a / b for a, b in list(zip(*times, strict=True))[5:])


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
def test_routed_experts_take_no_longer_than_under_torch() -> None:
    assert max(run_ranks(routed, 2, 100, timeout=300)) <= ROUTED

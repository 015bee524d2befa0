"""A step takes no longer than under torch's own DDP, tuned: in turns, in one run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import emulated_hosts
import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from ddp.bench.measure import bench
from torch import nn
from worker_pool import run_ranks

# Of tuned torch's step, in time and in processor time. Over gloo both wait for the same sums; were
# gradients in their buckets at no cost, 0.97 of the processor time would be left.
# `SHARED` lies above the 0.80 that were hoped for: without any communication a step takes 0.76 of
# tuned torch's, and the gradients move once into memory that ranks share.
WHOLE, WHOLE_CPU, SHARED, SHARED_CPU = 1.05, 1.04, 0.87, 0.9
# Time, and processor time, for a small model of many tensors: each crosses between Python and C++
# three times a step (a hook, reading `.grad`, setting it), where torch stays in C++.
SMALL, SMALL_CPU = 1.0, 1.03
ROUTED = 1.0
# Of the least that any overlap can reach on this link, `overlap_bound_ms`: 1.02 to 1.08 are seen.
THROTTLED = 1.1


def row(model: str, design: str, rounds: int, given: dict) -> dict:
    rows = bench(model=model, designs=f"{design},torch tuned", rounds=rounds, **given)
    return next((row for row in rows if row["case"] == "step" and row["design"] == design), {})


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("model", "design", "most", "most_cpu", "rounds"),
    [
        ("transformer", "25 MB", WHOLE, WHOLE_CPU, 10),
        ("transformer", "given 25 MB", SHARED, SHARED_CPU, 10),
        ("many_tensors", "25 MB", SMALL, SMALL_CPU, 100),
    ],
)
def test_a_step_takes_no_longer_than_under_tuned_torch(
    model, design, most, most_cpu, rounds
) -> None:
    given = {}
    if design.startswith("given"):
        pytest.importorskip("collectives", reason="gradients in memory that ranks share")
        given = {"all_reduce": "collectives:all_reduce", "allocate": "collectives:shared_empty"}
    model = f"ddp.bench.designs:{model}"
    ours, _ = run_ranks(row, 2, model, design, rounds, given, timeout=600)
    assert 0 < ours["cpu_ratio_to_torch_tuned"] <= most_cpu
    assert 0 < ours["ratio_to_torch_tuned_p50"] <= most


@pytest.mark.timing
def test_on_a_throttled_link_a_step_is_near_the_bound_of_any_overlap(tmp_path) -> None:
    if reason := emulated_hosts.why_not():
        pytest.skip(reason)
    report = tmp_path / "rows.json"
    command = [sys.executable, emulated_hosts.__file__, "--hosts", "2", "--rate", "2gbit", "--"]
    command += ["python", "-m", "ddp.bench", "--designs", "none,early 4 MB,early 10 MB,torch tuned"]
    command += ["--model", "ddp.bench.designs:transformer", "--rounds", "10", "--json", str(report)]
    beside = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=environment, timeout=600)
    rows = json.loads(report.read_text())
    (bound,) = (row["overlap_bound_ms"] for row in rows if row["case"] == "bound")
    ours = [row["step_ms"] for row in rows if row.get("design", "").startswith("early")]
    assert min(ours) <= THROTTLED * bound


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.trunk(x)).square().mean()


def routed(rounds: int) -> tuple[float, float]:
    """Experts that only some ranks use: ours over torch's, time and processor time of a step."""
    x, times = torch.randn(8, 64), ([], [])
    ours = DDP(Experts(), find_unused_parameters=True)
    theirs = nn.parallel.distributed.DistributedDataParallel(
        Experts(), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    for step in range(rounds + 5):
        for model, taken in zip((ours, theirs), times, strict=True):
            model.zero_grad()
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            model(x, (step + 5 * dist.get_rank()) % 16).backward()
            taken.append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    pairs = list(zip(*times, strict=True))[5:]
    return median(a[0] / b[0] for a, b in pairs), median(a[1] / b[1] for a, b in pairs)


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
def test_routed_experts_take_no_longer_than_under_torch() -> None:
    for wall, cpu in run_ranks(routed, 2, 200, timeout=300):
        assert wall <= ROUTED
        assert cpu <= ROUTED

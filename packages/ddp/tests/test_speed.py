"""The step time relative to torch's DDP and to its lower bound, measured in interleaved rounds."""

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
from figures import assert_at_most
from torch import nn
from worker_pool import run_ranks

#: The weakest medians that were measured on an idle machine: ratios of the step time to that of
#: tuned torch DDP, over gloo, in shared memory and for a small model of many tensors.
GLOO = 1.04
SHARED = 0.86
SMALL = 1.0
#: Milliseconds by which the first steps of a model with 1,000 parameters exceed the later ones.
FIRST_STEP_MS = 10.0
ROUTED = 1.0
#: Ratio of the step time to `overlap_bound_ms` on a throttled link; 1.02 to 1.08 measured.
THROTTLED = 1.08


def measure_row(model: str, design: str, rounds: int, custom: dict) -> dict:
    rows = bench(model=model, designs=f"{design},torch tuned", rounds=rounds, **custom)
    return next((row for row in rows if row["case"] == "step" and row["design"] == design), {})


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("model", "design", "expected", "rounds"),
    [
        ("transformer", "25 MB", GLOO, 10),
        ("transformer", "given 25 MB", SHARED, 10),
        ("many_tensors", "25 MB", SMALL, 100),
    ],
)
def test_a_step_takes_at_most_the_measured_multiple_of_tuned_torch(
    model, design, expected, rounds
) -> None:
    custom = {}
    if design.startswith("given"):
        pytest.importorskip("collectives", reason="gradients in shared memory")
        custom = {"all_reduce": "collectives:all_reduce", "allocate": "collectives:shared_empty"}
    model = f"ddp.bench.designs:{model}"
    ours, _ = run_ranks(measure_row, 2, model, design, rounds, custom, timeout=600)
    figure = f"ddp: step of {design} over tuned torch, {model}"
    assert_at_most(figure, expected, ours["ratio_to_torch_tuned_p50"])


@pytest.mark.timing
def test_first_steps_of_a_model_with_1000_parameters_take_little_longer() -> None:
    rows = bench(
        model="ddp.bench.designs:thousand_parameters", designs="none,25 MB", rounds=10, runs=5
    )
    (ours,) = (row for row in rows if row.get("design") == "25 MB")
    excess = ours["first_steps_excess_ms"]
    assert_at_most("ddp: first steps beyond later ones", FIRST_STEP_MS, excess, "ms")


@pytest.mark.timing
def test_step_on_throttled_link_is_near_the_overlap_bound(tmp_path) -> None:
    if reason := emulated_hosts.explain_refusal():
        pytest.skip(reason)
    report = tmp_path / "rows.json"
    command = [sys.executable, emulated_hosts.__file__, "--hosts", "2", "--rate", "2gbit", "--"]
    command += ["python", "-m", "ddp.bench", "--designs", "none,10 MB,25 MB"]
    command += ["--model", "ddp.bench.designs:transformer", "--rounds", "10", "--json", str(report)]
    folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=environment, timeout=600)
    rows = json.loads(report.read_text())
    (bound,) = (row["overlap_bound_ms"] for row in rows if row["case"] == "bound")
    ours = [row["step_ms"] for row in rows if row.get("design", "").endswith(" MB")]
    assert_at_most("ddp: step on a link of 2 Gbit/s over its bound", THROTTLED, min(ours) / bound)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.trunk(x)).square().mean()


def measure_routed_ratios(rounds: int) -> tuple[float, float]:
    """Return the ratios of our time and processor time to those of torch's DDP."""
    x = torch.randn(8, 64)
    times = ([], [])
    ours = DDP(Experts(), find_unused_parameters=True)
    theirs = nn.parallel.distributed.DistributedDataParallel(
        Experts(), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    for step in range(rounds + 5):
        for model, durations in zip((ours, theirs), times, strict=True):
            model.zero_grad()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            model(x, (step + 5 * dist.get_rank()) % 16).backward()
            durations.append((time.perf_counter() - start, time.process_time() - cpu_start))
    pairs = list(zip(*times, strict=True))[5:]
    return median(a[0] / b[0] for a, b in pairs), median(a[1] / b[1] for a, b in pairs)


@pytest.mark.timing
@pytest.mark.filterwarnings("default")
def test_routed_experts_take_about_as_long_as_under_torch() -> None:
    for wall, cpu in run_ranks(measure_routed_ratios, 2, 200, timeout=300):
        assert_at_most("ddp: step of routed experts over torch", ROUTED, wall)
        assert_at_most("ddp: processor time of routed experts over torch", ROUTED, cpu)

"""The benchmark runs every design, counts bytes and calls, and compares prediction and sweep."""

import json

import numpy as np
import pytest
import torch
from ddp import BucketRecord, Meter
from ddp.bench.designs import Design, make_designs, transformer
from ddp.bench.measure import SIZES_MB, bench
from ddp.bench.rows import Link, WorkloadTimings, compute_median_rows
from torch import nn
from worker_pool import run_ranks

MIB = 2**20


def tiny(device: torch.device):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(2, 64)
    return model, lambda wrapped: wrapped(x).square().mean()


def shared_alike(numel: int, *, dtype: torch.dtype, group) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def run_bench(wanted: str) -> list[dict]:
    # The ranks load this file under this module name.
    options = {"model": "ranks_test_bench:tiny", "all_reduce": "torch.distributed:all_reduce"}
    options["allocate"] = "ranks_test_bench:shared_alike"
    return bench(quick=True, designs=wanted, rounds=3, **options)


@pytest.mark.filterwarnings("default")
def test_every_design_has_a_row_with_bytes_and_calls() -> None:
    sizes = ",".join(f"{size:g} MB" for size in SIZES_MB)
    ours = f"none,naive,flat,overlapped,{sizes},predicted,given 25 MB"
    first, second = run_ranks(run_bench, 2, ours, timeout=300)
    assert second == []
    steps = {row["design"]: row for row in first if row["case"] == "step"}
    swept = [row for row in first if row["case"] == "sweep"]
    (prediction,) = (row for row in first if row["case"] == "prediction")
    assert set(steps) >= set(ours.split(",")) - {"predicted"}
    gradient_bytes = 4 * (64 * 64 + 64) * 4
    for name, calls in {
        "naive": 8,
        "flat": 1,
        "overlapped": 8,
        "1000 MB": 1,
        "given 25 MB": 1,
    }.items():
        assert (steps[name]["calls"], steps[name]["gradient_bytes"]) == (calls, gradient_bytes)
    assert steps["none"]["gradient_bytes"] == "-"
    assert steps["none"]["ratio_to_none_p50"] == 1
    assert {row["workload"] for row in first} == {"tiny"}
    assert f"{prediction['predicted_mb']:g} MB" in {row["design"] for row in swept}
    assert 1 in {row["ratio_to_best_p50"] for row in swept}
    json.dumps(first)


@pytest.mark.filterwarnings("default")
def test_torch_ddp_is_measured_in_the_same_rounds() -> None:
    wanted = "10 MB,torch,torch tuned"
    (measured,) = run_ranks(run_bench, 1, wanted, timeout=300)
    assert ",".join(row["design"] for row in measured) == wanted
    ours, default, tuned = measured
    assert default["ratio_to_torch_p90"] == tuned["ratio_to_torch_tuned_p10"] == 1
    assert 0 < ours["ratio_to_torch_p10"] <= ours["ratio_to_torch_p50"]
    assert ours["ratio_to_none_p50"] == ours["communication_share"] == "-"


def make_measured_rounds(**seconds: tuple[float, float, float, float]) -> WorkloadTimings:
    """Return two equal rounds of designs with these (step, backward, after backward, cpu)."""
    meter = Meter()
    meter.record([BucketRecord(("w",), 1, 80, 0, 0.0, 1.0, 1.0)], (0.0, 1.0))
    meters = {name: meter if name == "flat" else None for name in seconds}
    ours = [Design(name, nn.Identity(), lambda: None, meters[name]) for name in seconds]
    timings = np.array([list(seconds.values())] * 2)
    return WorkloadTimings("made up", 80, Link(20.0, 0.1), ours, timings, timings[:, :, 0])


def bound(**seconds: tuple[float, float, float, float]) -> dict:
    (row,) = (row for row in make_measured_rounds(**seconds).rows if row["case"] == "bound")
    return row


def test_bound_is_a_perfect_overlap() -> None:
    # 80 bytes at 20 bytes per second take 4 s, of which 3 s are hidden by the backward pass.
    steps = {"none": (5.0, 3.0, 0.0, 5.0), "flat": (9.5, 3.0, 4.5, 5.5), "torch": (8.0, 6.0, 0, 6)}
    row = bound(**steps)
    assert (row["wire_ms"], row["overlap_bound_ms"]) == (4000, 6000)
    assert row["bound_ratio_to_torch"] == 6 / 8


def test_one_design_alone_needs_no_second_copy_of_the_model() -> None:
    module = nn.Linear(2, 2)
    two = make_designs(module, [1.0], ["none", "flat"], {})
    assert [design.model is module for design in two] == [False, True]


def test_workload_is_the_one_that_the_results_describe() -> None:
    model, loss = transformer(torch.device("cpu"))
    parameters = list(model.parameters())
    assert len(parameters) == 74
    assert sum(p.numel() for p in parameters) == 6 * (12 * 512**2 + 13 * 512) + 2 * 1600 * 512
    assert 6 < loss(model).item() < 9


def run_of(ratio: float, design: str = "25 MB") -> list[dict]:
    step = {"case": "step", "workload": "w", "design": design, "step_ms": 100 * ratio, "calls": "-"}
    return [step | {"ratio_to_torch_tuned_p50": ratio}, {"case": "bound", "workload": "w"}]


def test_rows_of_several_runs_are_medians_with_the_range_of_the_ratio() -> None:
    step, bound_row = compute_median_rows([run_of(ratio) for ratio in (1.5, 0.5, 2.0)])
    assert (step["step_ms"], step["calls"], step["ratio_to_torch_tuned_p50"]) == (150.0, "-", 1.5)
    assert step["ratio_to_torch_tuned_lowest_run"] == 0.5
    assert step["ratio_to_torch_tuned_highest_run"] == 2.0
    assert bound_row == run_of(1.0)[1]
    assert compute_median_rows([run_of(1.0)]) == run_of(1.0)


def test_runs_of_different_designs_are_refused() -> None:
    for other in (run_of(1.0, "10 MB"), run_of(1.0)[:1]):
        with pytest.raises(ValueError, match="expected the same designs in every run"):
            compute_median_rows([run_of(1.0), other])


def test_several_runs_within_torchrun_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"expected runs=1 in a process of torchrun, got 5"):
        bench(runs=5)


def test_unknown_design_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"among .*'1 MB'.*got \['warp'\]"):
        make_designs(nn.Linear(2, 2), [1.0], ["warp"], {})

"""The bench runs every design, counts what it sends, and puts prediction beside measurement."""

import json

import pytest
import torch
from ddp.bench import SIZES_MB, bench
from ddp.bench_designs import designs, transformer
from torch import nn
from worker_pool import run_ranks


def tiny(device: torch.device):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(2, 64)
    return model, lambda wrapped: wrapped(x).square().mean()


def rows(wanted: str) -> list[dict]:
    # The file is loaded under this name on the ranks.
    options = {"model": "ranks_test_bench:tiny", "all_reduce": "torch.distributed:all_reduce"}
    return bench(quick=True, designs=wanted, rounds=3, **options)


@pytest.mark.filterwarnings("default")
def test_every_design_has_a_row_with_what_it_sent() -> None:
    sizes = ",".join(f"{size:g} MB" for size in SIZES_MB)
    ours = f"none,naive,flat,overlapped,{sizes},predicted,given 25 MB,PowerSGD 10 MB"
    first, second = run_ranks(rows, 2, ours, timeout=120)
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
    assert steps["none"]["ratio_to_none_p50"] == 1
    assert f"{prediction['predicted_mb']:g} MB" in {row["design"] for row in swept}
    assert 1 in {row["ratio_to_best_p50"] for row in swept}
    json.dumps(first)


@pytest.mark.filterwarnings("default")
def test_torchs_own_wrapper_takes_turns_with_ours() -> None:
    (measured,) = run_ranks(rows, 1, "10 MB,torch,torch tuned", timeout=120)
    ours, default, tuned = measured
    assert (ours["design"], default["design"], tuned["design"]) == ("10 MB", "torch", "torch tuned")
    assert default["ratio_to_torch_p90"] == tuned["ratio_to_torch_tuned_p10"] == 1
    assert 0 < ours["ratio_to_torch_p10"] <= ours["ratio_to_torch_p50"]
    assert ours["ratio_to_none_p50"] == "-"


def test_the_workload_is_the_one_the_figures_speak_of() -> None:
    model, loss = transformer(torch.device("cpu"))
    parameters = list(model.parameters())
    assert len(parameters) == 74
    assert sum(p.numel() for p in parameters) == 6 * (12 * 512**2 + 13 * 512) + 2 * 1600 * 512
    assert 6 < loss(model).item() < 9


def test_an_unknown_design_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"no design is called \['warp'\].*'1 MB'"):
        designs(nn.Linear(2, 2), [1.0], ["warp"], {})

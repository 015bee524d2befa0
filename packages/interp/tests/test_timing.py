"""Timings at the size of GPT-2 small, on an idle machine."""

import subprocess
import sys

import pytest
import torch
from interp.bench import copying, patching, random_decoder

pytestmark = pytest.mark.timing
SIZES = {"vocabulary": 50257, "d_model": 768, "layers": 12, "heads": 12}


def test_importing_costs_a_tenth_of_a_second_over_torch() -> None:
    program = (
        "import time, torch; start = time.perf_counter(); import interp; "
        "print(time.perf_counter() - start)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        for _ in range(5)
    ]
    assert sorted(map(float, runs))[2] <= 0.1


def test_copying_eigenvalues_are_20_times_faster_than_folding_each_head() -> None:
    torch.manual_seed(0)
    row = copying(random_decoder("gpt2", **SIZES))
    assert row["error"] < 1e-4
    assert row["ratio_p50"] >= 20


@pytest.mark.parametrize(("part", "times"), [(":input", 9), ("attention.o:input", 10)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patches_are_10_times_faster_than_a_forward_pass_each(
    family: str, part: str, times: float
) -> None:
    """Compare patches of heads, and 180 patches of streams, of which many reach every block."""
    torch.manual_seed(0)
    row = patching(random_decoder(family, **SIZES), family, part, 15)
    assert row["error"] < 1e-5
    assert row["ratio_p50"] >= times

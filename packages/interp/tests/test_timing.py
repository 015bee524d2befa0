"""Timings at the size of GPT-2 small, on an idle machine."""

import json
import subprocess
import sys

import pytest
import torch
from figures import MARGIN, assert_at_least, assert_at_most
from interp.bench import build_random_decoder, compare_patching

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
    seconds = sorted(map(float, runs))[2]
    assert_at_most("interp: import beyond torch's", 0.1, seconds, "s")


@pytest.mark.parametrize(
    ("part", "length", "times"), [(":input", 15, 9), ("attention.o:input", 8, 10)]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_batched_patches_are_many_times_faster_than_a_forward_pass_each(
    family: str, part: str, length: int, times: float
) -> None:
    """Compare 180 patches of streams, and 1,152 patches of heads."""
    torch.manual_seed(0)
    row = compare_patching(build_random_decoder(family, **SIZES), family, part, length)
    assert row["error"] < 1e-5
    figure = f"interp: a forward pass per patch over batched patches, {family}{part}"
    # Every processor must reach 8.
    assert_at_least(figure, times, row["ratio_p50"], margin=min(MARGIN, 1 - 8 / times))


def test_a_model_of_a_billion_parameters_is_described_within_half_a_minute_on_one_thread() -> None:
    """The model is TinyLlama's size. The peak includes the model itself."""
    pytest.importorskip("transformers", reason="the peer, a development dependency")
    # A new process, because the peak of this one includes other tests.
    run = subprocess.run(
        [sys.executable, "-m", "interp.bench", "--describe"], capture_output=True, check=True
    )
    row = json.loads(run.stdout.splitlines()[-1])
    assert row["threads"] == 1
    assert row["parameters"] > 1e9
    # Processors with AVX-512 need less than 20 s.
    assert_at_most("interp: description of a 1B model", 32, row["seconds"], "s")
    # The sizes of tensors determine the peak, not the processor.
    assert_at_most("interp: memory of it over the model's", 2, row["memory"], margin=0)

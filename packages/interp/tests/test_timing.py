"""Timings at the size of GPT-2 small, on an idle machine."""

import json
import subprocess
import sys

import pytest
import torch
from figures import assert_at_least, assert_at_most
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
    seconds = sorted(map(float, runs))[2]
    assert_at_most("interp: import beyond torch's", 0.1, seconds, "s")


def test_copying_eigenvalues_are_20_times_faster_than_folding_each_head() -> None:
    """One product serves all heads, so the ratio grows with their number, here 144."""
    torch.manual_seed(0)
    row = copying(random_decoder("gpt2", **SIZES))
    assert row["error"] < 1e-4
    figure = "interp: folding each head over copying eigenvalues"
    assert_at_least(figure, 20, row["ratio_p50"])


@pytest.mark.parametrize(
    ("part", "length", "times"), [(":input", 15, 9), ("attention.o:input", 8, 10)]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patches_are_10_times_faster_than_a_forward_pass_each(
    family: str, part: str, length: int, times: float
) -> None:
    """Compare 180 patches of streams, and 1,152 patches of heads."""
    torch.manual_seed(0)
    row = patching(random_decoder(family, **SIZES), family, part, length)
    assert row["error"] < 1e-5
    figure = f"interp: a forward pass per patch over batched patches, {family}{part}"
    assert_at_least(figure, times, row["ratio_p50"])


DESCRIBE_A_LARGE_MODEL = """
import json, resource, time
import torch
import transformers
from interp import describe
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
)
torch.set_default_dtype(torch.bfloat16)
model = transformers.LlamaForCausalLM(config).eval()
torch.set_default_dtype(torch.float32)
size = sum(parameter.nbytes for parameter in model.parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
describe(model)
seconds = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps({"seconds": seconds, "memory": (size + grown) / size}))
"""


def test_a_model_of_a_billion_parameters_is_described_in_20_seconds() -> None:
    """The model is TinyLlama's size. The peak includes the model itself."""
    pytest.importorskip("transformers", reason="the peer, a development dependency")
    run = subprocess.run(
        [sys.executable, "-c", DESCRIBE_A_LARGE_MODEL], capture_output=True, check=True
    )
    row = json.loads(run.stdout.splitlines()[-1])
    assert_at_most("interp: description of a 1B model", 20, row["seconds"], "s")
    assert_at_most("interp: memory of it over the model's", 2, row["memory"])

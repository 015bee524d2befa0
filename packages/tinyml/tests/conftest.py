"""Programs that run as on another processor, and the time of layers there."""

import os
import subprocess
import sys

import pytest
from tinyml import timing

# Instruction sets to which oneDNN and torch's kernels are limited, in a separate process each. AVX2
# has no int8 dot products, like many machines.
PROCESSORS = {
    "as it is": {},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "plain": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}
TIMED = """
import statistics, time, torch
from tinyml import quantize
torch.manual_seed(0)
torch.set_num_threads(1)
for bits, tokens, inputs, outputs in {cases}:
    linear = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).requires_grad_(False)
    ours = quantize(linear, bits, activations="{activations}")
    x = torch.randn(tokens, inputs)
    repeats = max(1, {products} // (tokens * inputs * outputs))
    def seconds(call):
        start = time.process_time()
        for _ in range(repeats):
            call(x)
        return time.process_time() - start
    seconds(ours)
    seconds(linear)
    same = type(ours[0]) is torch.nn.Linear  # "auto" left it as it was
    print(1 if same else statistics.median(seconds(linear) / seconds(ours) for _ in range(21)))
"""


@pytest.fixture
def run_on():
    """Return a function that runs a program as on a processor and returns the printed lines."""

    def run(processor, program):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | PROCESSORS[processor] | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    return run


@pytest.fixture
def times_of_float(run_on):
    """Float's processor time over the layer's, of (bits, tokens, inputs, outputs) each.

    Exactly 1 where "auto" leaves the layer as it was.
    """

    def ratios(processor, cases, products=10**8, activations="auto"):
        program = TIMED.format(cases=cases, products=products, activations=activations)
        return [float(line) for line in run_on(processor, program)]

    return ratios


@pytest.fixture(autouse=True)
def stored_timings(tmp_path_factory, monkeypatch):
    """Store the timings of each test in its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def short_measurements(request, monkeypatch):
    """Measure implementations in a few rounds, except in tests that are about time."""
    is_about_time = request.node.get_closest_marker("timing") or "test_timing" in request.path.name
    if not is_about_time:
        monkeypatch.setattr(timing, "ROUNDS", 4)
        monkeypatch.setattr(timing, "_LEAST_ROUNDS", 1)
        monkeypatch.setattr(timing, "_SECONDS", 0.02)
        monkeypatch.setattr(timing, "_LEAST_SECONDS", 0.0)

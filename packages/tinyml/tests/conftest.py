"""Programs that run as on another processor, and the time of layers there."""

import os
import subprocess
import sys
from pathlib import Path

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
import sys, time, torch
sys.path.insert(0, {folder!r})
from float_ratio import measure_float_ratio
from tinyml import quantize
torch.manual_seed(0)
torch.set_num_threads(1)
for bits, tokens, inputs, outputs in {cases}:
    linear = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).requires_grad_(False)
    ours = quantize(linear, bits, activations="{activations}")
    x = torch.randn(tokens, inputs)
    print(measure_float_ratio(ours, linear, x, {claim}, clock=time.process_time))
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
    """Return a function: float's processor time over the layer's, for each of several cases.

    A case is (bits, tokens, inputs, outputs), and `claim` is the ratio to which the caller compares
    (see `measure_float_ratio`).
    """

    def ratios(processor, cases, claim, activations="auto"):
        folder = str(Path(__file__).parent)
        program = TIMED.format(folder=folder, cases=cases, claim=claim, activations=activations)
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

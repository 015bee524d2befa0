"""`--seed-offset` shifts every kind of seed, in the test process and in the ranks it starts."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from seed_offset import VARIABLE
from worker_pool import run_ranks
from workspace import ROOT

# `make test-exhaustive` is the only target that shifts seeds.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(VARIABLE in os.environ, reason="the seeds of this run are shifted already"),
]

DRAWS = """
import random, numpy, torch
random.seed(5); a = random.random()
b = random.Random(5).random()
numpy.random.seed(5); c = numpy.random.rand()
d = numpy.random.default_rng(5).random()
torch.manual_seed(5); e = torch.rand(()).item()
f = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
"""


def draw():
    values = {}
    exec(DRAWS, values)
    return [values[name] for name in "abcdef"]


def draw_with_offset():
    # Imported here: it would change the seeds of the process that collects this file otherwise.
    import seed_offset

    seed_offset.install(3)
    return draw()


def compute_expected_draws(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return [
        random.random(),
        random.Random(seed).random(),
        np.random.rand(),  # noqa: NPY002
        np.random.default_rng(seed).random(),
        torch.rand(()).item(),
        torch.rand((), generator=torch.Generator().manual_seed(seed)).item(),
    ]


def test_every_kind_of_seed_is_shifted():
    (shifted,) = run_ranks(draw_with_offset, 1)
    assert shifted == compute_expected_draws(8)
    (plain,) = run_ranks(draw, 1)
    assert plain == compute_expected_draws(5)


def report_child_draw():
    import seed_offset

    seed_offset.install(3)
    code = "import numpy; numpy.random.seed(5); print(numpy.random.rand())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_processes_that_a_rank_starts_shift_their_seeds_too():
    (shifted,) = run_ranks(report_child_draw, 1)
    np.random.seed(8)  # noqa: NPY002
    assert shifted == np.random.rand()  # noqa: NPY002


def test_option_reaches_the_ranks_that_a_test_starts(tmp_path):
    # In another process, because the option changes the process that collects the file.
    file = tmp_path / "test_draws.py"
    file.write_text(
        f"import torch\nfrom worker_pool import run_ranks\n"
        f"def draw():\n    torch.manual_seed(5)\n    return torch.rand(()).item()\n"
        f"def test_draw():\n    assert run_ranks(draw, 1) == [{compute_expected_draws(8)[4]!r}]\n"
        f"def test_other_process():\n    import subprocess, sys\n"
        f"    code = 'import torch; torch.manual_seed(5); print(torch.rand(()).item())'\n"
        f"    command = [sys.executable, '-c', code]\n"
        f"    done = subprocess.run(command, capture_output=True, text=True, check=True)\n"
        f"    assert float(done.stdout) == {compute_expected_draws(8)[4]!r}\n"
    )
    options = ["-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--seed-offset", "3", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""The tests of packages that train models, on the registered backend instead of gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "file",
    [
        "ddp/tests/test_bucket.py",
        "ddp/tests/test_drop_in.py",
        "zero/tests/test_fsdp.py",
        "zero/tests/test_optimizer.py",
        "zero/tests/test_checkpoint.py",
        "zero/tests/test_state.py",
    ],
)
def test_training_packages_pass_on_the_registered_backend(file):
    path = ROOT / "packages" / file
    if not path.exists():
        pytest.skip(f"{file} is not part of this checkout")
    search = [str(TESTS), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_collectives", "-m"]
    command += ["not exhaustive and not timing and not gpu", str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

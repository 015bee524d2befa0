"""The tests of packages that train models, on the registered backend instead of gloo.

All files of the tests of ddp and zero run, except those in `EXCLUDED`. The exhaustive tests, the
measurements of time and the tests that need a GPU do not run. Ranks that a test starts without a
process group keep the backend that the test names: these are a few tests of faults and of torch's
launcher, and all other tests in their files use this backend.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]
PACKAGES = ROOT / "packages"
# Files that cannot run on another backend, and the reasons.
NO_RANKS = "starts no ranks"
TIMES = "compares times with those of torch on gloo"
EXHAUSTIVE = "has exhaustive tests only"
TORCHS = "runs tests of torch that create gloo groups; this package runs them on its backend itself"
EXCLUDED = {
    "ddp/tests/test_bucket.py": NO_RANKS,
    "ddp/tests/test_overhead.py": NO_RANKS,
    "ddp/tests/test_speed.py": TIMES,
    "ddp/tests/test_torch_distributed.py": TORCHS,
    "zero/tests/test_gpu.py": "needs NCCL",
    "zero/tests/test_speed.py": TIMES,
    "zero/tests/test_torch_fsdp2.py": TORCHS,
    "zero/tests/test_torch_functions.py": EXHAUSTIVE,
    "zero/tests/test_training_loops.py": EXHAUSTIVE,
}
FILES = sorted(
    path.relative_to(PACKAGES).as_posix()
    for name in ("ddp", "zero")
    for path in (PACKAGES / name / "tests").glob("test_*.py")
)


# The list is empty if the other packages are not part of this checkout.
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", [file for file in FILES if file not in EXCLUDED])
def test_training_packages_pass_on_the_registered_backend(file):
    search = [str(TESTS), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_collectives", "-m"]
    command += ["not exhaustive and not timing and not gpu", str(PACKAGES / file)]
    # ddp's tests choose the backend themselves, because the errors that they expect depend on it.
    environment = os.environ | {
        "DDP_TEST_BACKEND": "collectives",
        "PYTHONPATH": os.pathsep.join(search),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_excluded_file_exists():
    if not FILES:
        pytest.skip("ddp and zero are not part of this checkout")
    assert set(EXCLUDED) <= set(FILES)

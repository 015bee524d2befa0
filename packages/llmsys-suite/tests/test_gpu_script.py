"""The script of the GPU runs is executed on a CPU, with the smallest sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tests" / "gpu.sh"


def test_an_unknown_argument_is_refused():
    done = subprocess.run([SCRIPT, "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected no argument or --dry, got --fast" in done.stderr


@pytest.mark.exhaustive
def test_every_command_of_the_script_succeeds_in_a_dry_run(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPT, "--dry"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("flashattn2", "zero", "ddp", "collectives", "tinyml"):
        assert json.loads((tmp_path / f"{name}-gpu.json").read_text())["rows"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "complete"
    assert (tmp_path / "steps" / "rows.json").exists()

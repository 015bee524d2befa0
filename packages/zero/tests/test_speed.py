"""Step times beside torch's own, interleaved in one run, on a machine that does nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_hosts import emulated_hosts, run_everywhere, why_not

pytestmark = pytest.mark.timing
REASON = why_not()
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def command(path):
    return [sys.executable, "-m", "zero.bench", "--json", str(path)]


def steps(path):
    rows = json.loads(Path(path).read_text())
    return {row["name"]: row for row in rows if row["case"] == "step"}


@pytest.fixture(scope="module")
def on_the_loopback(tmp_path_factory):
    path = tmp_path_factory.mktemp("loopback") / "rows.json"
    subprocess.run(command(path), check=True, timeout=400, env=ENVIRONMENT)
    return steps(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_stage_is_slower_than_torchs_own_on_the_loopback(on_the_loopback, stage):
    assert on_the_loopback[f"stage{stage}"]["ratio_p50"] <= 1.0


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_throttled_link_is_used_better_than_by_torchs_own(tmp_path):
    path = tmp_path / "rows.json"
    with emulated_hosts(2, "2gbit") as hosts:
        assert run_everywhere(hosts, command(path), ENVIRONMENT, seconds=400) == [0, 0]
    rows = steps(path)
    assert rows["stage3"]["ratio_p50"] <= 0.8
    assert rows["stage1"]["ratio_p50"] <= 0.75
    assert rows["stage2"]["ratio_p50"] <= 0.75
    for name, most in (("stage1", 1.01), ("stage2", 1.01), ("stage3", 1.51)):
        assert rows[name]["sent_over_parameters"] <= most

"""Step times beside torch's implementations, interleaved in one run on an idle machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_hosts import emulated_hosts, explain_refusal, run_everywhere
from figures import assert_at_most

pytestmark = pytest.mark.timing
REASON = explain_refusal()
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def build_command(path):
    return [sys.executable, "-m", "zero.bench", "--rounds", "5", "--json", str(path)]


def measure_steps(path):
    rows = json.loads(Path(path).read_text())
    return {row["name"]: row for row in rows if row["case"] == "step"}


@pytest.fixture(scope="module")
def on_the_loopback(tmp_path_factory):
    path = tmp_path_factory.mktemp("loopback") / "rows.json"
    subprocess.run(build_command(path), check=True, timeout=400, env=ENVIRONMENT)
    return measure_steps(path)


def check_ratio(row, expected):
    """Fail if a step takes more than `expected` of the rival's time."""
    figure = f"zero: step of {row['name']} over {row['rival']}, link {row['link']}"
    assert_at_most(figure, expected, row["ratio_p50"])


@pytest.mark.parametrize(("stage", "expected"), [(1, 1.0), (2, 1.0), (3, 0.7)])
def test_no_stage_is_slower_than_torchs_on_the_loopback(on_the_loopback, stage, expected):
    check_ratio(on_the_loopback[f"stage{stage}"], expected)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_steps_on_a_throttled_link_are_faster_than_torchs(tmp_path):
    path = tmp_path / "rows.json"
    with emulated_hosts(2, "2gbit") as hosts:
        assert run_everywhere(hosts, build_command(path), ENVIRONMENT, seconds=400) == [0, 0]
    rows = measure_steps(path)
    for name, expected in (("stage1", 0.71), ("stage2", 0.71), ("stage3", 0.6)):
        check_ratio(rows[name], expected)
    for name, most in (("stage1", 1.01), ("stage2", 1.01), ("stage3", 1.51)):
        assert rows[name]["sent_over_parameters"] <= most

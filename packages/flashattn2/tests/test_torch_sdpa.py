"""An independent reference: torch's tests of its attention, with `sdpa` in place of its function.

TORCH_SDPA_TESTS is the path of test/test_transformers.py in a checkout of torch.  Every
test that passes with torch's function must pass with ours.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILE = os.environ.get("TORCH_SDPA_TESTS")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(FILE is None, reason="TORCH_SDPA_TESTS names no test_transformers.py"),
]
# Two thousand tests with masks would call torch's function in both runs.  The fused operator of an
# encoder calls no attention function.  Some tests compile for minutes, and TorchScript cannot read
# the source of the replacement.
LEFT_OUT = (
    "mask_vs_math or fused_sdp_choice or set_attn_mask_True or fastpath or variants_compile "
    "or script or encoderlayer_subclass"
)


def run_tests(oracle, folder, names=()):
    """Return the tests that pass, the messages of the other tests, and those that called ours."""
    folder = folder / oracle
    folder.mkdir()
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-k", " or ".join(names) or f"not ({LEFT_OUT})"]
    command += ["-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}"]
    environment = os.environ | {
        "ORACLE": oracle,
        "ORACLE_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(
            [str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    output = subprocess.run(
        [*command, str(FOLDER / "sdpa_oracle.py")], env=environment, cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    assert report.exists(), output.stdout[-3000:] + output.stderr[-3000:]
    passed, failed = set(), {}
    for case in ElementTree.parse(report).iter("testcase"):
        output = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if output:
            failed[case.get("name")] = output[0].text or output[0].get("message")
        else:
            passed.add(case.get("name"))
    judged = folder / "judged.txt"
    return passed, failed, set(judged.read_text().split("\n")) if judged.exists() else set()


def test_torch_sdpa_tests_that_pass_with_torch_pass_with_ours(tmp_path):
    """Torch's function runs only for the tests that fail with ours, which halves the time."""
    ours, failed, judged = run_tests("flashattn2", tmp_path)
    assert len(ours & judged) >= 100, sorted(judged)
    theirs, _, _ = run_tests("torch", tmp_path, sorted(failed)) if failed else (set(), {}, set())
    assert {name: failed[name][-3000:] for name in theirs.intersection(failed)} == {}

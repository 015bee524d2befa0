"""An independent reference: torch's distributed tests, which its wheel contains.

Tests that pass on gloo must pass on the registered backend, at two, three and four ranks.
"""

import multiprocessing
import os
import socket
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from worker_pool import run_ranks

TESTS = Path(__file__).parent
ALL = "not cuda and not nccl"
SAMPLE = "test_get_future"
SECONDS = "60"
MAX_SECONDS = 3600.0
# Tests that may fail on the registered backend, and the reason.
DIFFERS = {
    "test_ddp_logging_data_cpu": "it expects gloo in DDP's log; ours contains collectives",
}


def run_torchs_tests(who, world, chosen, folder):
    """Run torch's tests in this process, which forks their ranks; return the names that pass."""
    # A daemon must not start processes.
    multiprocessing.current_process().daemon = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = folder / f"{who}.xml"
    os.environ |= {
        "ORACLE": who,
        "ORACLE_FOLDER": str(folder / who),
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(port),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": SECONDS,
    }
    os.chdir(folder)
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    options += ["--rootdir", str(folder), f"--junitxml={report}", "-k", chosen]
    pytest.main([*options, str(TESTS / "torch_oracle.py")])
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {"failure", "error", "skipped"}
    return {case.get("name") for case in cases if not failed & {child.tag for child in case}}


def list_passed_tests(who, world, chosen, folder):
    # A process of the worker pool has imported torch already.
    return run_ranks(
        run_torchs_tests, 1, who, world, chosen, folder, backend="", timeout=MAX_SECONDS
    )[0]


def test_sample_of_torchs_distributed_tests_passes(tmp_path):
    assert list_passed_tests("collectives", 2, SAMPLE, tmp_path) == {SAMPLE}


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3, 4])
def test_torchs_distributed_tests_that_pass_on_gloo_pass(world, tmp_path):
    on_gloo, on_ours = (
        list_passed_tests(who, world, ALL, tmp_path) for who in ("gloo", "collectives")
    )
    assert on_gloo, "none of torch's tests ran"
    assert on_gloo - on_ours <= set(DIFFERS), sorted(on_gloo - on_ours)

"""torch's own tests of DDP, which are part of its wheel, pass with `ddp.DDP` too.

Tests that pass with torch's class at two, three and four ranks pass with ours, except those listed.
"""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from worker_pool import run_ranks

FOLDER_OF_TESTS = Path(__file__).parent
SOURCES = FOLDER_OF_TESTS.parent / "src"
# Tests of the profiler's events are excluded.
ALL = "^(?!.*profil).*(ddp|DDP|DataParallel|accumulate_gradients|stateless|static_graph|logg)"
SAMPLE = "^test_accumulate_gradients_no_sync_grad_is_view$"
# Folder of a checkout of torch's repository, whose tests are not all in the wheel.
FOLDER = os.environ.get("TORCH_TESTS")
# Seconds until a test that hangs fails. On two busy cores, test_ddp_uneven_inputs takes about two
# minutes at three ranks, and every other test less than one.
SECONDS_PER_TEST = 600

# Tests that pass with the class of torch 2.15. With fewer, some of torch's tests do not run here.
NUM_TESTS_OF_WHEEL = 61
NUM_TESTS_OF_REPOSITORY = 34

# Tests that fail on purpose, with the error that they report.
DIFFERS = {
    # The logging data are those of the last step, not of every n-th one, and
    # `gradient_as_bucket_view` is True by default.
    "test_ddp_logging_data_cpu": "AssertionError not raised",
    # Buffers cannot be synchronized by a hook.
    "test_ddp_broadcast_buffer_via_hook": "no attribute '_register_buffer_comm_hook'",
    "test_ddp_buffer_hook_allreduce": "no attribute '_register_buffer_comm_hook'",
    "test_ddp_buffer_hook_allreduce_return_future": "no attribute '_register_buffer_comm_hook'",
    # Two errors of torch's DDP are averaged correctly here: a graph that changes in spite of
    # static_graph=True, and reentrant checkpoints together with find_unused_parameters.
    "test_invalid_static_graph": "RuntimeError not raised",
    "test_ddp_checkpointing_unused_params_use_reentrant_True": "RuntimeError not raised",
    # The test wraps a wrapper, whose gradients would be averaged twice.
    "test_ddp_static_graph_nested_types": "expected a module without wrappers",
}


def prepare(who, world, chosen, folder, tests=None, backend="gloo"):
    """Return the environment and the arguments of pytest for torch's tests, and its report."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = folder / f"{who}-{backend}"
    folder.mkdir()
    report = folder / "report.xml"
    environment = {
        "ORACLE": who,
        "ORACLE_BACKEND": backend,
        "ORACLE_FOLDER": str(folder),
        "ORACLE_TESTS": chosen,
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_PER_TEST),
        **({"TORCH_TESTS": tests} if tests else {}),
    }
    arguments = ["-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    arguments += [f"--junitxml={report}", str(FOLDER_OF_TESTS / "torch_oracle.py")]
    return environment, arguments, report


def read_report(report):
    """Return the names of the tests that pass, and the messages of the others."""
    passed, failed = set(), {}
    for case in ElementTree.parse(report).iter("testcase"):
        reports = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if reports:
            failed[case.get("name")] = reports[0].text or ""
        else:
            passed.add(case.get("name"))
    return passed, failed


def run_tests(who, world, chosen, folder, tests=None, backend="gloo"):
    """Return the names of the tests that pass, and the messages of the others.

    Prints the result of each test as soon as it has ended.
    """
    environment, arguments, report = prepare(who, world, chosen, folder, tests, backend)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        env={k: v for k, v in os.environ.items() if k != "TORCH_TESTS"} | environment,
        cwd=report.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            if ended := re.search(r"::(test_\w+ (PASSED|FAILED|ERROR|SKIPPED))", line):
                print(f"{who}, {backend}, {world} ranks: {ended[1]}", flush=True)
    assert report.exists(), f"torch's tests with {who} on {backend} ended without a report"
    return read_report(report)


def run_in_this_process(environment, arguments, folder):
    """Run torch's tests in a process that was forked after the import of torch."""
    os.environ.pop("TORCH_TESTS", None)
    os.environ.update(environment)
    os.chdir(folder)
    # A daemon may not start processes, as torch's tests do.
    multiprocessing.current_process()._config["daemon"] = False
    pytest.main(arguments)


def compare(world, chosen, folder, *, num_tests, tests=None, backend="gloo"):
    """Compare the tests that pass with torch's class on gloo and with ours on a backend."""
    theirs, _ = run_tests("torch", world, chosen, folder, tests)
    ours, failed = run_tests("ddp", world, chosen, folder, tests, backend)
    counts = f"{len(theirs)} pass with torch's DDP, {len(theirs & ours)} with both"
    print(f"{backend}, {world} ranks: {counts}", flush=True)
    for name in theirs - ours:
        assert name in DIFFERS, (name, failed[name][-2000:])
        assert DIFFERS[name] in failed[name], name
    assert theirs - ours == DIFFERS.keys() & theirs, "remove tests from DIFFERS that pass with both"
    assert len(theirs) >= num_tests, "fewer tests than when this number was recorded"


def test_sample_of_torch_tests_passes(tmp_path):
    environment, arguments, report = prepare("ddp", 2, SAMPLE, tmp_path)
    run_ranks(run_in_this_process, 1, environment, arguments, str(tmp_path), backend="")
    passed, failed = read_report(report)
    assert len(passed) == 1, failed


def test_readme_lists_the_tests_that_differ():
    readme = (FOLDER_OF_TESTS.parent / "README.md").read_text()
    section = readme[readme.index("**Tests of torch**") :].split("\n\n**")[0]
    assert set(re.findall(r"`(test_\w+)`", section)) == DIFFERS.keys()
    assert f"{NUM_TESTS_OF_WHEEL} tests in torch's wheel" in section
    assert f"{NUM_TESTS_OF_REPOSITORY} tests in its repository" in section


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks_on", "world"),
    [("gloo", 2), ("gloo", 3), ("gloo", 4), ("collectives", 2), ("collectives", 3)],
)
def test_torch_wheel_tests_pass_like_torch_ddp(ranks_on, world, tmp_path, capfd):
    if ranks_on != "gloo":
        pytest.importorskip(ranks_on)
    with capfd.disabled():
        compare(world, ALL, tmp_path, num_tests=NUM_TESTS_OF_WHEEL, backend=ranks_on)


@pytest.mark.exhaustive
@pytest.mark.skipif(FOLDER is None, reason="TORCH_TESTS names no test/distributed of torch's")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_torch_repository_tests_pass_like_torch_ddp(world, tmp_path, capfd):
    with capfd.disabled():
        compare(world, "test_", tmp_path, num_tests=NUM_TESTS_OF_REPOSITORY, tests=FOLDER)

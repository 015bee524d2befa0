"""Settings and options of all tests. pytest finds this file from any test folder."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# One thread per process: otherwise many small operators on two cores spend their time in barriers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this variable when it is
# imported, and any test file may be the first to import it.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An example has no deadline, because a busy machine is not a failure. `make test` draws the same
# examples on every machine; `--hypothesis-profile explore`, which `make test-exhaustive` passes,
# draws new examples in each run.
settings.register_profile("explore", parent=settings(), deadline=None)
settings.register_profile("reproducible", settings.get_profile("explore"), derandomize=True)
settings.load_profile("reproducible")


def pytest_addoption(parser):
    """Add `--seed-offset`, which finds tests whose outcome depends on one random draw."""
    parser.addoption(
        "--seed-offset", type=int, default=0, help="add this number to every seed that a test sets"
    )


def pytest_collection():
    """Stop garbage collection while modules are imported and tests are collected."""
    # Imported modules and collected tests are not garbage, and scanning them takes a third of the
    # time of the collection.
    gc.disable()


def pytest_configure(config):
    """Apply `--seed-offset` in this process; worker processes read it from the environment."""
    offset = config.getoption("--seed-offset")
    if offset:
        import seed_offset

        seed_offset.install(offset)


def pytest_collection_modifyitems(config, items):
    """Skip tests that are marked `fixed_seed` if seeds are shifted."""
    if not config.getoption("--seed-offset"):
        return
    for item in items:
        marker = item.get_closest_marker("fixed_seed")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs its seed: {marker.args[0]}"))


def pytest_collection_finish():
    """Exclude everything that has been imported and collected from garbage collection."""
    # Modules and collected tests live until the end, so the garbage collector need not scan them.
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """End the ranks that the tests of a file share, after its last test."""
    worker_pool = sys.modules.get("worker_pool")
    if worker_pool is not None and (nextitem is None or nextitem.path != item.path):
        worker_pool.close_shared_ranks()


def pytest_terminal_summary(terminalreporter):
    """List the figures that the timing tests have measured."""
    figures = sys.modules.get("figures")
    if figures is not None and figures.measured_figures:
        terminalreporter.section("figures")
        for line in figures.measured_figures:
            terminalreporter.line(line)

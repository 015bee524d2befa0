"""Ranks of scenarios that wait, which run beside the other tests of their file."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import worker_pool

# For the imports of `host_layout`.
sys.path.append(str(Path(__file__).parent))

# Ranks that wait do not compute, but all of them set up a group first.
SCENARIOS_AT_A_TIME = 8


def pytest_collection_modifyitems(items):
    """Move the tests that wait for a scenario behind the other tests of their file."""
    paths = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda item: (paths[item.path], "outcomes" in item.fixturenames))


@pytest.fixture(scope="module", autouse=True)
def waiting_scenarios(request):
    """Start the scenarios in the module's `WAITING` whose tests are selected.

    Their ranks wait for a timeout, so they run beside the other tests of the file. `WAITING` maps
    the name of a test to the arguments of `try_ranks`.
    """
    selected = {item.name for item in request.session.items if item.path == request.path}
    waiting = getattr(request.module, "WAITING", {})
    with ThreadPoolExecutor(SCENARIOS_AT_A_TIME) as pool:
        yield {
            name: pool.submit(partial(worker_pool.try_ranks, **options), *arguments)
            for name, (arguments, options) in waiting.items()
            if name in selected
        }


@pytest.fixture
def outcomes(waiting_scenarios, request):
    """Return the outcomes of the test's scenario by rank."""
    return waiting_scenarios[request.node.name].result()

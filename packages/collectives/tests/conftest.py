"""Scenarios whose ranks wait for a timeout run beside the other tests of their file."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from worker_pool import try_ranks

# Ranks that wait do not compute, but all of them set up a group first.
SCENARIOS_AT_A_TIME = 4


@pytest.fixture(scope="module", autouse=True)
def waiting_scenarios(request):
    """Start the scenarios in the module's `WAITING` whose tests are selected.

    `WAITING` maps the name of a test to the arguments of `try_ranks`.
    """
    scenarios = getattr(request.module, "WAITING", {})
    selected = {item.name for item in request.session.items if item.path == request.path}
    with ThreadPoolExecutor(SCENARIOS_AT_A_TIME) as pool:
        yield {
            name: pool.submit(partial(try_ranks, **options), *arguments)
            for name, (arguments, options) in scenarios.items()
            if name in selected
        }


@pytest.fixture
def outcomes(waiting_scenarios, request):
    """Return the outcomes of the test's scenario by rank."""
    return waiting_scenarios[request.node.name].result()

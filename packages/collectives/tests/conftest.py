"""Starts of ranks that several tests of a file share."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial

import pytest
import torch.distributed as dist
import worker_pool
from collectives.algorithms import dispatch
from collectives.shared_memory import segment

# Ranks that wait do not compute, but all of them set up a group first.
SCENARIOS_AT_A_TIME = 6
TIMEOUT = timedelta(seconds=180)


def pytest_collection_modifyitems(items):
    """Move the tests that wait for a scenario behind the other tests of their file."""
    paths = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda item: (paths[item.path], "outcomes" in item.fixturenames))


def selected_of(request, name):
    """Return the entries of a module's dictionary whose keys are names of selected tests."""
    selected = {item.name for item in request.session.items if item.path == request.path}
    table = getattr(request.module, name, {})
    return {test: entry for test, entry in table.items() if test in selected}


@pytest.fixture(scope="module", autouse=True)
def waiting_scenarios(request):
    """Start the scenarios in the module's `WAITING` whose tests are selected.

    Their ranks wait for a timeout, so they run beside the other tests of the file. `WAITING` maps
    the name of a test to the arguments of `try_ranks`.
    """
    with ThreadPoolExecutor(SCENARIOS_AT_A_TIME) as pool:
        yield {
            name: pool.submit(partial(worker_pool.try_ranks, **options), *arguments)
            for name, (arguments, options) in selected_of(request, "WAITING").items()
        }


@pytest.fixture
def outcomes(waiting_scenarios, request):
    """Return the outcomes of the test's scenario by rank."""
    return waiting_scenarios[request.node.name].result()


def run_cases(path, backend, cases):
    """Run functions of a test file on this rank, each on a new group; return their results.

    With an empty `backend`, the functions create the groups.
    """
    module = worker_pool._load(path)
    rank, world, store_file = (os.environ[key] for key in ("RANK", "WORLD_SIZE", "STORE_FILE"))
    host_identity, tune = segment.host_identity, dispatch.tune
    results = {}
    for number, (test, name, arguments) in enumerate(cases):
        segment.host_identity, dispatch.tune = host_identity, tune
        path = os.environ["STORE_FILE"] = f"{store_file}-{number}"
        try:
            if backend:
                store = dist.FileStore(path, int(world))
                dist.init_process_group(
                    backend, store=store, rank=int(rank), world_size=int(world), timeout=TIMEOUT
                )
            results[test] = getattr(module, name)(*arguments)
        except BaseException as error:
            error.add_note(f"on rank {rank} in the case of {test}")
            raise
        dist.destroy_process_group()
        gc.collect()
    return results


@pytest.fixture(scope="module")
def start_cases(request):
    """Return a function that runs all selected cases with a number of ranks and a backend.

    The module's `CASES` maps the name of a test to a number of ranks, a backend, a function and its
    arguments. If a case fails, the tests of all cases in its start fail.
    """
    selected = selected_of(request, "CASES")

    @cache
    def start(world, backend):
        cases = [
            (test, function.__name__, arguments)
            for test, (*start_of_test, function, arguments) in selected.items()
            if start_of_test == [world, backend]
        ]
        path = request.module.__file__
        return worker_pool.try_ranks(run_cases, world, path, backend, cases, backend="")

    return start


@pytest.fixture
def results(start_cases, request):
    """Return the results of the test's case by rank."""
    world, backend, *_ = request.module.CASES[request.node.name]
    outcomes = start_cases(world, backend)
    if any(outcome.failed for outcome in outcomes):
        pytest.fail("\n".join(o.trace or f"exit code {o.exit_code}" for o in outcomes))
    return [outcome.value[request.node.name] for outcome in outcomes]

"""The backends that ddp's tests run on.

By default ranks use gloo, and the files in `ON_BOTH` run a second time on the `collectives`
backend: the tests in `USUAL_ON_BOTH` always, and all other tests if exhaustive tests are selected.
`DDP_TEST_BACKEND=collectives` selects that backend for every test that does not name one.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

ON_BOTH = {"test_ddp", "test_faults", "test_compat", "test_uneven"}
#: Tests whose result depends on how a backend adds, and on what it reports of a lost rank.
USUAL_ON_BOTH = {
    "test_all_designs_give_the_same_bits_and_match_one_process",
    "test_dead_rank_that_hosted_the_store_is_named",
    "test_join_averages_over_ranks_with_uneven_inputs",
    "test_lost_rank_is_named_by_every_survivor",
}

#: Names of the functions of worker_pool that start ranks.
START = ("run_ranks", "try_ranks", "run_on_shared_ranks")


def pytest_generate_tests(metafunc):
    if not any(hasattr(metafunc.module, name) for name in START):
        return
    names = [os.environ.get("DDP_TEST_BACKEND", "gloo")]
    values = list(names)
    if names == ["gloo"] and Path(metafunc.module.__file__).stem in ON_BOTH:
        is_usual = metafunc.function.__name__ in USUAL_ON_BOTH
        names.append("collectives")
        values.append(pytest.param("collectives", marks=() if is_usual else pytest.mark.exhaustive))
    metafunc.parametrize("backend", values, indirect=True, ids=[f"on-{name}" for name in names])


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Run the ranks of the test module on the backend; return its name."""
    backend = getattr(request, "param", "gloo")
    if backend == "gloo":
        return backend
    if find_spec(backend) is None:
        pytest.skip(f"the package {backend} is not installed")
    for name in START:
        if hasattr(request.module, name):
            start = partial(start_ranks, getattr(request.module, name))
            monkeypatch.setattr(request.module, name, start)
    return backend


def start_ranks(start, function, world, *args, timeout=180.0, backend="gloo"):
    """Call `start` (of worker_pool) on the `collectives` backend if `backend` is "gloo"."""
    if backend != "gloo":
        return start(function, world, *args, timeout=timeout, backend=backend)
    path = sys.modules[function.__module__].__file__
    what = path, function.__qualname__, timeout
    return start(run_on_collectives, world, what, *args, timeout=timeout, backend="")


def run_on_collectives(what, *args):
    """Run a function of a test file on a process group of the `collectives` backend."""
    import worker_pool

    # Registers the backend. A static import would make ddp's tests depend on a sibling.
    import_module("collectives.backend")
    path, name, seconds = what
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE_FILE"], world)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("collectives", store=store, rank=rank, world_size=world, timeout=limit)
    return getattr(worker_pool._load(path), name)(*args)

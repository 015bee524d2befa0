"""A pytest plugin that runs the ranks of other packages' tests on the registered backend.

Ranks that a test starts on gloo get the backend `collectives` instead.
"""

import worker_pool

# The server that ranks are forked from imports these modules, which registers the backend.
worker_pool.PRELOADED.append("collectives.backend")
start = worker_pool.try_ranks


def try_ranks(function, world, *args, timeout=180.0, backend="gloo"):
    name = {"gloo": "collectives"}.get(backend, backend)
    return start(function, world, *args, timeout=timeout, backend=name)


worker_pool.try_ranks = try_ranks

"""torch's distributed tests, on gloo or with our backend in place of gloo.

This file is not collected: `test_torch_distributed` runs it in a separate process. It sets ORACLE
(gloo or collectives), WORLD_SIZE and ORACLE_FOLDER. Events of torch's profiler contain the name of
the backend and are not compared.
"""

import os
from pathlib import Path

FOLDER = Path(os.environ["ORACLE_FOLDER"])
for name in ("init_dir", "barrier", "test_dir"):
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(FOLDER), "MASTER_ADDR": "127.0.0.1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def replace_gloo(function, position):
    """Return the function with our backend in place of gloo."""

    def call(*args, **kwargs):
        if len(args) > position and args[position] == "gloo":
            args = (*args[:position], "collectives", *args[position + 1 :])
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = "collectives"
        return function(*args, **kwargs)

    return call


if os.environ["ORACLE"] == "collectives":
    import collectives.backend  # noqa: F401

    get_backend = dist.get_backend
    dist.init_process_group = replace_gloo(dist.init_process_group, 0)
    dist.new_group = replace_gloo(dist.new_group, 2)
    dist.get_backend = lambda group=None: {"collectives": "gloo"}.get(
        get_backend(group), get_backend(group)
    )

from torch.testing._internal.distributed import distributed_test as torchs  # noqa: E402

BASE = torchs.DistributedTest._DistTestBase
call_dist_op = BASE.call_dist_op
BASE.call_dist_op = lambda self, *args, **kwargs: call_dist_op(
    self, *args, **kwargs | {"expect_event": False}
)


class TestTorchs(torchs.TestDistBackend, BASE):
    """torch's class of tests, with one process per rank."""

    def setUp(self):
        super().setUp()
        # A forked rank does not have to import torch.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

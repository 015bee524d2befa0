"""A pytest plugin: tests of torch's repository, on gloo or on the registered backend in its place.

`test_torch_files` runs single files of torch's `test/distributed` with this plugin and sets
ORACLE (gloo or collectives) and ORACLE_FOLDER. Every rank that creates a group of this package
writes a file to ORACLE_FOLDER, which shows that the backend has been used.
"""

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

# Modules that torch has moved since the release of its files, and their present names.
OLD, NEW = "torch.distributed._tensor", "torch.distributed.tensor"
MOVED = {
    "_collective_utils": "_collective_utils",
    "_op_schema": "_op_schema",
    "_redistribute": "_redistribute",
    "_utils": "_utils",
    "debug": "debug",
    "debug.comm_mode": "debug._comm_mode",
    "debug._op_coverage": "debug._op_coverage",
    "device_mesh": "device_mesh",
    "experimental": "experimental",
    "experimental.tp_transform": "experimental._tp_transform",
    "ops.common_rules": "_ops._common_rules",
    "ops.embedding_ops": "_ops._embedding_ops",
    "ops.matrix_ops": "_ops._matrix_ops",
    "ops.utils": "_ops.utils",
    "ops.view_ops": "_ops._view_ops",
    "random": "_random",
}


def replace(backend):
    """Return the name of a backend, for example `cpu:gloo`, with ours in place of gloo."""
    return "collectives" if backend is None else str(backend).replace("gloo", "collectives")


def install():
    """Let torch's functions create groups of our backend where gloo is requested."""
    import collectives.backend

    marks, count = Path(os.environ["ORACLE_FOLDER"]), 0
    create, set_up = dist.init_process_group, collectives.backend.CollectivesProcessGroup.__init__
    get_backend = dist.get_backend

    def init_process_group(backend=None, *args, **kwargs):
        # `fake` and `threaded` groups run no collectives.
        return create(replace(backend), *args, **kwargs)

    def __init__(self, *args, **kwargs):
        nonlocal count
        set_up(self, *args, **kwargs)
        count += 1
        (marks / f"group {os.getpid()} {count}").touch()

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.get_backend = lambda group=None: get_backend(group).replace("collectives", "gloo")
    collectives.backend.CollectivesProcessGroup.__init__ = __init__


def _start_forked(self):
    # A forked rank inherits the replaced functions and does not import torch again.
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


for old, new in MOVED.items():
    sys.modules[f"{OLD}.{old}"] = importlib.import_module(f"{NEW}.{new}")
placements = importlib.import_module(f"{OLD}.placement_types")
placements._Partial = placements.Partial
common_distributed.MultiProcessTestCase._spawn_processes = _start_forked
if os.environ["ORACLE"] == "collectives":
    install()

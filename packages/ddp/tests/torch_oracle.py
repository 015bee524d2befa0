"""torch's own tests of its DDP, with torch's or with ours in its place, and GPUs that are the CPU.

Not collected by itself: `test_torch_distributed` runs it in a process of its own, with ORACLE
(torch or ddp), ORACLE_TESTS (a regular expression), WORLD_SIZE and ORACLE_FOLDER set. Most of
torch's tests ask for GPUs and would be right without: what puts something on a device here leaves
it where it is. Events of torch's profiler are not compared.

The tests are those of torch's wheel, or with TORCH_TESTS (the folder test/distributed of a checkout
of torch's repository) those of its files.
"""

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

FOLDER = Path(os.environ["ORACLE_FOLDER"])
for name in ("init_dir", "barrier", "test_dir"):
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(FOLDER), "MASTER_ADDR": "127.0.0.1"}

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  before anything is replaced, as it keeps a list of all there is
import torch.distributed.device_mesh as device_mesh  # noqa: E402
from torch import nn  # noqa: E402


def is_gpu(device):
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def on_cpu(function):
    """The same function, to which a GPU means the CPU."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def moved_nowhere(to):
    """`to()`, to which a GPU means the CPU."""

    @functools.wraps(to)
    def call(self, *args, **kwargs):
        args = tuple("cpu" if is_gpu(one) else one for one in args)
        return on_cpu(to)(self, *args, **kwargs)

    return call


for kind in (torch.Tensor, nn.Module):
    kind.cuda = lambda self, *_, **__: self
    kind.to = moved_nowhere(kind.to)
MAKERS = ["arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"]
for name in MAKERS:
    setattr(torch, name, on_cpu(getattr(torch, name)))
for name in ("set_device", "synchronize", "manual_seed"):
    setattr(torch.cuda, name, lambda *_, **__: None)
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0
init_device_mesh = device_mesh.init_device_mesh
device_mesh.init_device_mesh = lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)

if os.environ["ORACLE"] == "ddp":
    from ddp import DDP as Judged
else:
    from torch.nn.parallel import DistributedDataParallel as Judged


class OnCPU(Judged):
    """What is judged, without the GPU that a test names."""

    _get_active_ddp_module = classmethod(lambda cls: None)

    def __init__(self, module, *args, **kwargs):
        if args and isinstance(args[0], (list, tuple)):
            args = args[1:]
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        super().__init__(module, *args, **kwargs)


nn.parallel.DistributedDataParallel = nn.parallel.distributed.DistributedDataParallel = OnCPU

from torch.testing._internal import common_distributed  # noqa: E402

common_distributed.verify_ddp_error_logged = lambda *_: None
# Some have a limit of their own, in seconds, which four ranks on two busy cores reach.
for name in common_distributed.TIMEOUT_OVERRIDE:
    common_distributed.TIMEOUT_OVERRIDE[name] *= 4
common_distributed.skip_if_no_gpu = lambda test: test
for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "requires_nccl_version"):
    setattr(common_distributed, name, lambda *_, **__: lambda test: test)

WANTED = re.compile(os.environ["ORACLE_TESTS"])
WORLD = int(os.environ["WORLD_SIZE"])


def fork(self):
    """Start a process a rank that has imported everything already."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def only_wanted(case):
    """The tests of a class that were asked for; torch's class looks at `__wrapped__` of one."""
    for name in dir(case):
        if name.startswith("test_") and not WANTED.search(name):
            setattr(case, name, SimpleNamespace(__wrapped__=None))
    return case


common_distributed.MultiProcessTestCase._spawn_processes = fork

if folder := os.environ.get("TORCH_TESTS"):
    sys.path.insert(0, folder)
    # Of another release than torch's wheel, maybe: what went since then is not used by these tests.
    sys.modules.setdefault("torch.distributed._spmd", mock.MagicMock())
    sys.modules.setdefault("torch.distributed._spmd.comm_tensor", mock.MagicMock())
    names = ("test_c10d_common", "test_c10d_gloo", "test_c10d_spawn_gloo")
    test_c10d_common, test_c10d_gloo, test_c10d_spawn_gloo = map(importlib.import_module, names)

    for module in (test_c10d_common, test_c10d_gloo):
        module.gpus_for_rank = lambda world: [[rank] for rank in range(world)]
    test_c10d_common.CommonDistributedDataParallelTest.world_size = property(lambda _: WORLD)

    TestGloo = only_wanted(test_c10d_gloo.DistributedDataParallelTest)
    TestOneProcess = only_wanted(test_c10d_spawn_gloo.DistributedDataParallelSingleProcessTest)
else:
    from torch.testing._internal.distributed import distributed_test as torchs

    BASE = torchs.DistributedTest._DistTestBase
    call_dist_op = BASE.call_dist_op
    BASE.call_dist_op = lambda self, *args, **kwargs: call_dist_op(
        self, *args, **kwargs | {"expect_event": False}
    )

    class TestTorchs(torchs.TestDistBackend, BASE):
        """torch's class of tests."""

        def setUp(self):
            super().setUp()
            fork(self)

    only_wanted(TestTorchs)

"""torch's own tests of DDP, run with torch's class or with `ddp.DDP`, on a CPU instead of GPUs.

`test_torch_distributed` runs this file in a separate process, with ORACLE (torch or ddp),
ORACLE_BACKEND (gloo or collectives), ORACLE_TESTS (a regular expression), WORLD_SIZE and
ORACLE_FOLDER set. Most of torch's tests require GPUs, but do not depend on them: functions that
move tensors to a device here do nothing. Events of torch's profiler are not compared.

The tests come from torch's wheel, or from TORCH_TESTS, the folder test/distributed of a checkout of
torch's repository.
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
import torch._dynamo  # noqa: E402  before the patches below, because it lists all functions of torch
import torch.distributed as dist  # noqa: E402
import torch.distributed.device_mesh as device_mesh  # noqa: E402
import torch.distributed.optim  # noqa: E402  before them too, because it is scripted in torch 2.11
from torch import nn  # noqa: E402


def is_gpu(device):
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def run_on_cpu(function):
    """Return the function with GPU devices replaced by the CPU."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def to_cpu(to):
    """Return a method `to()` with GPU devices replaced by the CPU."""

    @functools.wraps(to)
    def call(self, *args, **kwargs):
        args = tuple("cpu" if is_gpu(argument) else argument for argument in args)
        return run_on_cpu(to)(self, *args, **kwargs)

    return call


for kind in (torch.Tensor, nn.Module):
    kind.cuda = lambda self, *_, **__: self
    kind.to = to_cpu(kind.to)
MAKERS = ["arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"]
for name in MAKERS:
    setattr(torch, name, run_on_cpu(getattr(torch, name)))
for name in ("set_device", "synchronize", "manual_seed"):
    setattr(torch.cuda, name, lambda *_, **__: None)
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0
init_device_mesh = device_mesh.init_device_mesh
device_mesh.init_device_mesh = lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)


def replace_gloo(function, position):
    """Return the function with the `collectives` backend in place of gloo."""

    def call(*args, **kwargs):
        if len(args) > position and args[position] == "gloo":
            args = (*args[:position], "collectives", *args[position + 1 :])
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = "collectives"
        return function(*args, **kwargs)

    return call


if os.environ["ORACLE_BACKEND"] == "collectives":
    # Registers the backend. A static import would make ddp's tests depend on a sibling.
    importlib.import_module("collectives.backend")
    get_backend = dist.get_backend
    dist.init_process_group = replace_gloo(dist.init_process_group, 0)
    dist.new_group = replace_gloo(dist.new_group, 2)
    # The tests select their cases by the name of the backend.
    dist.get_backend = lambda group=None: get_backend(group).replace("collectives", "gloo")

if os.environ["ORACLE"] == "ddp":
    sys.path.insert(0, str(Path(__file__).parent))
    from torch_test_members import TestedDDP as Judged
else:
    from torch.nn.parallel import DistributedDataParallel as Judged


class OnCPU(Judged):
    """The tested class, without the GPU that a test names."""

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
# Every test has the time limit DISTRIBUTED_TESTS_DEFAULT_TIMEOUT, instead of up to 3,000 seconds.
common_distributed.TIMEOUT_OVERRIDE.clear()
common_distributed.skip_if_no_gpu = lambda test: test
for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "requires_nccl_version"):
    setattr(common_distributed, name, lambda *_, **__: lambda test: test)

WANTED = re.compile(os.environ["ORACLE_TESTS"])
WORLD = int(os.environ["WORLD_SIZE"])


def fork(self):
    """Start one process per rank, forked after all imports."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def keep_selected_tests(case):
    """Remove the unselected tests of a class; torch's class reads `__wrapped__` of each."""
    for name in dir(case):
        if name.startswith("test_") and not WANTED.search(name):
            setattr(case, name, SimpleNamespace(__wrapped__=None))
    return case


common_distributed.MultiProcessTestCase._spawn_processes = fork

if folder := os.environ.get("TORCH_TESTS"):
    sys.path.insert(0, folder)
    # The checkout may be older than the wheel. Its tests do not use these removed modules.
    sys.modules.setdefault("torch.distributed._spmd", mock.MagicMock())
    sys.modules.setdefault("torch.distributed._spmd.comm_tensor", mock.MagicMock())
    test_c10d_common = importlib.import_module("test_c10d_common")
    test_c10d_gloo = importlib.import_module("test_c10d_gloo")
    test_c10d_spawn_gloo = importlib.import_module("test_c10d_spawn_gloo")

    for module in (test_c10d_common, test_c10d_gloo):
        module.gpus_for_rank = lambda world: [[rank] for rank in range(world)]
    test_c10d_common.CommonDistributedDataParallelTest.world_size = property(lambda _: WORLD)

    TestGloo = keep_selected_tests(test_c10d_gloo.DistributedDataParallelTest)
    TestOneProcess = keep_selected_tests(
        test_c10d_spawn_gloo.DistributedDataParallelSingleProcessTest
    )
else:
    from torch.testing._internal.distributed import distributed_test as torchs

    # With torchvision, test_ddp_uneven_inputs also trains a ResNet-50 on images of 1,000 x 1,000
    # pixels in 18 of its 144 cases, which takes hours on a CPU.
    torchs.HAS_TORCHVISION = False
    BASE = torchs.DistributedTest._DistTestBase
    call_dist_op = BASE.call_dist_op
    BASE.call_dist_op = lambda self, *args, **kwargs: call_dist_op(
        self, *args, **kwargs | {"expect_event": False}
    )

    class TestTorchs(torchs.TestDistBackend, BASE):
        """torch's class of tests, with forked processes."""

        def setUp(self):
            super().setUp()
            fork(self)

    keep_selected_tests(TestTorchs)

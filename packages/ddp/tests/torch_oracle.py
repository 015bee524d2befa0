"""torch's own tests of its DDP, with torch's or with ours in its place, and GPUs that are the CPU.

Not collected by itself: `test_torch_distributed` runs it in a process of its own, with ORACLE
(torch or ddp), ORACLE_TESTS (a regular expression), WORLD_SIZE and ORACLE_FOLDER set. Most of
torch's tests ask for GPUs and would be right without: what puts something on a device here leaves
it where it is. Events of torch's profiler and entries of its DDP's private log are not compared.
"""

import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace

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


if os.environ["ORACLE"] == "ddp":
    # Private switches of torch's DDP that have nothing to switch here.
    OnCPU._set_ddp_sink_clone = OnCPU._remove_autograd_hooks = lambda *_: None
    OnCPU._get_ddp_logging_data = lambda _: {"join_uneven_inputs": True}

nn.parallel.DistributedDataParallel = nn.parallel.distributed.DistributedDataParallel = OnCPU

from torch.testing._internal import common_distributed  # noqa: E402

common_distributed.verify_ddp_error_logged = lambda *_: None
common_distributed.skip_if_no_gpu = lambda test: test
for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "requires_nccl_version"):
    setattr(common_distributed, name, lambda *_, **__: lambda test: test)

from torch.testing._internal.distributed import distributed_test as torchs  # noqa: E402

BASE = torchs.DistributedTest._DistTestBase
call_dist_op = BASE.call_dist_op
BASE.call_dist_op = lambda self, *args, **kwargs: call_dist_op(
    self, *args, **kwargs | {"expect_event": False}
)


class TestTorchs(torchs.TestDistBackend, BASE):
    """torch's class of tests, a process a rank."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


WANTED = re.compile(os.environ["ORACLE_TESTS"])
for name in dir(TestTorchs):
    if name.startswith("test_") and not WANTED.search(name):
        # torch's class looks at `__wrapped__` of one of them.
        setattr(TestTorchs, name, SimpleNamespace(__wrapped__=None))

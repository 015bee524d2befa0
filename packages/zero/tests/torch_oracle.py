"""torch's own tests of fully_shard, with torch's or with ours in its place, and GPUs that are CPUs.

`run` is called on each rank of a test's processes, with the folder of torch's files. They may be of
another release than torch's wheel: what has moved is found, and what has gone is an object that
does nothing, so that a test that uses it passes with neither.
"""

import importlib
import os
import re
import sys
import traceback
import unittest
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import zero
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal import common_utils
from zero.fsdp.autograd_hooks import _GradientHook
from zero.fsdp.shard import find_sharded

# The maximum number of ranks of a test, and the timeout of a rank.
RANKS, SECONDS = 4, 60


def check_sharded_parity(case, replicated, sharded, prefixes_to_ignore=()):
    """Compare as torch's function of this name does, for shards that are not DTensors."""
    pairs = zip(replicated.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (theirs, parameter) in pairs:
        for prefix in prefixes_to_ignore:
            theirs = theirs.replace(prefix, "")
        assert name == theirs
        sharded = find_sharded(parameter)
        assert_close(sharded.unit.gather_full_parameters()[sharded.name], expected.detach())
        assert (expected.grad is None) == (parameter.grad is None), name
        if expected.grad is not None:
            assert_close(parameter.grad.full_tensor(), expected.grad)


class OnCPU(TorchFunctionMode):
    """A mode in which arguments that name a GPU name the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cuda, nn.Module.cuda):
            return args[0]
        args = [use_cpu(arg) for arg in args]
        return func(*args, **{key: use_cpu(value) for key, value in (kwargs or {}).items()})


def use_cpu(value):
    name = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(name, str) and name.startswith("cuda") else value


class OnRanks(common_utils.TestCase):
    """A test case that replaces torch's classes that start processes: the ranks run already."""

    # torch's default: the number of GPUs.
    world_size = RANKS
    rank = property(lambda self: dist.get_rank())
    process_group = property(lambda self: dist.group.WORLD)

    def run_subtests(self, *args, **kwargs):
        from torch.testing._internal.common_distributed import run_subtests

        run_subtests(self, *args, **kwargs)


def init_mesh_on_the_cpu(_, *args, **kwargs):
    """Return the mesh of a test on the CPU, instead of the device that the test names."""
    return init_device_mesh("cpu", *args, **kwargs)


def prepare(who):
    """Replace the parts of torch that the tests import, before they import them."""
    import torch.distributed.tensor.debug
    from torch.distributed import _composable, tensor
    from torch.testing._internal import (
        common_cuda,
        common_distributed,
        common_fsdp,
    )

    for name in ("set_device", "synchronize", "_sleep", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device_count, torch.cuda.current_device = lambda: RANKS, lambda: 0
    common_cuda.TEST_CUDA = True
    common_utils.get_cycles_per_ms = lambda: 1.0
    for name in ("skip_if_lt_x_gpu", "requires_nccl_version"):
        setattr(common_distributed, name, lambda *_, **__: lambda test: test)
    for name in ("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous"):
        setattr(common_fsdp, name, OnRanks)
    for name in ("compiled_fsdp_test", "test_compiled_fsdp"):
        setattr(common_fsdp, name, lambda *_, **__: lambda test: test)

    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(
        lambda group, _, *args, **kwargs: from_group(group, "cpu", *args, **kwargs)
    )
    replicate = _composable.replicate

    def replicated(module, *args, device_ids=None, **kwargs):
        return replicate(module, *args, **kwargs)

    replicated.state = replicate.state
    _composable.replicate = replicated
    import torch.distributed._tensor as old

    for module in (torch.distributed.device_mesh, tensor, old):
        module.init_device_mesh = init_mesh_on_the_cpu
    sys.modules["torch.distributed._tensor.debug"] = tensor.debug
    sys.modules["torch.distributed._tensor.debug.comm_mode"] = tensor.debug
    for new in Path(torchs.__file__).parent.glob("_fully_shard/_fsdp_*.py"):
        implementation = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{new.stem}")
        sys.modules[f"torch.distributed._composable.fsdp.{new.stem}"] = implementation
    if who == "zero":
        common_fsdp.check_sharded_parity = check_sharded_parity
        # The model MLPStack calls the fully_shard that common_fsdp has imported. It must not be
        # torch's, which would pass other arguments to the function that is replaced below.
        common_fsdp.fully_shard = zero.fully_shard
        group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        group.RegisterPostBackwardFunction = common_fsdp.RegisterPostBackwardFunction = (
            _GradientHook
        )
        for namespace in (torchs, importlib.import_module("torch.distributed._composable.fsdp")):
            namespace.fully_shard, namespace.FSDPModule = zero.fully_shard, zero.FSDPModule
            namespace.register_fsdp_forward_method = lambda module, name: None


def load(name):
    """Import one of torch's files; names that torch does not have are mocks."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            sys.modules[error.name] = mock.MagicMock()
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)'", str(error))
            if not missing:
                raise
            setattr(sys.modules[error.name], missing[1], mock.MagicMock())


@contextmanager
def group_of(world, rank, folder_of_store):
    store = dist.FileStore(folder_of_store, world)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    # A rank whose test fails at once must not leave while another rank is still connecting to it:
    # then the ranks' numbers of groups would differ, and all later tests would time out.
    dist.barrier()
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(who, world, folder, files, wanted, folder_of_store):
    """Run torch's tests of `world` ranks; return the failure of each test by name."""
    rank = int(os.environ["RANK"])
    sys.path.insert(0, folder)
    prepare(who)
    failures = {}
    for file in files:
        module = load(file)
        cases = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, OnRanks)]
        for case in (case for case in cases if case.__module__ == file):
            for name in (n for n in dir(case) if re.search(f"^test_.*({wanted})", n)):
                test_case = case(name)
                if test_case.world_size != world:
                    continue
                full = f"{file.removeprefix('test_fully_shard_')}: {name.removeprefix('test_')}"
                failures[full] = get_outcome(
                    test_case, name, rank, world, f"{folder_of_store}/{case.__name__}-{name}"
                )
                if os.environ.get("ORACLE_TALKS"):
                    print(rank, full, failures[full][:2500] or "passes", flush=True)
    return failures


def get_outcome(case, name, rank, world, folder_of_store):
    try:
        with group_of(world, rank, folder_of_store), OnCPU():
            torch.manual_seed(0)
            case.setUp()
            getattr(case, name)()
    except unittest.SkipTest as error:
        return f"skipped: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return ""

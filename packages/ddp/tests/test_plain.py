"""The minimal implementation is the specification: `DDP` trains bit-equal to it.

So does a reducer without its optional extensions.
"""

import copy
import inspect
import re
import sys
from functools import partial
from pathlib import Path

import ddp.plain
import ddp.reducer
import pytest
import torch
import torch.distributed as dist
from ddp import DDP, Meter
from ddp.assignment import assign_buckets
from ddp.bucket import Bucket
from ddp.compression.cast import Cast
from ddp.compression.comm_hook import CommHook
from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.gradient_agreement import GradientAgreement
from ddp.extensions import Extension
from ddp.plain import PlainDDP
from ddp.process_group import resolve_group
from ddp.reducer import Reducer
from torch import nn
from worker_pool import run_on_shared_ranks


def train_both(bucket_bytes: int) -> list:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    models = [PlainDDP(module, bucket_bytes), DDP(copy.deepcopy(module), bucket_bytes / 2**20)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for _ in range(4):
        x = torch.randn(3, 5, generator=draw)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    minimal, complete = ([p.tolist() for p in model.parameters()] for model in models)
    assert minimal == complete
    return minimal


BUCKET_BYTES = [40, 200, 10**6]


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_ddp_trains_bit_equal_to_the_minimal_implementation(bucket_bytes: int) -> None:
    first, second = run_on_shared_ranks(train_both, 2, bucket_bytes)
    assert first == second


def train_with_a_bare_reducer() -> list[str]:
    """Compare a reducer without extensions with `PlainDDP`; return the files that a step enters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 130), nn.Linear(130, 130))
    minimal = PlainDDP(module, 200)
    module = copy.deepcopy(module)
    group = resolve_group(None, None)
    options = DDP(copy.deepcopy(module), 200 / 2**20)._options
    reducer = Reducer(
        dict(module.named_parameters()),
        options,
        group,
        extensions=(),
        try_open_step=lambda: False,
        on_failure=lambda reason: None,
    )
    entered = set()
    package = Path(ddp.__file__).parent

    def record_file(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            entered.add(path.relative_to(package).as_posix())

    def mark_ready(index: int, parameter: nn.Parameter) -> None:
        sys.setprofile(record_file if reducer.num_steps == 2 else None)
        reducer.mark_ready(index, parameter)
        sys.setprofile(None)

    for index, parameter in enumerate(module.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(mark_ready, index))
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        minimal(x).square().mean().backward()
        minimal.finish_gradient_synchronization()
        reducer.start()
        module(x).square().mean().backward()
        sys.setprofile(record_file if reducer.num_steps == 2 else None)
        reducer.finish()
        sys.setprofile(None)
        for expected, ours in zip(minimal.parameters(), module.parameters(), strict=True):
            assert ours.grad.equal(expected.grad)
    return sorted(entered)


def test_reducer_needs_no_extension_and_a_gradient_crosses_the_files_of_the_readme() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    listed = re.findall(r"^\d\. \[.*?\]\(src/ddp/(.*?)\)", readme, re.MULTILINE)
    assert len(listed) == 4
    assert run_on_shared_ranks(train_with_a_bare_reducer, 2) == [sorted(listed)] * 2


def test_meter_checks_attribution_and_compression_implement_one_interface_of_five_methods() -> None:
    methods = {
        "on_step_start",
        "before_bucket_launch",
        "launch",
        "attribute_errors",
        "on_step_end",
    }
    assert {name for name in vars(Extension) if not name.startswith("_")} == methods
    algorithm = inspect.getsource(ddp.reducer)
    for extension in (FailureAttribution, Meter, GradientAgreement, Cast, CommHook):
        assert issubclass(extension, Extension)
        assert methods & vars(extension).keys()
        assert extension.__name__ not in algorithm
    assert all(f"extension.{method}(" in algorithm for method in methods)


def test_steps_have_the_names_of_the_minimal_implementation() -> None:
    names = {name for name, value in vars(PlainDDP).items() if callable(value)}
    names -= {"__init__", "forward"}
    by_file = {
        Reducer: {"mark_ready", "launch_ready_buckets", "launch_all_reduce"},
        DDP: {"finish_gradient_synchronization"},
    }
    for owner, methods in by_file.items():
        assert methods <= names & vars(owner).keys()
    assert names == set().union(*by_file.values(), {assign_buckets.__name__})
    assert {"copy_in"} <= vars(ddp.plain.Bucket).keys() & vars(Bucket).keys()


def test_buffer_of_the_minimal_implementation_is_on_the_device_of_its_parameters() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    assert ddp.plain.Bucket([parameter]).views[0].device == parameter.device


def test_minimal_implementation_is_short_and_imports_only_torch() -> None:
    source = Path(ddp.plain.__file__).read_text()
    assert len(source.splitlines()) <= 120
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert all(line.split()[1].split(".")[0] == "torch" for line in imports)

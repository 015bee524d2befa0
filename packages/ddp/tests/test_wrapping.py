"""Wrapping a module: initial broadcast, memory of gradients, order of buckets, imports."""

import copy
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from worker_pool import run_on_shared_ranks, run_ranks

MIB = 2**20


def build_norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def wrap_and_compare_state() -> list[list]:
    torch.manual_seed(dist.get_rank())
    module = build_norm_net()
    module[1].running_mean += dist.get_rank()
    module[1].num_batches_tracked += dist.get_rank()
    module.register_buffer("mask", torch.rand(3) > 0.5)
    module.register_buffer("phases", torch.randn(3, dtype=torch.complex64).conj())
    module[0].weight.data = module[0].weight.data.t().contiguous().t()
    before = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    DDP(module)
    return [before, {name: tensor.tolist() for name, tensor in module.state_dict().items()}]


def test_weights_and_buffers_are_those_of_rank_0() -> None:
    ranks = run_on_shared_ranks(wrap_and_compare_state, 2)
    assert ranks[0][0] == ranks[0][1]
    assert ranks[1][0] != ranks[0][0]
    assert all(after == ranks[0][1] for _, after in ranks)


def train_in_allocated_memory() -> None:
    allocated = []

    def allocate(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
        assert dist.get_world_size(group) == 2
        allocated.append(torch.full((numel,), float("nan"), dtype=dtype))
        return allocated[-1]

    model = DDP(build_norm_net(), 100 / MIB, allocate=allocate)
    for keep in (False, True, True):
        model.zero_grad(set_to_none=not keep)
        model(torch.randn(4, 6)).square().mean().backward()
        model.finish_gradient_synchronization()
        storages = {tensor.untyped_storage().data_ptr() for tensor in allocated}
        for parameter in model.parameters():
            assert parameter.grad.untyped_storage().data_ptr() in storages
            assert parameter.grad.isfinite().all()


def test_gradients_are_views_of_allocated_memory() -> None:
    run_on_shared_ranks(train_in_allocated_memory, 2)


def measure_peak_memory(extra: bool) -> float:
    """Return the peak of allocated memory since before wrapping, in sets of gradients."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    x = torch.randn(2, 64)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        model = DDP(module, 4 * 64 * 64 * 4 / MIB)
        for _ in range(4):
            model.zero_grad()
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            model.finish_gradient_synchronization()
            if extra:
                _ = [p.grad.clone() for p in module.parameters()]
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes)) / gradient_bytes


def measure_best_peak_memory(extra: bool) -> float:
    """Return the smallest peak of up to three runs.

    Under load, gloo's thread may still reference a bucket when the next step starts. The bucket
    then moves to new memory.
    """
    best = math.inf
    for _ in range(3):
        peaks: list = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, measure_peak_memory(extra))
        best = min(best, max(peaks))
        if best < 1.1 + extra:
            break
    return best


@pytest.mark.parametrize("extra", [False, True])
def test_memory_is_parameters_and_one_set_of_gradients(extra: bool) -> None:
    # The remainder is one gradient of 32 before it is copied in, activations and flags.
    for peak in run_on_shared_ranks(measure_best_peak_memory, 2, extra):
        assert 1 + extra <= peak < 1.1 + extra


def list_ready_orders() -> tuple[list, list]:
    class Backwards(nn.Module):
        """A module that uses its layers in another order than it declares them."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.c(self.a(x)))

    model = DDP(Backwards(), None)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        model.finish_gradient_synchronization()
    return [[b.parameters[0] for b in step.buckets] for step in model.meter.steps]


def test_buckets_follow_the_order_in_which_gradients_became_ready() -> None:
    declared, real = ["c.weight", "b.weight", "a.weight"], ["b.weight", "c.weight", "a.weight"]
    assert run_on_shared_ranks(list_ready_orders, 2) == [[declared, real, real]] * 2


def list_bucket_lengths() -> tuple:
    model = DDP(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7))))
    listed = DDP(model.module, bucket_cap_mb_list=[100 / MIB, 150 / MIB])
    for _ in range(2):
        listed(torch.ones(1, 4)).sum().backward()
    layers = [nn.utils.skip_init(nn.Linear, 1100, 1100, bias=False) for _ in range(6)]
    wide = DDP(nn.Sequential(*layers))
    wide(torch.ones(1, 1100)).sum().backward()
    return tuple(
        [len(bucket.parameters) for bucket in wrapped.meter.last.buckets]
        for wrapped in (listed, wide)
    )


def test_bucket_sizes_follow_the_list() -> None:
    # The layers of 64 bytes do not fill buckets of 100 and 150 bytes.
    # By default the first of several buckets has at most 1 MiB, or one larger matrix.
    assert run_on_shared_ranks(list_bucket_lengths, 2) == [([1, 2, 2, 2], [1, 5])] * 2


def train_with_several_forwards() -> bool:
    def compute_loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x[0]).sum() * net(x[1]).sum() + net(x[2]).square().sum()

    torch.manual_seed(1)
    module = build_norm_net().double()
    module[1].eval()
    alone = copy.deepcopy(module)
    model = DDP(module, 100 / MIB)
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        batches = torch.randn(2, 3, 2, 6, dtype=torch.float64)
        compute_loss(model, batches[dist.get_rank()]).backward()
        model.finish_gradient_synchronization()
        (sum(compute_loss(alone, x) for x in batches) / 2).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return True


def test_several_forwards_before_a_backward() -> None:
    assert run_on_shared_ranks(train_with_several_forwards, 2) == [True, True]


def wrap_again() -> list[float]:
    """Return gradients after the first of two wrappers is deleted, without and with the second."""
    module = nn.Linear(3, 3)
    first = DDP(module)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    module(x).sum().backward()
    local = module.weight.grad[0, 0].item()
    module.zero_grad()
    model = DDP(module, None)
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    return [local, module.weight.grad[0, 0].item(), model.meter.last.calls]


def test_deleted_wrapper_averages_nothing() -> None:
    assert run_on_shared_ranks(wrap_again, 2) == [[1.0, 1.5, 2], [2.0, 1.5, 2]]


def get_error(call: Callable[..., object], *args: Tensor) -> str:
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def wrap_again_and_train(older: str) -> tuple[list[str], int]:
    """Train with the newer of two wrappers; return the errors and the steps of the older one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alone = copy.deepcopy(module)
    first = DDP(module[1] if older == "last layer" else module)
    newer = DDP(module)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    newer(x).sum().backward()
    alone(torch.full((1, 3), 1.5)).sum().backward()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    errors = [get_error(first, x)]
    errors += [get_error(call) for call in (first.finish_gradient_synchronization, first.join_hook)]
    with torch.no_grad():
        assert first(x).equal(first.module(x))
    return errors, len(first.meter.steps)


@pytest.mark.parametrize("older", ["module", "last layer"])
def test_rewrapped_module_is_reduced_by_newest_wrapper(older: str) -> None:
    for errors, steps in run_on_shared_ranks(wrap_again_and_train, 2, older):
        assert all("only the newest wrapper averages" in error for error in errors)
        assert steps == 0


def step_in_backward() -> str:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DDP(module)
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("default")
def test_an_optimizer_that_steps_within_the_backward_pass_is_refused() -> None:
    for error in run_on_shared_ranks(step_in_backward, 2):
        assert "before they are averaged" in error


def train_compiled(compiler: str) -> bool:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    alone = copy.deepcopy(module)
    model = DDP(torch.compile(module, backend=compiler), 100 / MIB)
    whole = DDP(copy.deepcopy(module), 100 / MIB)
    run_whole = torch.compile(whole, backend=compiler)
    batch = torch.randn(4, 6)
    rank_batch = batch[2 * dist.get_rank() :][:2]
    for _ in range(3):
        for net in (model, whole, alone):
            net.zero_grad()
        model(rank_batch).square().mean().backward()
        run_whole(rank_batch).square().mean().backward()
        model.finish_gradient_synchronization()
        whole.finish_gradient_synchronization()
        alone(batch).square().mean().backward()
        parameters = [net.parameters() for net in (model, whole, alone)]
        for inside, outside, expected in zip(*parameters, strict=True):
            torch.testing.assert_close(inside.grad, expected.grad)
            assert inside.grad.equal(outside.grad)
    return True


def evaluate_copy_of_compiled_wrapper() -> bool:
    """Return True if a copy of a compiled wrapper has its own weights."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3), 100 / MIB)
    model.compile(backend="eager")
    batch = torch.randn(4, 6)
    expected = model(batch).detach()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.module.weight.zero_()
        return copied(batch).equal(expected)


class Block(nn.Module):
    """A block that is compiled in place, which torch 2.11 does not do with `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@dataclass
class Compiled:
    """The outcome of three backward passes of a model with compiled parts."""

    wrapper: nn.Module
    gradients: list[Tensor]
    num_graphs: int
    num_breaks: int


def train_with_compiled(part: str, module: nn.Module, wrapper: Callable, options: dict) -> Compiled:
    """Train a copy of `module` in a wrapper, compiled by block, as a module or with its wrapper.

    An empty `part` compiles nothing.
    """
    from torch._dynamo.utils import counters

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    counters.clear()
    module = copy.deepcopy(module)
    if part == "blocks":
        for block in module:
            block.compile(backend=count)
    compiled_module = torch.compile(module, backend=count) if part == "module" else module
    model = wrapper(compiled_module, **options)
    run = torch.compile(model, backend=count) if part == "wrapper" else model
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        run(x).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    breaks = sum(counters["graph_break"].values())
    return Compiled(model, gradients, len(graphs), breaks)


def compare_compiled_with_torch() -> dict[str, Any]:
    """Compare the gradients of models with compiled parts.

    Return the graphs and breaks of ours, and the breaks of torch's DDP, by compiled part. Torch's
    DDP is compiled only as a wrapper. "overlap" is the number of buckets of compiled blocks, and of
    those launched during the backward pass.
    """
    torch.manual_seed(0)
    outcomes: dict[str, Any] = {}
    module = nn.Sequential(Block(), Block())
    torch_ddp = nn.parallel.distributed.DistributedDataParallel
    # Only the breaks of a compiled wrapper are compared, so torch's DDP compiles nothing else.
    uncompiled = train_with_compiled("", module, torch_ddp, {})
    for part in ("blocks", "module", "wrapper"):
        ours = train_with_compiled(part, module, DDP, {"bucket_size_mb": 20000 / MIB})
        theirs = uncompiled
        if part == "wrapper":
            theirs = train_with_compiled(part, module, torch_ddp, {})
        for gradient, expected in zip(ours.gradients, theirs.gradients, strict=True):
            torch.testing.assert_close(gradient, expected)
        outcomes[part] = ours.num_graphs, ours.num_breaks, theirs.num_breaks
        if part == "blocks":
            step = ours.wrapper.meter.last
            hidden = sum(bucket.sent < step.waiting[0] for bucket in step.buckets)
            outcomes["overlap"] = len(step.buckets), hidden
    return outcomes


def compile_wrapper_with_buffers() -> tuple[int, int]:
    """Return the graphs and breaks of a compiled wrapper whose module changes its buffers."""
    normalized = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    outcome = train_with_compiled("wrapper", normalized, DDP, {})
    return outcome.num_graphs, outcome.num_breaks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def change_buffer_of_compiled_wrapper(wrapper: Callable) -> list[float]:
    """Return the outputs after each rank has set the buffer to another value."""
    torch.manual_seed(0)
    model = wrapper(Scaled())
    run = torch.compile(model, backend="eager")
    x = torch.ones(1, 1)
    outputs = []
    for step in range(3):
        model.module.scale.fill_(2 * step + dist.get_rank())
        output = run(x).sum()
        output.backward()
        outputs.append(output.item())
    for step in range(3, 5):
        model.module.scale.fill_(2 * step + dist.get_rank())
        with torch.no_grad():
            outputs.append(run(x).item())
    return outputs


def train_all_compiled() -> dict[str, Any]:
    return {
        "with torch": compare_compiled_with_torch(),
        "buffers": compile_wrapper_with_buffers(),
        "changed buffer": change_buffer_of_compiled_wrapper(DDP),
        "of torch": change_buffer_of_compiled_wrapper(nn.parallel.DistributedDataParallel),
        "one process": train_compiled("eager"),
        "copy": evaluate_copy_of_compiled_wrapper(),
    }


@cache
def get_outcomes_of_compiled_models() -> list[dict[str, Any]]:
    """Return the outcomes of several tests, in which each rank imports the compiler once."""
    return run_ranks(train_all_compiled, 2, timeout=300)


@pytest.mark.filterwarnings("default")
def test_compiled_blocks_modules_and_wrappers_give_the_gradients_of_torch_ddp() -> None:
    for rank in get_outcomes_of_compiled_models():
        assert rank["with torch"].keys() == {"blocks", "module", "wrapper", "overlap"}


@pytest.mark.filterwarnings("default")
def test_compiled_modules_are_one_graph_and_compiled_blocks_overlap_communication() -> None:
    for rank in get_outcomes_of_compiled_models():
        # Equal blocks may have a common graph.
        assert 1 <= rank["with torch"]["blocks"][0] <= 2
        for part in ("module", "wrapper"):
            assert rank["with torch"][part][0] == 1
        for part in ("blocks", "module", "wrapper"):
            assert rank["with torch"][part][1] == 0
        assert rank["with torch"]["wrapper"][2] >= 1
        assert rank["buffers"] == (1, 0)
        buckets, hidden = rank["with torch"]["overlap"]
        assert buckets == 4
        assert hidden >= buckets - 1


@pytest.mark.filterwarnings("default")
def test_compiled_wrapper_uses_the_buffers_that_torch_ddp_uses() -> None:
    first, second = get_outcomes_of_compiled_models()
    for rank in (first, second):
        assert rank["changed buffer"] == rank["of torch"]
    assert first["changed buffer"][:4] == second["changed buffer"][:4]
    # The last forward pass follows one without gradients.
    assert first["changed buffer"][4] != second["changed buffer"][4]


@pytest.mark.filterwarnings("default")
def test_compiled_module_and_compiled_wrapper_train_like_one_process() -> None:
    assert [rank["one process"] for rank in get_outcomes_of_compiled_models()] == [True, True]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_modules_with_compiled_backward_passes_train_like_one_process() -> None:
    assert run_ranks(train_compiled, 2, "aot_eager") == [True, True]


@pytest.mark.filterwarnings("default")
def test_copy_of_a_compiled_wrapper_does_not_call_the_original() -> None:
    assert [rank["copy"] for rank in get_outcomes_of_compiled_models()] == [True, True]


def test_importing_and_wrapping_do_not_import_the_compiler() -> None:
    program = """
import sys, tempfile, torch, torch.distributed as dist
from torch import Tensor, nn
from ddp import DDP
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
    model = DDP(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    dist.destroy_process_group()
print([name for name in ("torch._dynamo", "sympy", "matplotlib") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr

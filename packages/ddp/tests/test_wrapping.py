"""What wrapping does: weights, buffers, where gradients lie, what is imported."""

import copy
import gc
import subprocess
import sys
import weakref
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.profiler import ProfilerActivity
from worker_pool import run_ranks

MIB = 2**20


def norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def broadcasts() -> list[list]:
    torch.manual_seed(dist.get_rank())
    module = norm_net()
    module[1].running_mean += dist.get_rank()
    module[1].num_batches_tracked += dist.get_rank()
    module.register_buffer("mask", torch.rand(3) > 0.5)
    module[0].weight.data = module[0].weight.data.t().contiguous().t()
    before = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    DDP(module)
    return [before, {name: tensor.tolist() for name, tensor in module.state_dict().items()}]


def test_weights_and_buffers_are_those_of_rank_0() -> None:
    ranks = run_ranks(broadcasts, 3)
    assert ranks[0][0] == ranks[0][1]
    assert ranks[1][0] != ranks[0][0]
    assert all(after == ranks[0][1] for _, after in ranks)


def lies_in_buckets() -> None:
    allocated = []

    def allocate(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
        assert dist.get_world_size(group) == 2
        allocated.append(torch.full((numel,), float("nan"), dtype=dtype))
        return allocated[-1]

    model = DDP(norm_net(), 100 / MIB, allocate=allocate)
    for keep in (False, True, True):
        model.zero_grad(set_to_none=not keep)
        model(torch.randn(4, 6)).square().mean().backward()
        model.finish_gradient_synchronization()
        storages = {tensor.untyped_storage().data_ptr() for tensor in allocated}
        for parameter in model.parameters():
            assert parameter.grad.untyped_storage().data_ptr() in storages
            assert parameter.grad.isfinite().all()


def test_gradients_are_views_of_the_memory_that_was_passed_in() -> None:
    run_ranks(lies_in_buckets, 2)


def peak_memory(extra: bool) -> float:
    """The most that was allocated at one time since before wrapping, in sets of gradients."""
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


@pytest.mark.parametrize("extra", [False, True])
def test_memory_is_parameters_and_one_set_of_gradients(extra: bool) -> None:
    # On top of it one gradient of 32 on its way into its bucket, activations and flags.
    for sets in run_ranks(peak_memory, 2, extra):
        assert 1 + extra <= sets < 1.1 + extra


def rebuilds() -> tuple[list, list]:
    class Backwards(nn.Module):
        """Uses its layers in another order than it declares them."""

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
    assert run_ranks(rebuilds, 2) == [[declared, real, real]] * 2


def fills_a_list_of_sizes() -> tuple:
    model = DDP(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7))))
    listed = DDP(model.module, bucket_cap_mb_list=[64 / MIB, 128 / MIB])
    for _ in range(2):
        listed(torch.ones(1, 4)).sum().backward()
    assert model.bucket_bytes_cap_list == []
    wide = DDP(nn.Sequential(*(nn.Linear(1100, 1100, bias=False) for _ in range(6))))
    wide(torch.ones(1, 1100)).sum().backward()
    return listed.bucket_bytes_cap_list, *(
        [len(bucket.parameters) for bucket in one.meter.last.buckets] for one in (listed, wide)
    )


def test_of_a_list_of_sizes_each_bucket_takes_the_next() -> None:
    # By default the first of several takes 1 MiB at most: one matrix, as that is larger.
    assert run_ranks(fills_a_list_of_sizes, 2) == [([64, 128], [1, 2, 2, 2], [1, 5])] * 2


def several_forwards() -> bool:
    torch.manual_seed(1)
    module = norm_net()
    module[1].eval()
    alone = copy.deepcopy(module)
    model = DDP(module, 100 / MIB)
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        x = torch.randn(3, 2, 6)
        (model(x[0]).sum() * model(x[1]).sum() + model(x[2]).square().sum()).backward()
        model.finish_gradient_synchronization()
        (alone(x[0]).sum() * alone(x[1]).sum() + alone(x[2]).square().sum()).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return True


def test_several_forwards_before_a_backward() -> None:
    assert run_ranks(several_forwards, 2) == [True, True]


def wraps_again() -> list[int]:
    module = nn.Linear(3, 3)
    first = DDP(module)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    model = DDP(module, None)
    model(torch.ones(1, 3)).sum().backward()
    model.finish_gradient_synchronization()
    gc.collect()
    return [model.meter.last.calls, int(module.bias.grad[0])]


def test_a_dropped_wrapper_sends_nothing_more() -> None:
    assert run_ranks(wraps_again, 2) == [[2, 1], [2, 1]]


def wraps_twice() -> dict:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    part, whole = DDP(module[1]), DDP(module)
    nested = DDP(whole)
    said, x = {}, torch.full((1, 3), 1.0 + dist.get_rank())
    # Whichever is called, each mean is taken once: of ones, it is one.
    for name, model in (("part", part), ("whole", whole), ("nested", nested)):
        module.zero_grad()
        model(x).sum().backward()
        said[name] = module[1].bias.grad.tolist()
        said[f"{name} sent"] = [m.meter.last.calls if m.meter.steps else 0 for m in (part, whole)]
    # What is unfrozen is averaged, too, whichever is called.
    module[0].requires_grad_(False)
    whole(x)
    module[0].requires_grad_(True)
    module.zero_grad()
    part(x)
    whole(x).sum().backward()
    for name, other in (("smaller", DDP(module[0])), ("sum", DDP(nested, average="sum"))):
        try:
            nested(x)
        except RuntimeError as error:
            said[name] = str(error)
        del other
    module.zero_grad()
    nested(x).sum().backward()
    return said | {"again": module[1].bias.grad.tolist(), "means": module[0].bias.grad.tolist()}


def test_of_two_wrappers_the_newer_one_averages() -> None:
    first, second = run_ranks(wraps_twice, 2)
    assert first == second
    for name in ("part", "whole", "nested", "again"):
        assert first[name] == [1.0, 1.0, 1.0]
    assert first["nested sent"] == [0, 0]
    assert "were wrapped again" in first["smaller"]
    assert "another average" in first["sum"]


def steps_in_backward() -> str:
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
    assert all("before they are averaged" in said for said in run_ranks(steps_in_backward, 2))


def compiled() -> bool:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    alone = copy.deepcopy(module)
    model = DDP(torch.compile(module, backend="aot_eager"), 100 / MIB)
    whole = DDP(copy.deepcopy(module), 100 / MIB)
    run_whole = torch.compile(whole, backend="aot_eager")
    batch = torch.randn(4, 6)
    share = batch[2 * dist.get_rank() :][:2]
    for _ in range(3):
        for net in (model, whole, alone):
            net.zero_grad()
        model(share).square().mean().backward()
        run_whole(share).square().mean().backward()
        model.finish_gradient_synchronization()
        whole.finish_gradient_synchronization()
        alone(batch).square().mean().backward()
        for one, two, theirs in zip(*(m.parameters() for m in (model, whole, alone)), strict=True):
            torch.testing.assert_close(one.grad, theirs.grad)
            assert one.grad.equal(two.grad)
    return True


def compiled_by_blocks() -> tuple:
    import torch._dynamo

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.utils.counters.clear()
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)]
    together = nn.Sequential(*copy.deepcopy(blocks))
    for block in blocks:
        block.compile(backend=count)
    model, x = DDP(nn.Sequential(*blocks), 20000 / MIB), torch.randn(2, 64)
    one = DDP(torch.compile(together, backend=count), 20000 / MIB)
    for _ in range(3):
        model(x).sum().backward()
    by_blocks = len(graphs)
    graphs.clear()
    for _ in range(3):
        one(x).sum().backward()
    step = model.meter.last
    hidden = sum(bucket.sent < step.waiting[0] for bucket in step.buckets)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return by_blocks, len(graphs), breaks, len(step.buckets), hidden


@pytest.mark.filterwarnings("default")
def test_buckets_break_no_graph_and_blocks_keep_the_overlap() -> None:
    for by_blocks, whole, breaks, buckets, hidden in run_ranks(compiled_by_blocks, 2, timeout=300):
        # Blocks that are alike may share a graph.
        assert 1 <= by_blocks <= 4
        assert (whole, breaks) == (1, 0)
        assert buckets == 8
        assert hidden >= buckets - 1


@pytest.mark.filterwarnings("default")
def test_a_compiled_module_inside_and_a_compiled_wrapper() -> None:
    assert run_ranks(compiled, 2, timeout=300) == [True, True]


def test_importing_and_wrapping_do_not_import_the_compiler() -> None:
    program = """
import sys, tempfile, torch, torch.distributed as dist
from torch import nn
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

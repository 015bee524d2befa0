"""Communication hooks of torch's DDP reduce the buckets of `DDP`."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from worker_pool import run_on_shared_ranks

MIB = 2**20


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))


def do_nothing(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def train_with_hook(which: str, bucket_size_mb: float) -> list:
    group, module = dist.group.WORLD, build_net()
    twin = copy.deepcopy(module)
    model = DDP(module, bucket_size_mb)
    state, hook = {
        "all-reduce": (group, default_hooks.allreduce_hook),
        "fp16": (group, default_hooks.fp16_compress_hook),
        "bf16": (group, default_hooks.bf16_compress_hook),
        "wrapped": (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "PowerSGD": (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=16, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        "noop": (None, do_nothing),
    }[which]
    model.register_comm_hook(state, hook)
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(2, 3, 16, generator=draw)
        model.zero_grad()
        twin.zero_grad()
        if step == 3:
            with model.no_sync():
                model(x[dist.get_rank()]).square().mean().backward()
        model(x[dist.get_rank()]).square().mean().backward()
        rows = [x[dist.get_rank()]] if which == "noop" else list(x)
        loss = sum(twin(row).square().mean() for row in rows) / len(rows)
        ((1 + (step == 3)) * loss).backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            loose = {"all-reduce": 1e-6, "noop": 1e-6}.get(which, 1e-2)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=loose, atol=loose / 10)
    return [p.grad.tolist() for p in module.parameters()]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("which", "bucket_size_mb"),
    [
        ("all-reduce", 500 / MIB),
        pytest.param("all-reduce", 25.0, marks=pytest.mark.exhaustive),
        ("fp16", 500 / MIB),
        pytest.param("bf16", 25.0, marks=pytest.mark.exhaustive),
        ("wrapped", 500 / MIB),
        ("noop", 25.0),
    ],
)
def test_torch_hooks_average_gradients(which: str, bucket_size_mb: float) -> None:
    first, second = run_on_shared_ranks(train_with_hook, 2, which, bucket_size_mb)
    assert (first == second) == (which != "noop")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bucket_size_mb", [500 / MIB, 25.0])
def test_torch_powersgd_of_full_rank_averages_gradients(bucket_size_mb: float) -> None:
    # Callbacks of this hook launch collectives, and gloo runs them on its own threads. With several
    # buckets, torch's DDP hangs.
    first, second = run_on_shared_ranks(train_with_hook, 2, "PowerSGD", bucket_size_mb)
    assert first == second


def finish_first_bucket_at_last_gradient() -> bool:
    """Complete the hook of the first bucket only when the gradient of the first layer is ready."""
    last_gradient = threading.Event()
    completed = []

    def complete(future: torch.futures.Future, buffer: torch.Tensor) -> None:
        completed.append(last_gradient.wait(20))
        future.set_result(buffer)

    def wait_for_last_gradient(state, bucket):
        future = torch.futures.Future()
        if bucket.index() == 0:
            threading.Thread(target=complete, args=(future, bucket.buffer())).start()
        else:
            future.set_result(bucket.buffer())
        return future

    module = build_net()
    model = DDP(module, None)
    model.register_comm_hook(None, wait_for_last_gradient)
    module[0].weight.register_hook(lambda gradient: last_gradient.set())
    model(torch.ones(2, 16)).square().mean().backward()
    return completed == [True]


def test_backward_pass_does_not_wait_for_a_communication_hook() -> None:
    assert run_on_shared_ranks(finish_first_bucket_at_last_gradient, 1, timeout=60) == [True]


def register_invalid_hooks() -> list[str]:
    errors = []

    def annotated(state, bucket: int):
        return do_nothing(state, bucket)

    def returns(state, bucket) -> int:
        return do_nothing(state, bucket)

    for hook in (None, lambda bucket: None, annotated, returns):
        try:
            DDP(build_net()).register_comm_hook(None, hook)
        except (TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    for hook in (
        lambda state, bucket: bucket.buffer(),
        lambda state, bucket: halve_gradients(bucket),
    ):
        model = DDP(build_net())
        model.register_comm_hook(None, hook)
        try:
            model(torch.ones(1, 16)).sum().backward()
        except (TypeError, RuntimeError) as error:
            errors.append(str(error))
    model = DDP(build_net())
    model.register_comm_hook(None, do_nothing)
    for wrapped, hook in (
        (model, do_nothing),
        (DDP(build_net(), gradient_dtype=torch.bfloat16), do_nothing),
    ):
        try:
            wrapped.register_comm_hook(None, hook)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return errors


def halve_gradients(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[: bucket.buffer().numel() // 2])
    return future


def test_invalid_hooks_are_refused() -> None:
    for errors in run_on_shared_ranks(register_invalid_hooks, 2):
        none, takes, annotated, returns, tensor, short, twice, both = errors
        assert none.startswith("TypeError: Communication hook must be callable")
        assert "must take (state, bucket)" in takes
        assert annotated.startswith("ValueError")
        assert "bucket annotation" in annotated
        assert "return annotation" in returns
        assert "must return a torch.futures.Future" in tensor
        assert "like the buffer() of its bucket" in short
        assert "only be called once" in twice
        assert "pass one of them" in both


def train_sparse_with_hook(halves: bool) -> bool:
    torch.manual_seed(0)
    rank, module = dist.get_rank(), nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    twin, model = copy.deepcopy(module), DDP(module)

    def mean(group, bucket):
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / (4 if halves else 2))

    model.register_comm_hook(dist.group.WORLD, mean)
    tokens = torch.tensor([[1, 2, 2], [2, 3, 4]])
    model(tokens[rank]).square().sum().backward()
    (sum(twin(batch).square().sum() for batch in tokens) / (4 if halves else 2)).backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad.layout == theirs.grad.layout
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())
    return True


@pytest.mark.parametrize("halves", [False, True])
def test_hooks_reduce_sparse_gradients(halves: bool) -> None:
    assert run_on_shared_ranks(train_sparse_with_hook, 2, halves) == [True] * 2


def train_with_hook_that_transposes() -> list:
    module = nn.Linear(4, 3, bias=False)
    model = DDP(module)

    def hook(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().view(3, 4).t().contiguous().t())
        return future

    model.register_comm_hook(None, hook)
    model(torch.arange(4.0)).sum().backward()
    return module.weight.grad.tolist()


def test_hook_may_return_gradients_in_another_memory_order() -> None:
    gradients = run_on_shared_ranks(train_with_hook_that_transposes, 2)
    assert gradients == [[[0.0, 1.0, 2.0, 3.0]] * 3] * 2

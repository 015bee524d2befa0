"""Failures are reported on every rank, in time, with the rank and parameter that caused them."""

import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta

import ddp
import pytest
import torch
import torch.distributed as dist
from ddp import DDP, Meter, all_reduce_gradients, all_reduce_gradients_flat
from figures import assert_at_most
from torch import nn
from worker_pool import run_on_shared_ranks, run_ranks, try_ranks

TIMEOUT = 60.0  # seconds of the process group; no test waits that long
SMALL = 100 / 2**20  # MiB: one or two buckets per layer


def mark_exhaustive(*values):
    """Return test parameters that only `make test-exhaustive` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


class Branches(nn.Module):
    """A module that uses `left`, `right`, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 5)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, right: bool | None = None) -> torch.Tensor:
        used = [self.left, self.right] if right is None else [self.right if right else self.left]
        return sum(branch(self.trunk(x)) for branch in used).square().mean()


def collect_errors(function, world, *args, timeout=TIMEOUT) -> list[str]:
    """Return the error of each rank as text, or "" for a rank without an error."""
    # A rank that still runs after the timeout is killed and has no error either.
    outcomes = try_ranks(function, world, *args, timeout=timeout)
    return [str(o.error) if o.error else "" for o in outcomes]


def take_step(model: DDP, **kwargs) -> None:
    model.zero_grad()
    model(torch.ones(2, 5), **kwargs).backward()
    model.finish_gradient_synchronization()


def average_sparse_gradients() -> None:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    nn.init.ones_(module[1].weight)
    # Rank 0 uses the rows 0, 1 and 2, and rank 1 the rows 1, 2 and 3.
    module(torch.arange(3) + dist.get_rank()).sum().backward()
    with pytest.raises(TypeError, match=r"expected a dense gradient of '0.weight'.*sparse=False"):
        all_reduce_gradients_flat(module)
    meter = Meter()
    all_reduce_gradients(module, meter=meter)
    assert module[0].weight.grad.is_sparse
    assert meter.last.buckets[0].gradient_bytes == 3 * 2 * 4  # three rows of two float32
    rows = [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]
    assert module[0].weight.grad.to_dense().tolist() == rows


def test_sparse_gradients_are_averaged_per_parameter_and_refused_by_the_flat_average() -> None:
    run_on_shared_ranks(average_sparse_gradients, 2)


def average_in_any_memory_order(average) -> None:
    rank = dist.get_rank()
    module = nn.Linear(4, 3, bias=False)
    gradient = (torch.arange(12.0) * (rank + 1)).view(3, 4)
    module.weight.grad = torch.zeros(3, 8)[:, ::2] if rank else torch.zeros(4, 3).t()
    module.weight.grad.copy_(gradient)
    module.weight.requires_grad_(False)  # Gradients of frozen parameters are averaged too.
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.phase.grad = torch.full((2,), 1.0 + 2.0j).mul(rank + 1).conj()
    average(module)
    assert module.weight.grad.tolist() == (torch.arange(12.0) * 1.5).view(3, 4).tolist()
    assert module.phase.grad.tolist() == [1.5 - 3.0j] * 2


def average_of_different_layers(average) -> str:
    module = Branches()
    (module.left if dist.get_rank() == 0 else module.trunk).requires_grad_(False)
    module.right.requires_grad_(False)
    module(torch.ones(2, 5)).backward()
    with pytest.raises(RuntimeError) as error:
        average(module)
    return str(error.value)


@pytest.mark.parametrize("average", [all_reduce_gradients, all_reduce_gradients_flat])
def test_layers_that_are_frozen_on_one_rank_are_named(average) -> None:
    for error in run_on_shared_ranks(average_of_different_layers, 2, average):
        assert "'left.weight', 'left.bias' got no gradient on rank 0, but did on rank 1" in error
        assert "DDP(..., find_unused_parameters=True)" in error


@pytest.mark.parametrize("average", [all_reduce_gradients, all_reduce_gradients_flat])
def test_gradients_may_have_any_memory_order(average) -> None:
    run_on_shared_ranks(average_in_any_memory_order, 2, average)


# ----- models that differ -----


def build_layers(kind: str, *, is_different: bool) -> tuple[nn.Module, nn.Module]:
    a, b = nn.Linear(4, 3), nn.Linear(3, 4)
    if kind == "sparse":
        a = nn.Embedding(4, 3, sparse=is_different)
    elif kind == "shape" and is_different:
        b = nn.Linear(3, 5)
    elif kind == "dtype" and is_different:
        a = a.double()
    elif kind == "frozen" and is_different:
        a.weight.requires_grad_(False)
    elif kind == "strides" and is_different:
        a.weight = nn.Parameter(torch.zeros(4, 3).t())
    return a, b


def wrap_different_models(kind: str) -> None:
    rank = dist.get_rank()
    a, b = build_layers(kind, is_different=rank == 1)
    options = {}
    module = nn.Sequential(a, b)
    if kind == "order" and rank == 1:
        module = nn.ModuleDict({"1": b, "0": a})
    elif kind == "order":
        module = nn.ModuleDict({"0": a, "1": b})
    if kind == "more" and rank == 1:
        module.append(nn.Linear(4, 4))
    if kind == "buffer":
        module.register_buffer("table", torch.zeros(3 + rank))
    if kind == "bucket":
        options["bucket_size_mb"] = 1.0 + rank
    DDP(module, **options)


def wrap_all_different_models() -> dict[str, str]:
    errors = {}
    for kind in DIFFERENCES:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            wrap_different_models(kind)
        errors[kind] = str(caught.value)
    return errors


DIFFERENCES = {
    "shape": ("rank 1 has parameter '1.weight' (5, 3)", "rank 0 has parameter '1.weight' (4, 3)"),
    "dtype": ("rank 1 has parameter '0.weight' (3, 4) torch.float64", "torch.float32"),
    "frozen": ("rank 1 has parameter '0.weight' (3, 4) torch.float32 frozen",),
    "order": ("rank 1 has parameter '1.weight'", "but rank 0 has parameter '0.weight'"),
    "more": ("rank 1 has parameter '2.weight' (4, 4)", "but rank 0 has nothing"),
    "buffer": ("rank 1 has buffer 'table' (4,)", "rank 0 has buffer 'table' (3,)"),
    "sparse": ("rank 1 has parameter '0.weight' (4, 3) torch.float32 with sparse gradients",),
    "strides": ("rank 1 has parameter '0.weight' (3, 4) torch.float32 with strides (1, 3)",),
    "bucket": ("bucket_size_mb is (2.0,) on rank 1 and (1.0,) on rank 0",),
}


def test_models_that_differ_are_refused_on_every_rank() -> None:
    for errors in run_on_shared_ranks(wrap_all_different_models, 2):
        for kind, parts in DIFFERENCES.items():
            for part in parts:
                assert part in errors[kind]


# ----- gradients that differ -----


def train_with_different_branches(design: str) -> list[str]:
    right = dist.get_rank() == 1
    module = Branches()
    outcomes = []
    model = DDP(module, SMALL) if design == "ddp" else module
    functions = {"naive": all_reduce_gradients, "flat": all_reduce_gradients_flat}
    for take_right in (right, None):
        model.zero_grad()
        try:
            model(torch.ones(2, 5), right=take_right).backward()
            if not isinstance(model, DDP):
                functions[design](module)
            outcomes.append("fine")
        except RuntimeError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("design", ["ddp", "naive", mark_exhaustive("flat")])
def test_gradient_missing_on_some_ranks_names_parameter_and_rank(design: str) -> None:
    for first, second in run_on_shared_ranks(train_with_different_branches, 3, design):
        assert "'right.weight', 'right.bias' got no gradient on rank 0, but did on rank 1" in first
        # The error leaves a valid state: the next step succeeds.
        assert second == "fine"


# ----- misuse -----


def raise_inside_no_sync() -> list[str]:
    model = DDP(Branches())
    outcomes = []
    take_step(model)
    try:
        with model.no_sync():
            model(torch.ones(2, 5)).backward()
            if dist.get_rank() == 1:
                raise ValueError("bad batch")
    except ValueError as error:
        outcomes.append(str(error))
        # The first reason remains.
        with suppress(KeyError), model.no_sync():
            raise KeyError("another reason") from None
    try:
        model(torch.ones(2, 5)).backward()
        model.finish_gradient_synchronization()
        outcomes.append("fine")
    except RuntimeError as error:
        outcomes.append(str(error))
    return outcomes


def test_an_exception_inside_no_sync_reaches_every_rank() -> None:
    first, second = (o.value for o in try_ranks(raise_inside_no_sync, 2, timeout=TIMEOUT))
    reason = "rank 1: no_sync() was left by ValueError: bad batch"
    assert second[0] == "bad batch"
    assert reason in second[1]
    assert reason in first[0]


def train_the_module_instead_of_the_wrapper() -> None:
    x = torch.ones(2, 5)
    model = DDP(Branches())
    model.module.trunk.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="a parameter hook was registered after wrapping"):
        model.module(x).backward()
    module = Branches()
    module.right.requires_grad_(False)
    model = DDP(module)
    module.right.requires_grad_(True)
    with pytest.raises(RuntimeError, match="parameters changed since the last forward pass"):
        model.module(x).backward()
    model = DDP(Branches())
    with pytest.raises(RuntimeError, match=r"parameters changed inside join\(\)"):
        replace_a_layer_in_join(model, x)


def replace_a_layer_in_join(model: DDP, x: torch.Tensor) -> None:
    with model.join():
        model.module.left = nn.Linear(5, 5)
        model(x)


def test_changes_that_the_wrapper_cannot_detect_in_time_are_refused() -> None:
    run_ranks(train_the_module_instead_of_the_wrapper, 1)


# ----- lost ranks -----


def lose_rank_one(how: str, grace: float) -> None:
    rank = dist.get_rank()
    store = dist.FileStore(os.environ["STORE_FILE"] + "-notes", dist.get_world_size())
    group = dist.new_group(timeout=timedelta(seconds=2))
    attribution = ddp.consistency.failure_attribution
    attribution.GRACE_SECONDS = grace
    write = attribution.FailureAttribution._write_reason

    def write_in_order(failures, reason: str) -> None:
        # Rank 0 waits for the reason of rank 2. If the reasons were written independently, a busy
        # machine could delay one of them by more than `grace`.
        if rank == 2:
            store.wait(["0 wrote"], timedelta(seconds=60))
        write(failures, reason)
        store.set(f"{rank} wrote", "1")

    attribution.FailureAttribution._write_reason = write_in_order
    model = DDP(Branches(), SMALL, group=group)
    take_step(model)
    take_step(model)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    start = time.monotonic()
    if rank == 1:
        if how == "dies":
            os._exit(7)
        if how == "dies in backward":
            model.module.trunk.weight.register_hook(lambda _: os._exit(7))
        if how == "hangs":
            store.wait(["0 gave up", "2 gave up"], timedelta(seconds=60))
    try:
        take_step(model)
    except RuntimeError as error:
        store.set(f"{rank} gave up", "1")
        seconds = time.monotonic() - start
        # Later calls raise errors too: no rank continues alone.
        with pytest.raises(RuntimeError, match="inconsistent since an earlier failure"):
            model(torch.ones(2, 5))
        raise RuntimeError(f"{error} after {seconds:.2f} s") from None


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("dies", 2),
        mark_exhaustive("dies in backward", 3),
        ("hangs", 3),
    ],
)
def test_lost_rank_is_named_by_every_survivor(how: str, world: int, backend: str) -> None:
    errors = collect_errors(lose_rank_one, world, how, 1.5 if world > 2 else 0.5)
    for rank, message in enumerate(errors):
        if rank != 1 and backend == "collectives":
            # This backend names the lost rank itself.
            named = r"rank 1 \(process \d+\) (died|did not)|reported the loss of rank 1;"
            assert re.search(named, message)
        elif rank != 1:
            assert "no message from rank 1, which ended (for example" in message
            assert "could not finish the sum of the gradients of" in message
    if how == "hangs":
        # The hanging rank continues, and reports the loss of the other ranks.
        reported = "rank 0 gave up" if backend == "gloo" else "reported the loss of rank 1;"
        assert reported in errors[1]


@pytest.mark.timing
@pytest.mark.parametrize("how", ["dies in backward", "hangs"])
def test_survivors_give_up_two_seconds_after_the_groups_timeout(how: str) -> None:
    errors = collect_errors(lose_rank_one, 3, how, 2.0)
    for rank in (0, 2):
        seconds = float(re.search(r"after ([\d.]+) s$", errors[rank])[1])
        assert_at_most(
            f"ddp: survivors of a rank that {how} give up", 1 + 2 + 1, seconds, "s", margin=0
        )


def train_with_failing_collective(asynchronous: bool) -> str:
    class Handle:
        def wait(self) -> None:
            raise RuntimeError("ranks [7] are lost")

    def all_reduce(tensor, **_) -> Handle:
        handle = Handle()
        if not asynchronous:
            handle.wait()
        return handle

    def fail_without_message(tensor, **_) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError, match=r"could not finish .* \(RuntimeError\)"):
        take_step(DDP(Branches(), all_reduce=fail_without_message))
    with pytest.raises(RuntimeError) as error:
        take_step(DDP(Branches(), all_reduce=all_reduce))
    return str(error.value)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_error_of_the_collective_is_part_of_the_message(asynchronous: bool) -> None:
    for message in run_on_shared_ranks(train_with_failing_collective, 2, asynchronous):
        assert "could not finish the sum of the gradients of" in message
        assert "(ranks [7] are lost)" in message


def lose_rank_one_in_join() -> None:
    # The batch norm's buffers are copied from the last rank with inputs.
    group = dist.new_group(timeout=timedelta(seconds=2))
    ddp.consistency.failure_attribution.GRACE_SECONDS = 0.5
    model = DDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), group=group)
    with model.join():
        for batch in range(3):
            if batch == 1 and dist.get_rank() == 1:
                os._exit(7)
            model(torch.randn(4, 3)).sum().backward()


def test_rank_that_dies_in_join_is_named(backend: str) -> None:
    survivor = collect_errors(lose_rank_one_in_join, 2)[0]
    assert "rank 1" in survivor
    # The backend `collectives` names the lost rank in an earlier call of torch's `Join`.
    assert backend == "collectives" or "take part in join()" in survivor


def lose_the_store(port: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = DDP(Branches(), SMALL)
    take_step(model)
    if rank == 0:
        os._exit(7)
    take_step(model)


def test_dead_rank_that_hosted_the_store_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outcomes = try_ranks(lose_the_store, 3, port, timeout=TIMEOUT, backend="")
    assert outcomes[0].exit_code == 7
    for outcome in outcomes[1:]:
        assert "rank 0" in str(outcome.error)
        assert "could not finish" in str(outcome.error)

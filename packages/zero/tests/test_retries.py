"""Training that continues after a caught exception equals one process, or is refused."""

import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import run_on_shared_ranks
from zero import (
    FSDP,
    ShardedOptimizer,
    direct_all_gather,
    direct_reduce_scatter,
)
from zero.fsdp.optimizer_hooks import _StepOptions
from zero.gloo_collectives import direct_all_reduce
from zero.gradients.shard import ShardGradient, is_stepping
from zero_training import assert_alike, compute_mean_square, draw_batch, make


class Failing:
    """Collectives, one of which fails on all ranks: before it sends anything, or when it ends."""

    def __init__(self, *, in_wait):
        self.in_wait = in_wait
        self.num_calls = 0
        self.failing_call = -1

    def wrap(self, function):
        def call(*args, **options):
            self.num_calls += 1
            fails = self.num_calls == self.failing_call
            if fails and not self.in_wait:
                raise RuntimeError("the collective failed on purpose")
            work = function(*args, **options)
            return FailingWork(work) if fails and work is not None else work

        return call

    def options(self):
        return {
            "reduce_scatter_tensor": self.wrap(direct_reduce_scatter),
            "all_gather_into_tensor": self.wrap(direct_all_gather),
            "all_reduce": self.wrap(direct_all_reduce),
        }


class FailingWork:
    def __init__(self, work):
        self.work = work

    def wait(self):
        self.work.wait()
        raise RuntimeError("the collective failed on purpose")


def build(stage, collectives):
    if stage == 3:
        # The norm is replicated, and the layers stay gathered between forward and backward.
        model = FSDP(
            make(), shard=(nn.Linear,), reshard_after_forward=False, **collectives.options()
        )
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"lr": 0.1, "momentum": 0.9, "shard_gradients": stage == 2, "bucket_size_mb": 3e-4}
    model = make()
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.SGD, **options, **collectives.options()
    )


def train_step(model, optimizer, number):
    optimizer.zero_grad()
    compute_mean_square(model, draw_batch(number, dist.get_rank())).backward()
    optimizer.step()


def fail_in_each_collective(stage, in_wait):
    """Return the number of collectives whose failure was recovered from, and was refused."""
    outcomes = {"retried": 0, "refused": 0}
    twin = make()
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        theirs.zero_grad()
        for rank in range(dist.get_world_size()):
            (compute_mean_square(twin, draw_batch(number, rank)) / dist.get_world_size()).backward()
        theirs.step()
    failing_call = 0
    while True:
        failing_call += 1
        collectives = Failing(in_wait=in_wait)
        model, optimizer = build(stage, collectives)
        train_step(model, optimizer, 0)
        collectives.failing_call = collectives.num_calls + failing_call
        try:
            train_step(model, optimizer, 1)
        except RuntimeError as error:
            assert "failed on purpose" in str(error)  # noqa: PT017
        else:
            return outcomes
        try:
            train_step(model, optimizer, 1)
        except RuntimeError as error:
            assert "an earlier step" in str(error)  # noqa: PT017
            outcomes["refused"] += 1
        else:
            train_step(model, optimizer, 2)
            assert_alike(model, twin)
            outcomes["retried"] += 1


@pytest.mark.parametrize(
    ("stage", "in_wait"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.exhaustive),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
        pytest.param(2, True, marks=pytest.mark.exhaustive),
        pytest.param(3, False, marks=pytest.mark.exhaustive),
        (3, True),
    ],
)
def test_a_step_whose_collective_failed_is_retried_or_refused(stage, in_wait):
    for outcomes in run_on_shared_ranks(fail_in_each_collective, 2, stage, in_wait):
        assert outcomes["retried"] > 2
        assert (outcomes["refused"] > 0) == (stage < 3)


def raise_in_a_step(whole):
    twin = make()
    model = FSDP(make())
    options = {"lr": 0.1}
    optimizers = [
        (torch.optim.Adafactor if whole else torch.optim.AdamW)(module.parameters(), **options)
        for module in (model, twin)
    ]

    def fail(*_):
        raise ArithmeticError("on purpose")

    # torch's optimizers call this method within `step`.
    optimizers[0]._init_group = fail
    with pytest.raises(ArithmeticError):
        train_step(model, optimizers[0], 0)
    del optimizers[0]._init_group
    if whole:
        for operation in (
            lambda: model(draw_batch(0, 0)),
            optimizers[0].step,
            model.gather_full_params,
        ):
            with pytest.raises(RuntimeError, match="an earlier step of the optimizer raised"):
                operation()
        return True
    # The gradients of the step that raised are still there.
    for rank in range(2):
        (compute_mean_square(twin, draw_batch(0, rank)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1e-3))
    for optimizer in optimizers:
        optimizer.step()
    return assert_alike(model, twin)


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_raised_at_stage_3_is_skipped_or_refused(whole):
    assert all(run_on_shared_ranks(raise_in_a_step, 2, whole))


def raise_between_groups(stage):
    """Return True if another step is refused after the optimizer updated one of two groups."""
    model = make()
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    optimizer = ShardedOptimizer(groups, torch.optim.SGD, shard_gradients=stage == 2, lr=0.1)
    init_group = optimizer.inner._init_group

    def fail_in_the_second_group(group, *arguments):
        if group is optimizer.inner.param_groups[1]:
            raise ArithmeticError("on purpose")
        return init_group(group, *arguments)

    # torch's optimizers call this method for each group within `step`.
    optimizer.inner._init_group = fail_in_the_second_group
    compute_mean_square(model, draw_batch(0, dist.get_rank())).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    del optimizer.inner._init_group
    with pytest.raises(RuntimeError, match="would apply the gradients twice"):
        optimizer.step()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_whose_optimizer_raised_cannot_be_repeated(stage):
    assert all(run_on_shared_ranks(raise_between_groups, 2, stage))


def raise_in_backward(stage):
    model, optimizer = build(stage, Failing(in_wait=False))
    twin = make()
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def fail(_):
        raise ArithmeticError("on purpose")

    for layer in (3, 0):
        inner = model.module if stage == 3 else model
        handle = inner[layer].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            compute_mean_square(model, draw_batch(0, dist.get_rank())).backward()
        handle.remove()
        if stage < 3:
            with pytest.raises(
                RuntimeError, match="an exception interrupted the last backward pass"
            ):
                optimizer.step()
        # Not `optimizer.zero_grad()`, which a ShardedOptimizer could use to reset itself.
        model.zero_grad()
        compute_mean_square(model, draw_batch(1, dist.get_rank())).backward()
        optimizer.step()
        model.zero_grad()
        theirs.zero_grad()
        for rank in range(2):
            (compute_mean_square(twin, draw_batch(1, rank)) / 2).backward()
        theirs.step()
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_that_raised_can_be_followed_by_another(stage):
    assert all(run_on_shared_ranks(raise_in_backward, 2, stage))


def repeat_backward(stage):
    model, optimizer = build(stage, Failing(in_wait=False))
    twin = make()
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    fails = True

    def fail(_):
        if fails:
            raise ArithmeticError("on purpose")

    def register(module, inputs):
        if torch.is_grad_enabled():
            inputs[0].register_hook(fail)

    (model.module if stage == 3 else model)[2].register_forward_pre_hook(register)
    for number in range(2):
        fails = True
        loss = compute_mean_square(model, draw_batch(number, dist.get_rank()))
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        fails = False
        model.zero_grad()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        theirs.zero_grad()
        for rank in range(2):
            (compute_mean_square(twin, draw_batch(number, rank)) / 2).backward()
        theirs.step()
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_that_raised_can_be_repeated_without_a_forward(stage):
    assert all(run_on_shared_ranks(repeat_backward, 2, stage))


def lose_accumulated_gradients():
    """Accumulate gradients, raise in the next backward pass, and go on without clearing them."""
    model, optimizer = build(3, Failing(in_wait=False))
    with model.no_sync():
        compute_mean_square(model, draw_batch(0, dist.get_rank())).backward()
    output = model(draw_batch(1, dist.get_rank()))
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    with pytest.raises(RuntimeError, match=r"under no_sync\(\) are lost: clear all gradients"):
        compute_mean_square(model, draw_batch(1, dist.get_rank())).backward()
    optimizer.zero_grad()
    train_step(model, optimizer, 0)
    return True


def test_gradients_that_an_interrupted_backward_has_lost_are_refused():
    assert all(run_on_shared_ranks(lose_accumulated_gradients, 2))


def write_through_data_on_one_rank():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([parameter], torch.optim.SGD, lr=0.1)
    if dist.get_rank() == 1:
        parameter.data[0] = 2.0
    for _ in range(4):
        optimizer.zero_grad()
        parameter.sum().backward()
        with pytest.raises(RuntimeError, match="differs between ranks"):
            optimizer.step()
    if dist.get_rank() == 1:
        parameter.data[0] = 1.0
    optimizer.step()
    return parameter.tolist() == pytest.approx([0.9] * 3)


def test_a_refused_write_is_refused_until_it_is_undone():
    assert all(run_on_shared_ranks(write_through_data_on_one_rank, 2))


def add_groups_that_differ():
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    added = nn.Parameter(torch.ones(2))
    dtype = torch.float64 if dist.get_rank() else torch.float32
    others = {
        r"\(\(3,\), .* on rank 1 but .* on rank 0": torch.ones(2 + dist.get_rank()),
        r"float64'\) on rank 1 but \(\(2,\), 'torch.float32'\) on rank 0": torch.ones(
            2, dtype=dtype
        ),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(other)]})
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    assert len(optimizer.param_groups) == 2
    first = optimizer.param_groups[0]["params"][0]
    (first.sum() + added.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((3,), 0.9))
    torch.testing.assert_close(added.detach(), torch.full((2,), 0.5))
    return True


def test_a_refused_group_leaves_the_optimizer_unchanged():
    assert all(run_on_shared_ranks(add_groups_that_differ, 2))


def test_freed_arguments_of_an_earlier_step_do_not_end_a_later_one():
    earlier, later = _StepOptions({}), _StepOptions({})
    for options in (earlier, later):
        ShardGradient.step_options = weakref.ref(options)
    del options, earlier
    assert is_stepping()
    del later
    assert not is_stepping()

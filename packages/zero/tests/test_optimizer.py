"""Stages 1 and 2 equal the unsharded optimizer."""

import copy
import pickle
import random
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero.dtensors import iter_full_entries
from zero.optimizer import optimizer_trial
from zero.optimizer.optimizer_kinds import choose_split
from zero_training import assert_alike, build_pair, compute_mean_square, make, train

ELEMENTWISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
}
WHOLE = {"Adafactor": {"lr": 0.01}, "Muon": {"lr": 0.01}}
REFUSED = {
    "LBFGS": "treats all parameters as one vector",
    "SparseAdam": "needs sparse gradients",
}
DEADLINE = 300.0


#: The steps of a trial on ranks, one per scale of its gradients. The optimizers of these tests
#: differ from others in few steps.
SHORT_TRIAL = len(optimizer_trial.SCALES)


def prepare_rank():
    optimizer_trial.STEPS = SHORT_TRIAL


def mark_exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def test_every_optimizer_of_torch_is_sharded_or_refused_with_the_reason():
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == {*ELEMENTWISE, *WHOLE, *REFUSED}
    for names, split in ((ELEMENTWISE, "elements"), (WHOLE, "parameters")):
        for name, options in names.items():
            assert choose_split(getattr(torch.optim, name), options) == split
    for name, why in REFUSED.items():
        with pytest.raises(ValueError, match=f"{name} cannot be sharded: it {why}"):
            choose_split(getattr(torch.optim, name), {})


def make_model(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7, bias=bias),
        nn.Tanh(),
        nn.Linear(7, 3, bias=bias),
        nn.Linear(3, 3, bias=bias),
    )


def draw_batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def compute_loss(model, step, rank):
    inputs, targets = draw_batch(step, rank)
    return (model(inputs) - targets).square().mean()


@cache
def train_reference(name, world, steps, bias=True):
    """Sum all ranks' gradients in rank order, divide, and take the unsharded step."""
    model = make_model(bias)
    optimizer = getattr(torch.optim, name)(model.parameters(), **(ELEMENTWISE | WHOLE)[name])
    for step in range(steps):
        parts = []
        for rank in range(world):
            parts.append(
                torch.autograd.grad(compute_loss(model, step, rank), list(model.parameters()))
            )
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / world
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_sharded(stage, is_whole):
    """Return the parameters after two steps of each optimizer."""
    result = {}
    for name in WHOLE if is_whole else ELEMENTWISE:
        model = make_model(bias=not is_whole)
        options = (ELEMENTWISE | WHOLE)[name]
        optimizer = ShardedOptimizer(
            model.parameters(),
            getattr(torch.optim, name),
            shard_gradients=stage == 2,
            bucket_size_mb=100 / 2**20,
            **options,
        )
        for step in range(2):
            optimizer.zero_grad()
            compute_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
        result[name] = [p.detach().clone() for p in model.parameters()]
    return result


@cache
def get_trained(world, stage, is_whole):
    return run_on_shared_ranks(train_sharded, world, stage, is_whole)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [mark_exhaustive(1), mark_exhaustive(2), 3, mark_exhaustive(4)])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_is_bit_equal_to_the_reference(name, world, stage):
    expected = train_reference(name, world, 2)
    for result in get_trained(world, stage, False):
        assert all(torch.equal(a, b) for a, b in zip(result[name], expected, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [mark_exhaustive(1), mark_exhaustive(2), 3, mark_exhaustive(4)])
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_parameters_equal_the_reference(name, world, stage):
    # The owner sums in the collective's order, so results are not bit-equal above two ranks.
    expected = train_reference(name, world, 2, bias=False)
    for result in get_trained(world, stage, True):
        for a, b in zip(result[name], expected, strict=True):
            torch.testing.assert_close(a, b)


def measure_gradient_bytes():
    """Return the bytes of gradients when each becomes ready, and of all gradients."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    optimizer = ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        shard_gradients=True,
        bucket_size_mb=64 * 64 * 4 / 2**20,
    )
    sizes = []

    def measure(_):
        plain = [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]
        tensors = [*plain, *optimizer.reducer.list_tensors()]
        sizes.append(
            sum({id(s): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
        )
        freed.append(len(plain) <= 1)

    freed = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(measure)
    for _ in range(2):
        sizes.clear()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.zero_grad()
    return all(freed), max(sizes), sum(p.nbytes for p in model.parameters())


def test_stage_2_frees_each_gradient_as_it_becomes_ready():
    for freed, most, everything in run_on_shared_ranks(measure_gradient_bytes, 3):
        assert freed
        # A rank stores its third of the average, at most two buckets in flight, the bucket that
        # is being filled, and the gradient that the hook receives.
        assert most <= everything / 3 + 3 * everything / 12 * 4 / 3 + everything / 12


def count_split_elements():
    """Return the number of elements on this rank, for known and for declared classes."""
    sizes = []
    for cls, elementwise in ((torch.optim.SGD, None), (torch.optim.SGD, False), (Signs, True)):
        optimizer = ShardedOptimizer(
            make_model().parameters(), cls, lr=0.1, elementwise=elementwise
        )
        sizes.append(sum(p.numel() for g in optimizer.inner.param_groups for p in g["params"]))
    return sizes


def test_the_caller_can_choose_the_split():
    sizes = run_on_shared_ranks(count_split_elements, 2)
    assert [(known, declared) for known, _, declared in sizes] == [(39, 39)] * 2
    # 5x7 and 3 | 7x3, 3x3, 7, 3: in descending order, each to the least loaded rank.
    assert sorted(whole for _, whole, _ in sizes) == [38, 40]


def group_weights_and_biases(module):
    weights = (p for n, p in module.named_parameters() if "weight" in n)
    biases = (p for n, p in module.named_parameters() if "bias" in n)
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]


def train_unevenly(stage):
    """Train with 4, 2 and 0 batches, clipping, a schedule and accumulation."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = build_small(), build_small()
    options = {"lr": 0.1, "weight_decay": 0.1}
    ours = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, shard_gradients=stage == 2, **options
    )
    theirs = torch.optim.AdamW(twin.parameters(), **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (ours, theirs)]
    lengths = [4, 2, 0]

    def loss(module, step, micro, number):
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + number)
        return module(torch.randn(4, 5, generator=generator).double()).square().mean()

    with Join([ours]):
        for step in range(lengths[rank]):
            for micro in range(3):
                with ours.no_sync() if micro == 1 else nullcontext():
                    loss(model, step, micro, rank).backward()
            ours.clip_grad_norm_(0.1, 1.0 + step)
            if step == 0 and rank == 0:
                with pytest.raises(RuntimeError, match=r"clip with ShardedOptimizer\.clip_"):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            ours.step()
            schedules[0].step()
            ours.zero_grad()
    for step in range(max(lengths)):
        for number in range(world):
            for micro in range(3) if step < lengths[number] else ():
                (loss(twin, step, micro, number) / world).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1, 1.0 + step)
        theirs.step()
        schedules[1].step()
        theirs.zero_grad()
    assert_alike(model, twin)
    # After the context the optimizer works as before, once the schedules are equal again.
    loss(model, 9, 0, rank).backward()
    with pytest.raises(RuntimeError, match="options differ between ranks"):
        ours.step()
    for _ in range(lengths[rank], max(lengths)):
        schedules[0].step()
    ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ours.step()
    for number in range(world):
        (loss(twin, 9, 0, number) / world).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    theirs.step()
    assert_alike(model, twin)
    with pytest.raises(ValueError, match="expected divide_by_initial_world_size=True, got False"):
        Join([ours], divide_by_initial_world_size=False)
    second = ShardedOptimizer(build_small().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="expected one ShardedOptimizer per process group within"):
        Join([second])
    return True


@pytest.mark.parametrize("stage", [mark_exhaustive(1), 2])
def test_ranks_with_fewer_inputs_join_the_collectives_of_the_others(stage):
    assert all(run_on_shared_ranks(train_unevenly, 3, stage))


def copy_buffers_in_join():
    """Set a buffer before each forward pass; return the values that the forward passes used."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False).eval())
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    used = []
    with Join([ours]):
        for step in range([1, 3, 2][rank]):
            model[1].running_mean.fill_(10 * step + rank)
            model(torch.ones(3, 2)).sum().backward()
            used.append(model[1].running_mean[0].item())
            ours.step()
            ours.zero_grad()
    model[1].running_mean.fill_(rank)
    model(torch.ones(3, 2))
    return [*used, model[1].running_mean[0].item()]


def test_join_uses_the_buffers_of_the_last_rank_with_inputs():
    outcomes = run_on_shared_ranks(copy_buffers_in_join, 3)
    assert outcomes == [[2, 0], [2, 12, 21, 0], [2, 12, 0]]


def keep_gradients_in_join():
    """Train with 3 and 1 batches, without clearing the gradients before the last batch."""
    rank = dist.get_rank()
    lengths = [1, 3]
    model, twin = make_model(), make_model()
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    with Join([ours]):
        for step in range(lengths[rank]):
            compute_loss(model, step, rank).backward()
            ours.step()
            if step == 1:
                with pytest.raises(RuntimeError, match="reductions and changes of single"):
                    model[0].weight.grad.mul_(0.5)
                with pytest.raises(RuntimeError, match="reductions and changes of single"):
                    ours.zero_grad(set_to_none=False)
                ours.zero_grad()
    for step in range(3):
        for number in range(2):
            if step < lengths[number]:
                (compute_loss(twin, step, number) / 2).backward()
        theirs.step()
        if step == 1:
            theirs.zero_grad()
    compute_loss(model, 9, rank).backward()
    for number in range(2):
        (compute_loss(twin, 9, number) / 2).backward()
    ours.step()
    theirs.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    return True


def test_gradients_that_are_not_cleared_in_join_accumulate():
    assert all(run_on_shared_ranks(keep_gradients_in_join, 2))


def call_state_dict_hooks():
    """Register the hooks that torch's optimizers call for state dicts."""
    optimizer = ShardedOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["extra"] == 1
    return calls


def test_hooks_of_state_dicts_are_called():
    [calls] = run_on_shared_ranks(call_state_dict_hooks, 1)
    assert calls == ["before saving", 1, "after loading"]


class Numbers(nn.Module):
    """A parameter without dimensions and another one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.vector = nn.Parameter(torch.ones(3).double())

    def forward(self):
        return self.scale * self.vector.square().sum()


def load_state_of_a_number():
    """Load the state of optimizers that store numbers beside a parameter without dimensions."""
    path = case_folder()
    for name in ("NAdam", "ASGD"):
        for stage in (1, 3):
            model, ours, twin, theirs = build_pair(stage, name, build=Numbers)
            for step in range(3):
                for module, optimizer in ((model, ours), (twin, theirs)):
                    module().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 0:
                    ours.load_state_dict(ours.state_dict())
                elif step == 1:
                    save_checkpoint(path, model, ours)
                    load_checkpoint(path, model, ours)
            assert_alike(model, twin)
    return True


def test_the_state_of_a_parameter_without_dimensions_is_loaded():
    assert all(run_on_shared_ranks(load_state_of_a_number, 2))


class ListedState(torch.optim.SGD):
    """SGD that stores a list of momentum buffers per parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                entry = self.state[parameter].setdefault("list", [torch.zeros_like(parameter)])
                entry[0].mul_(0.9).add_(parameter.grad)
                parameter.sub_(entry[0])


def test_elementwise_state_that_cannot_be_joined_is_refused():
    with pytest.raises(ValueError, match="neither a tensor of its parameter's shape"):
        choose_split(ListedState, {}, elementwise=True, shapes=[(4, 3)])


class LastTrialSteps(torch.optim.SGD):
    """SGD that divides by the largest element of all parameters from its 49th step on."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        largest = max(parameter.grad.abs().max() for parameter in parameters)
        for parameter in parameters:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
            scale = largest if self.state[parameter]["step"] >= 49 else 1.0
            parameter.sub_(parameter.grad / scale, alpha=0.01)


def test_a_trial_has_fifty_steps():
    with pytest.raises(ValueError, match="LastTrialSteps is not element-wise"):
        choose_split(LastTrialSteps, {}, elementwise=True, shapes=[(4, 3)])
    with pytest.raises(ValueError, match="its step on one parameter depends on other parameters"):
        choose_split(LastTrialSteps, {}, shapes=[(4, 3)])


class NormalizedByKeyword(torch.optim.SGD):
    """SGD that divides by the norm of all gradients if an argument without a name says so."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, lr)
        self.is_normalized = options.get("is_normalized", False)


class StoredGradients(torch.optim.SGD):
    """SGD that adds the previous gradient, which it stores without a copy."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                previous = self.state[parameter].get("previous", torch.zeros_like(parameter))
                parameter.sub_(parameter.grad + previous, alpha=0.1)
                self.state[parameter]["previous"] = parameter.grad


def store_gradients():
    for stage in (1, 2, 3):
        train_pair(stage, StoredGradients, 3)
    return True


def test_gradients_that_an_optimizer_stores_are_copied():
    assert all(run_on_shared_ranks(store_gradients, 2))


def train_with_unnamed_arguments():
    model = FSDP(make_model())
    model(torch.ones(2, 5)).sum().backward()
    NormalizedByKeyword(model.parameters()).step()
    with pytest.raises(RuntimeError, match="its attribute is_normalized is True, but False"):
        NormalizedByKeyword(model.parameters(), is_normalized=True).step()
    return True


def test_arguments_that_a_trial_at_stage_3_does_not_know_are_refused():
    assert all(run_on_shared_ranks(train_with_unnamed_arguments, 1))


def use_groups_and_closures(stage):
    """Use groups from generators, a scheduler, a closure, clipping and an added group."""
    model, twin = make_model(), make_model()
    late = nn.Parameter(torch.ones(9, dtype=torch.float64))
    twin_late = nn.Parameter(torch.ones(9, dtype=torch.float64))

    ours = ShardedOptimizer(
        group_weights_and_biases(model),
        torch.optim.SGD,
        shard_gradients=stage == 2,
        lr=0.1,
        momentum=0.9,
    )
    theirs = torch.optim.SGD(group_weights_and_biases(twin), lr=0.1, momentum=0.9)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4) for optimizer in (ours, theirs)
    ]
    for step in range(6):
        if step == 3:
            ours.add_param_group({"params": late, "lr": 0.2})
            theirs.add_param_group({"params": twin_late, "lr": 0.2})
            for schedule in schedules:
                schedule.base_lrs.append(0.2)

        def closure(step=step):
            ours.zero_grad()
            for micro in range(2):
                with ours.no_sync() if micro == 0 else nullcontext():
                    loss = compute_loss(model, 10 * step + micro, dist.get_rank())
                    (loss + late.float().sum() * (step > 3)).backward()
            ours.clip_grad_norm_(0.05)
            return loss

        assert ours.step(closure) > 0
        theirs.zero_grad()
        for rank in range(dist.get_world_size()):
            for micro in range(2):
                loss = compute_loss(twin, 10 * step + micro, rank)
                loss = loss + twin_late.float().sum() * (step > 3)
                (loss / dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_([p for g in theirs.param_groups for p in g["params"]], 0.05)
        theirs.step()
        for schedule in schedules:
            schedule.step()
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    for a, b in zip([*model.parameters(), late], [*twin.parameters(), twin_late], strict=True):
        torch.testing.assert_close(a, b)
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_schedulers_closures_clipping_and_added_groups_work_as_in_torch(stage):
    assert all(run_on_shared_ranks(use_groups_and_closures, 2, stage))


#: Each change of the options on rank 1, with the step that is refused.
DIFFERENT_OPTIONS = [("lr", 1), ("betas", 1), ("tensor", 1), ("numpy", 1), ("constructor", 0)]


def refuse_different_options(stage):
    """Check that steps are refused if options differ on rank 1, and only then."""
    for edit in ("equal", "lr", "betas", "tensor", "numpy", "constructor"):
        model = make_model()
        rank = dist.get_rank()
        is_odd = rank == 1 and edit != "equal"
        lr = torch.tensor(0.1) if edit == "tensor" else 0.1
        lr = 0.3 if edit == "constructor" and is_odd else lr
        if stage == 3:
            model = FSDP(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        else:
            optimizer = ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, shard_gradients=True, lr=lr, foreach=False
            )
        (group,) = optimizer.param_groups
        for step in range(2):
            model(draw_batch(step, rank)[0]).square().mean().backward()
            if step == 1 and edit == "equal":
                group["lr"] = 0.05
                group["logged_loss"] = float(rank)
            if step == 1 and edit == "lr" and is_odd:
                group["lr"] = 0.05
            if step == 1 and edit == "betas" and is_odd:
                group["betas"] = (0.8, 0.9)
            if step == 1 and edit == "tensor" and is_odd:
                group["lr"].mul_(0.5)
            if step == 1 and edit == "numpy" and is_odd:
                group["lr"] = np.float32(0.05)
            if (edit, step) in DIFFERENT_OPTIONS:
                with pytest.raises(RuntimeError, match="options differ between ranks"):
                    optimizer.step()
                break
            optimizer.step()
            optimizer.zero_grad()
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_options_that_differ_between_ranks_are_refused(stage):
    assert all(run_on_shared_ranks(refuse_different_options, 2, stage))


def shard_an_empty_group():
    """Step two parameter groups, one of which has no elements."""
    used, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3))
    groups = [{"params": [empty], "lr": 0.1}, {"params": [used]}]
    for shard_gradients in (False, True):
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, shard_gradients=shard_gradients, lr=1)
        (used.sum() + empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
    return used.tolist()


def test_a_group_without_elements_is_stepped():
    assert run_on_shared_ranks(shard_an_empty_group, 2) == [[-1.0] * 3] * 2


def skip_parameters(stage):
    """Train without the last layer on rank 1, and without the middle one on all ranks."""
    model, twin = make_model(), make_model()
    # The steps of SGD depend on the scale of the gradients, unlike those of Adam.
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    ours = ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        shard_gradients=stage == 2,
        bucket_size_mb=64 / 2**20,
        **options,
    )
    theirs = torch.optim.SGD(twin.parameters(), **options)

    def loss(module, rank):
        x = module[0](draw_batch(0, rank)[0])
        return x.sum() + (module[3](x[:, :3]).sum() if rank == 0 else 0)

    for _ in range(3):
        ours.zero_grad()
        loss(model, dist.get_rank()).backward()
        ours.step()
        theirs.zero_grad()
        (sum(loss(twin, rank) for rank in range(2)) / 2).backward()
        theirs.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_unused_on_some_ranks_train_as_in_one_process(stage):
    assert all(run_on_shared_ranks(skip_parameters, 2, stage))


def use_a_part_in_the_second_backward(stage):
    """Run a second backward pass without no_sync that reaches only one parameter of a bucket."""
    model, twin = make_model(), make_model()
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=stage == 2, lr=0.1)
    compute_loss(model, 0, rank).backward()
    ((1 + rank) * model[3].bias.sum()).backward()
    for other in range(world):
        (compute_loss(twin, 0, other) / world).backward()
        ((1 + other) * twin[3].bias.sum() / world).backward()
    ours.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b - 0.1 * b.grad)
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_backwards_without_no_sync_accumulate(stage):
    assert all(run_on_shared_ranks(use_a_part_in_the_second_backward, 2, stage))


def exchange_states(name):
    """Load the unsharded optimizer's state, save it, and continue."""
    options = (ELEMENTWISE | WHOLE)[name]
    twin = make_model(bias=False)
    theirs = getattr(torch.optim, name)(twin.parameters(), **options)
    for step in range(2):
        theirs.zero_grad()
        compute_loss(twin, step, 0).backward()
        theirs.step()
    model = make_model(bias=False)
    model.load_state_dict(twin.state_dict())
    ours = ShardedOptimizer(model.parameters(), getattr(torch.optim, name), **options)
    ours.load_state_dict(theirs.state_dict())
    for module, optimizer in ((model, ours), (twin, theirs)):
        optimizer.zero_grad()
        compute_loss(module, 2, 0).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    rows = ours.state_dict()
    whole = list(iter_full_entries(rows))
    for number, values in theirs.state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(whole[number][key], value)
    del ours, optimizer
    second = ShardedOptimizer(model.parameters(), getattr(torch.optim, name), **options)
    second.load_state_dict(rows)
    for key, value in next(iter_full_entries(second.state_dict())).items():
        torch.testing.assert_close(value, whole[0][key])
    return True


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD"])
def test_state_dicts_are_exchanged_with_unsharded_optimizers(name):
    assert all(run_on_shared_ranks(exchange_states, 2, name))


class Signs(torch.optim.Optimizer):
    """An element-wise optimizer of an unknown class."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 0.1)
                parameter.sub_(self.change(state, parameter), alpha=group["lr"])

    def change(self, state, parameter):
        return state["average"].tanh()


class Rated(Signs):
    """An optimizer that reads an attribute of each parameter, which the caller changes."""

    def change(self, state, parameter):
        return super().change(state, parameter) * getattr(parameter, "rate", 1.0)


class Late(Signs):
    """An optimizer that uses whole tensors after more steps than any trial takes."""

    def change(self, state, parameter):
        scale = 1.0 if state["step"] <= optimizer_trial.STEPS else state["average"].abs().max()
        return state["average"] / (scale + 1e-9)


class Large(Signs):
    """An optimizer that uses whole tensors if the gradient is large."""

    def change(self, state, parameter):
        return state["average"] / state["average"].norm().clamp(min=10.0)


class Rows(Signs):
    """An optimizer that projects the change of each row, as AdamP does."""

    def change(self, state, parameter):
        change = super().change(state, parameter)
        if parameter.dim() > 1 and parameter.shape[1] > 1:
            rows = parameter / (parameter.norm(dim=1, keepdim=True) + 1e-9)
            change = change - rows * (rows * change).sum(1, keepdim=True)
        return change


class Adam2(torch.optim.AdamW):
    """A subclass of a known class with another step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.div_(parameter.norm() + 1)


class FailsOnce(torch.optim.AdamW):
    """A subclass whose next step raises an error if `fails` is set."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        super().step(closure)


class Prepared(Signs):
    """An optimizer that creates its state when it is constructed."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state["step"], state["average"] = 0, torch.zeros_like(parameter)


class Coupled(Signs):
    """An optimizer that scales each change by a sum over all parameters, as Prodigy does."""

    def change(self, state, parameter):
        total = sum(float(s["average"].abs().sum()) for s in self.state.values())
        return state["average"] / (1 + total)


class Estimating(Signs):
    """An optimizer that sums over all parameters and uses the sum many steps later."""

    def change(self, state, parameter):
        group = self.param_groups[0]
        group["total"] = group.get("total", 0.0) + float(state["average"].sum())
        return state["average"] if state["step"] < 1000 else group["total"] * state["average"]


class Noisy(Signs):
    """An optimizer that draws random numbers, which equal seeds make equal on all ranks."""

    def change(self, state, parameter):
        return super().change(state, parameter) + 1e-9 * torch.rand_like(parameter)


class Rounding(Signs):
    """An optimizer that draws random numbers to round, in bfloat16 only."""

    def change(self, state, parameter):
        change = super().change(state, parameter)
        return change + 1e-9 * torch.rand_like(change) if change.dtype == torch.bfloat16 else change


class Counting(Signs):
    """An optimizer with state that belongs to no parameter, as MADGRAD has."""

    def step(self, closure=None):
        super().step(closure)
        self.state["count"] = {"steps": 1}


class Twice(Signs):
    """An optimizer that evaluates its closure twice, as SAM does."""

    def step(self, closure=None):
        if closure is not None:
            closure()
            closure()
        super().step()


class Wrapping(torch.optim.Optimizer):
    """An optimizer that wraps another one and does not construct its base class."""

    def __init__(self, params, lr):
        self.wrapped = torch.optim.SGD(params, lr)
        self.param_groups, self.defaults = self.wrapped.param_groups, self.wrapped.defaults
        self._zero_grad_profile_name = "zero_grad"
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()

    def step(self, closure=None):
        self.wrapped.step()


class Bare(Wrapping):
    """A wrapper without `defaults`."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        del self.defaults


class OfModule(Signs):
    """An optimizer that is constructed from a module, as LOMO is."""

    def __init__(self, module, lr=0.1):
        super().__init__(module.parameters(), lr)


class Replacing(Signs):
    """An optimizer that replaces `.data` instead of changing it in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.data = parameter.data - group["lr"] * parameter.grad


class Copying(Signs):
    """An optimizer that stores another value under the name of its argument, as SAM does."""

    def __init__(self, params, lr=0.1, base=torch.optim.SGD, **further):
        super().__init__(params, lr)
        self.base = base(self.param_groups, lr=lr, **further)


class Forgetful(Signs):
    """An optimizer that hides an argument from its groups and attributes."""

    def __init__(self, params, lr=0.1, power=1):
        super().__init__(params, lr)
        self.change_of = lambda average: average.pow(power)

    def change(self, state, parameter):
        return self.change_of(state["average"])


class Decayed(torch.optim.SGD):
    """An optimizer that also changes parameters without a gradient, by their maxima."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] / (1 + parameter.abs().max()))


class Scheduled(torch.optim.Optimizer):
    """An optimizer that derives its learning rate from the number of steps: `lr` must be None."""

    def __init__(self, params, lr=None):
        if lr is not None:
            raise ValueError("expected lr=None")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


UNKNOWN = (Signs, Rated, Late, Large, Rows, Adam2, Replacing, Decayed)


def build_small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def train_pair(stage, cls, steps, scale=1.0, lr=0.01, **options):
    """Train at a stage and in one process; return both models and the stage's optimizer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = build_small(), build_small()
    theirs = cls(twin.parameters(), lr=lr)
    if stage == 3:
        declared = (cls,) if options.pop("elementwise", None) else ()
        model = FSDP(model, elementwise_optimizers=declared)
        ours = cls(model.parameters(), lr=lr)
    else:
        options["shard_gradients"] = stage == 2
        ours = ShardedOptimizer(model.parameters(), cls, lr=lr, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(world, 4, 5, generator=generator, dtype=torch.float64)
        for number in range(world):
            if number == rank:
                (scale * model(inputs[number]).square().mean()).backward()
            (scale * twin(inputs[number]).square().mean() / world).backward()
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.rate = step + 1.0
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = model.gather_full_params() if stage == 3 else dict(model.named_parameters())
    for name, value in twin.named_parameters():
        torch.testing.assert_close(whole[name].data, value.data, rtol=1e-9, atol=1e-9)
    return ours


def train_with_unknown_class(stage):
    for cls in UNKNOWN:
        steps = SHORT_TRIAL + 2 if cls is Late else 4
        ours = train_pair(stage, cls, steps, 1e3 if cls is Large else 1.0)
        if stage < 3:
            assert ours.splits == ["parameters"], cls
    for cls in (Signs, Replacing):
        assert train_pair(stage, cls, 3, elementwise=True)
    assert train_pair(stage, Scheduled, 4, lr=None)
    if stage == 3:
        model = FSDP(nn.Linear(4, 4, bias=False))
        optimizer = Decayed(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="has changed a parameter that has no gradient"):
            optimizer.step()
    return True


@pytest.mark.parametrize("stage", [1, mark_exhaustive(2), 3])
def test_optimizers_of_unknown_classes_get_whole_parameters_at_every_stage(stage):
    assert all(run_on_shared_ranks(train_with_unknown_class, 2, stage))


def train_with_step_within_step():
    """Step a subclass that calls the step of its base class, for which torch runs hooks again."""
    # torch wraps the step of a class when the first optimizer of the class is constructed.
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    train_pair(3, Adam2, 3)
    model = FSDP(build_small())
    optimizer = Adam2(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    model(torch.ones(2, 5).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"Adam2.step calls the step of its base class"):
        optimizer.step()
    return True


def train_after_failed_step():
    """Step again while a traceback keeps the arguments of a step that raised an error."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    model = FSDP(build_small(), elementwise_optimizers=(FailsOnce,))
    optimizer = FailsOnce(model.parameters())
    optimizer.fails = True
    model(torch.ones(2, 5).double()).sum().backward()
    with pytest.raises(ZeroDivisionError) as raised:
        optimizer.step()
    optimizer.step()
    twin = build_small()
    twin(torch.ones(2, 5).double()).sum().backward()
    torch.optim.AdamW(twin.parameters()).step()
    assert_alike(model, twin)
    del raised
    return True


def test_a_step_after_one_that_raised_equals_one_process():
    assert all(run_on_shared_ranks(train_after_failed_step, 2))


def test_a_step_that_calls_the_step_of_its_base_class_equals_one_process():
    assert all(run_on_shared_ranks(train_with_step_within_step, 2))


def train_in_bfloat16(stage, cls):
    model = nn.Linear(5, 3).bfloat16()
    if stage == 3:
        model = FSDP(model)
        optimizer = cls(model.parameters())
    else:
        optimizer = ShardedOptimizer(model.parameters(), cls, shard_gradients=stage == 2)
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizer.step()


def refuse_unknown(stage):
    """Refuse optimizers that cannot be sharded or are declared element-wise by mistake."""
    error = RuntimeError if stage == 3 else ValueError
    for cls in (Coupled, Estimating):
        with pytest.raises(error, match=f"{cls.__name__} cannot be sharded: its step on one para"):
            train_pair(stage, cls, 1)
    for name in REFUSED:
        # SparseAdam is constructed without options.
        cls = getattr(torch.optim, name)
        with pytest.raises(error, match=f"{name} cannot be sharded"):
            train_pair(stage, cls, 1)
    for cls in (Large, Rows, Adam2, Coupled, Estimating):
        retract = f"remove {cls.__name__} from" if stage == 3 else "omit elementwise=True"
        with pytest.raises(error, match=f"{cls.__name__} is not element-wise: its st.*{retract}"):
            train_pair(stage, cls, 1, 1e3, elementwise=True)
    retract = "remove Adafactor from" if stage == 3 else "omit elementwise=True"
    with pytest.raises(error, match=f"Adafactor is not element-wise: {retract}"):
        train_pair(stage, torch.optim.Adafactor, 1, elementwise=True)
    skip_trial = "replace FSDP with Sharded" if stage == 3 else "pass Sharded"
    for cls, reason in (
        (Noisy, f"it draws random numbers.*{skip_trial}"),
        (Counting, "its state 'count' does not belong"),
    ):
        with pytest.raises(error, match=f"{cls.__name__} cannot be sharded: {reason}"):
            train_pair(stage, cls, 1)
    with pytest.raises(error, match="Rounding cannot be sharded: it draws random numbers"):
        train_in_bfloat16(stage, Rounding)
    for cls in (Wrapping, Bare):
        with pytest.raises(error, match=f"{cls.__name__} cannot be sharded: it wraps another"):
            train_pair(stage, cls, 1)
    if stage == 3:
        with pytest.raises(RuntimeError, match="Prepared cannot be sharded"):
            train_pair(3, Prepared, 1)
        with pytest.raises(RuntimeError, match=r"Copying cannot be verified .* from its options"):
            train_pair(3, Copying, 1)
        model = FSDP(build_small())
        optimizer = Twice(model.parameters())

        def closure():
            loss = model(torch.ones(2, 5).double()).sum()
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match="evaluates its closure several times per step"):
            optimizer.step(closure)
        with pytest.raises(RuntimeError, match="its argument power is neither an option"):
            train_pair(3, Forgetful, 1)
    else:
        train_pair(stage, Prepared, 2)
        train_pair(stage, Forgetful, 2)
        with pytest.raises(ValueError, match="OfModule cannot be sharded: its constructor fails"):
            ShardedOptimizer(build_small().parameters(), OfModule)
        counting = ShardedOptimizer(build_small().parameters(), Counting, elementwise=False)
        counting.step()
        with pytest.raises(ValueError, match="its state 'count' does not belong to a parameter"):
            counting.state_dict()
    # A loop over the parameters without an optimizer is allowed.
    if stage == 3:
        model = FSDP(build_small())
        model(torch.ones(2, 5).double()).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_cannot_be_sharded_are_refused(stage):
    assert all(run_on_shared_ranks(refuse_unknown, 2, stage))


class Both(torch.optim.Optimizer):
    """An optimizer with a required option that selects matrices or elements per group."""

    def __init__(self, groups):
        for group in groups:
            group.setdefault("lr", 0.02 if group["use_muon"] else 0.003)
            assert set(group) == {"params", "lr", "use_muon"}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                if group["use_muon"]:
                    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.add_(left @ right, alpha=-group["lr"])
                    continue
                state = self.state[parameter]
                old = state.get("average", torch.zeros_like(parameter))
                state["average"] = 0.9 * old + parameter.grad
                parameter.add_(state["average"].sign(), alpha=-group["lr"])


class Blocks(torch.optim.Optimizer):
    """An optimizer that scales large tensors in blocks, as those with 8-bit states do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                change = parameter.grad
                if parameter.numel() >= 4096:
                    flat = nn.functional.pad(change.reshape(-1), (0, -change.numel() % 256))
                    blocks = flat.view(-1, 256)
                    blocks = blocks / blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
                    change = blocks.reshape(-1)[: parameter.numel()].view_as(parameter)
                parameter.add_(change, alpha=-group["lr"])


def build_large(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 65), nn.Tanh(), nn.Linear(65, 3)).to(dtype)


def group_by_key(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() == 2], "use_muon": True},
        {"params": [p for p in model.parameters() if p.dim() < 2], "use_muon": False},
    ]


def is_equal_to_unsharded(optimizer_cls, groups, dtype, path, **options):
    """Train four steps with a checkpoint after two, beside the unsharded optimizer."""
    model, twin = build_large(dtype), build_large(dtype)
    ours = ShardedOptimizer(groups(model), optimizer_cls, **options)
    theirs = optimizer_cls(groups(twin), **options)
    world = dist.get_world_size()
    for step in range(4):
        for rank in range(world):
            generator = torch.Generator().manual_seed(10 * step + rank)
            inputs = torch.randn(4, 70, generator=generator, dtype=torch.float64).to(dtype)
            if rank == dist.get_rank():
                model(inputs).square().mean().backward()
            (twin(inputs).square().mean() / world).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            save_checkpoint(path, model, ours)
            model = build_large(dtype)
            ours = ShardedOptimizer(groups(model), optimizer_cls, **options)
            load_checkpoint(path, model, ours)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return ours.splits


def train_unusual():
    path = case_folder()
    splits = is_equal_to_unsharded(Both, group_by_key, torch.float64, f"{path}/both")
    assert splits == ["parameters", "parameters"]
    listed = is_equal_to_unsharded(
        Blocks, lambda model: list(model.parameters()), torch.float64, f"{path}/blocks"
    )
    assert listed == ["parameters"]
    return True


def test_optimizers_with_required_options_or_blocks_equal_one_process():
    assert all(run_on_shared_ranks(train_unusual, 2))


RULES = {
    "matrices": lambda p: p.dim() >= 2,
    "filters": lambda p: p.dim() == 4,
    "wide": lambda p: p.dim() == 2 and min(p.shape) >= 128,
}


class ByShape(torch.optim.Optimizer):
    """An element-wise optimizer whose step depends on the shape of the parameter."""

    def __init__(self, params, rule, lr=0.1):
        super().__init__(params, {"lr": lr, "rule": rule})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                change = parameter.grad
                change = change.tanh() if RULES[group["rule"]](parameter) else change
                parameter.add_(change, alpha=-group["lr"])


def build_filters():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 130), nn.Tanh(), nn.Linear(130, 129)
    return nn.Sequential(*layers).double()


def train_with_rules(stage):
    rank, world = dist.get_rank(), dist.get_world_size()
    for rule in RULES:
        model, twin = build_filters(), build_filters()
        theirs = ByShape(twin.parameters(), rule)
        if stage == 3:
            model = FSDP(model, shard=(nn.Conv2d, nn.Linear))
            ours = ByShape(model.parameters(), rule)
        else:
            ours = ShardedOptimizer(
                model.parameters(), ByShape, shard_gradients=stage == 2, rule=rule
            )
            assert [p.shape for p in model.parameters()] == [p.shape for p in twin.parameters()]
        # The caller selects groups by shapes.
        assert [p.dim() for p in model.parameters()] == [4, 1, 2, 1, 2, 1]
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(world, 2, 1, 4, 4, generator=generator, dtype=torch.float64)
            for number in range(world):
                if number == rank:
                    model(inputs[number]).square().sum().backward()
                (twin(inputs[number]).square().sum() / world).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        whole = model.gather_full_params() if stage == 3 else dict(model.named_parameters())
        for name, value in twin.named_parameters():
            torch.testing.assert_close(whole[name].data, value.data, rtol=1e-9, atol=1e-9)
    return True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_depend_on_shapes_get_whole_shapes(stage):
    assert all(run_on_shared_ranks(train_with_rules, 2, stage))


def train_with_eight_bit_adam(path):
    # Compiling takes minutes, and does not change the results.
    torch.compile = lambda function, **_: function
    from torchao.optim import AdamW8bit

    return is_equal_to_unsharded(
        AdamW8bit, lambda model: list(model.parameters()), torch.float32, path, lr=0.01
    )


@pytest.mark.exhaustive
def test_torchaos_eight_bit_adam_equals_the_unsharded_one(tmp_path):
    pytest.importorskip("torchao", reason="torchao's optimizers")
    splits = run_ranks(train_with_eight_bit_adam, 2, str(tmp_path / "last"), timeout=DEADLINE)
    assert splits == [["parameters"]] * 2


def train_two_optimizers(stage, elementwise):
    for some in range(1, dist.get_world_size()):
        # Ranks have constructed different numbers of optimizers.
        group = dist.new_group(list(range(some)))
        if dist.get_rank() < some:
            ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, group=group, lr=0.1)
    return train_two(stage, elementwise)


def train_two(stage, elementwise):
    """Train with two optimizers; each rank uses their layers in a different order or skips some."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = (nn.ModuleList(make_layers()) for _ in range(2))

    def loss(module, rank, step):
        draw = random.Random(10 * step + rank)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(draw.randrange(99))).double()
        layers = list(module)
        for layer in draw.sample(layers, draw.randint(1, len(layers))):
            x = torch.tanh(layer(x))
        return x.square().mean()

    options = {
        "shard_gradients": stage == 2,
        "elementwise": elementwise,
        "bucket_size_mb": 64 / 2**20,
    }
    ours, theirs = [], []
    for number, cls in enumerate((torch.optim.SGD, torch.optim.AdamW)):
        some, others = (
            [p for layer in list(module)[number::2] for p in layer.parameters()]
            for module in (model, twin)
        )
        ours.append(ShardedOptimizer(some, cls, lr=0.1, **options))
        theirs.append(cls(others, lr=0.1))
    for step in range(4):
        for micro in (step, step + 4):
            loss(model, rank, micro).backward()
            (sum(loss(twin, other, micro) for other in range(world)) / world).backward()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    return True


def make_layers():
    torch.manual_seed(0)
    return [nn.Linear(5, 5).double() for _ in range(6)]


@pytest.mark.parametrize(
    ("stage", "elementwise"),
    [mark_exhaustive(1, True), (2, True), mark_exhaustive(1, False), mark_exhaustive(2, False)],
)
def test_two_optimizers_in_one_backward_equal_one_process(stage, elementwise):
    assert all(run_on_shared_ranks(train_two_optimizers, 3, stage, elementwise))


def delete_one():
    """Delete one of two optimizers on all ranks, and then on some ranks only."""
    models = [nn.Linear(5, 5) for _ in range(2)]
    remaining, other = (ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1) for m in models)
    assert remaining.reducer.shares_group
    x = torch.ones(2, 5)
    del other
    models[0](x).sum().backward()
    assert not remaining.reducer.shares_group
    other = ShardedOptimizer(models[1].parameters(), torch.optim.SGD, lr=0.1)
    if dist.get_rank() == 1:
        del other
    with pytest.raises(RuntimeError, match="was deleted on some ranks"):
        models[1](models[0](x)).sum().backward()
    return True


def test_one_of_two_optimizers_can_be_deleted_on_all_ranks_only():
    assert all(run_on_shared_ranks(delete_one, 2))


def clear_state(stage):
    """Clear the state of both optimizers in place, and by assignment at stage 3."""
    for clear in ("assign", "clear") if stage == 3 else ("clear",):
        model, ours, twin, theirs = build_pair(stage, build=make, lr=0.1)
        train(model, ours, twin, theirs, compute_mean_square, steps=2)
        for optimizer in (ours, theirs):
            if clear == "assign":
                optimizer.state = defaultdict(dict)
            else:
                optimizer.state.clear()
        train(model, ours, twin, theirs, compute_mean_square, steps=2)
    if stage < 3:
        ours.state = defaultdict(dict)
        with pytest.raises(RuntimeError, match=r"use state\.clear\(\) or load_state_dict"):
            ours.step()
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_a_cleared_state_is_cleared_on_all_ranks(stage):
    assert all(run_on_shared_ranks(clear_state, 2, stage))


def refuse_copies():
    optimizer = ShardedOptimizer(make().parameters(), torch.optim.AdamW)
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: construct another one"):
            act(optimizer)
    return True


def test_an_optimizer_cannot_be_copied_or_pickled():
    assert all(run_on_shared_ranks(refuse_copies, 1))


class ByAttribute(torch.optim.SGD):
    """An optimizer that steps each parameter as many times as its attribute `factor` says."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for _ in range(getattr(parameter, "factor", 1)):
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def keep_attributes(stage):
    def build():
        model = make()
        model[0].weight.factor = 3
        return model

    model, twin = build(), build()
    theirs = ByAttribute(twin.parameters(), lr=0.1)
    if stage == 3:
        model = FSDP(model)
        assert model.module[0].weight.factor == 3
        ours = ByAttribute(model.parameters(), lr=0.1)
    else:
        ours = ShardedOptimizer(model.parameters(), ByAttribute, lr=0.1)
    return train(model, ours, twin, theirs, compute_mean_square)


@pytest.mark.parametrize("stage", [1, 3])
def test_attributes_of_parameters_are_kept(stage):
    assert all(run_on_shared_ranks(keep_attributes, 2, stage))


def load_other_groups():
    model = make()
    ours = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    other = torch.optim.AdamW(list(make().parameters())[:3])
    with pytest.raises(
        ValueError, match=r"expected a state of groups of \[6\] parameters, got groups of \[3\]"
    ):
        ours.load_state_dict(other.state_dict())
    return True


def test_a_state_of_other_groups_is_refused():
    assert all(run_on_shared_ranks(load_other_groups, 1))


def change_groups():
    """Remove, add and replace parameters of an optimizer of whole matrices."""

    def build():
        torch.manual_seed(0)
        sizes = pairwise((5, 7, 6, 3, 9))
        return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).double()

    model, twin = build(), build()
    model = FSDP(model)
    matrices = [list(module.parameters()) for module in (model, twin)]
    ours, theirs = (torch.optim.Muon(members, lr=0.1) for members in matrices)
    changes = [
        lambda group, members: group.pop(),
        lambda group, members: group.append(members[3]),
        lambda group, members: group.__setitem__(slice(2), [members[1], members[0]]),
    ]
    train(model, ours, twin, theirs, compute_mean_square, steps=2)
    for change in changes:
        for optimizer, members in zip((ours, theirs), matrices, strict=True):
            change(optimizer.param_groups[0]["params"], members)
        train(model, ours, twin, theirs, compute_mean_square, steps=2)
        for module in (model, twin):
            module.zero_grad()
    return True


def test_whole_parameters_keep_their_state_when_groups_change():
    assert all(run_on_shared_ranks(change_groups, 2))


def train_two_models():
    """Step two models whose parameters have equal names and shapes with one optimizer."""
    models, twins = (nn.ModuleList([make(0), make(1)]) for _ in range(2))
    sharded = nn.ModuleList(FSDP(model) for model in models)
    ours, theirs = (torch.optim.Adafactor(both.parameters(), lr=0.1) for both in (sharded, twins))

    def loss(both, inputs):
        first, second = both
        return (first(inputs) * second(inputs).tanh()).square().sum()

    for number in range(2):
        for both, optimizer, ranks in ((sharded, ours, [dist.get_rank()]), (twins, theirs, [0, 1])):
            for rank in ranks:
                (loss(both, draw_batch(number, rank)[0].double()) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, twin in zip(sharded, twins, strict=True):
        assert_alike(model, twin)
    return True


def test_whole_parameters_of_two_models_with_equal_names_are_not_confused():
    assert all(run_on_shared_ranks(train_two_models, 2))


def move_parameters():
    """Change the groups and the state of a ShardedOptimizer in ways that would have no effect."""
    changes = [
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda groups: groups.reverse(),
        lambda groups: groups.pop(),
    ]
    for change in changes:
        model = make()
        first, *others = model.parameters()
        groups = [{"params": others}, {"params": [first], "lr": 0.5}]
        ours = ShardedOptimizer(groups, torch.optim.AdamW)
        compute_mean_square(model, draw_batch(0, 0)[0].double()).backward()
        change(ours.param_groups)
        for use in (ours.step, ours.state_dict):
            with pytest.raises(
                RuntimeError, match=r"expected group \d to keep its parameters, got"
            ):
                use()
    model = make()
    ours = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    compute_mean_square(model, draw_batch(0, 0)[0].double()).backward()
    # Reading a missing entry creates an empty one, which has no effect.
    assert not ours.state[model[0].weight]
    ours.step()
    assert not ours.state[model[0].weight]
    ours.step()
    assert len(ours.state) == len(list(model.parameters()))
    ours.state[model[0].weight] = {"average": torch.zeros(7, 5)}
    with pytest.raises(RuntimeError, match="got entries of 1 parameters"):
        ours.step()
    # SGD without momentum has no state.
    model = make()
    ours = ShardedOptimizer(model.parameters(), torch.optim.SGD)
    compute_mean_square(model, draw_batch(0, 0)[0].double()).backward()
    ours.step()
    ours.state[model[0].weight]["average"] = torch.zeros(7, 5)
    with pytest.raises(RuntimeError, match="got entries of 1 parameters"):
        ours.step()
    return True


def test_groups_and_states_that_would_be_ignored_are_refused():
    assert all(run_on_shared_ranks(move_parameters, 1))

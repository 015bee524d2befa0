"""Optimizers of shards: state dicts with torch's tools, whole matrices."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDP, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero.optimizer import optimizer_trial
from zero_training import assert_alike, build_pair, compute_mean_square, draw_batch, make, train


def prepare_rank():
    # The optimizers of these tests do not change after a few steps.
    optimizer_trial.STEPS = len(optimizer_trial.SCALES)


FULL = StateDictOptions(full_state_dict=True)
KINDS = {
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "Muon": {},
    "Adafactor": {},
}
# The optimizers in `make test`; the others are exhaustive.
SAMPLED = ("AdamW",)


def build_matrices(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)
    return nn.Sequential(*layers).double()


def train_both(stage, name, steps=2, **options):
    build = build_matrices if name == "Muon" else make
    both = build_pair(stage, name, build=build, **KINDS[name], **options)
    train(*both, compute_mean_square, steps=steps)
    return both


def get_inner_module(model, stage):
    """Return the module under whose names torch's tools save the model."""
    return model.module if stage == 3 else model


def assert_same_state(ours, theirs):
    """Compare nested dictionaries of whole tensors and other values."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same_state(ours[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-12)
        else:
            assert ours[key] == value


def reload_state(twin, theirs):
    """Reload the state in one process: loading casts state of another dtype."""
    fresh = copy.deepcopy(twin)
    optimizer = type(theirs)(fresh.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return fresh, optimizer


def load_by_torch(folder, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def use_tools_of_torch(stage, name):
    folder = case_folder()
    model, ours, twin, theirs = train_both(stage, name)
    part = get_inner_module(model, stage)
    expected = get_optimizer_state_dict(twin, theirs)
    sharded = get_optimizer_state_dict(part, ours)
    some = next(iter(sharded["state"].values()))
    assert name == "Adafactor" or any(isinstance(value, DTensor) for value in some.values())
    whole = get_optimizer_state_dict(part, ours, options=FULL)
    assert_same_state(whole["state"], expected["state"])
    groups = zip(whole["param_groups"], expected["param_groups"], strict=True)
    assert all(a["params"] == b["params"] and a["lr"] == b["lr"] for a, b in groups)

    # Saved and loaded by torch into another model and optimizer; then a step.
    weights, state = get_state_dict(part, ours)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch")
    for method in ("dcp", "ours", "rank 0", "plain"):
        other, optimizer, _, _ = build_pair(
            stage, name, build=build_matrices if name == "Muon" else make, **KINDS[name]
        )
        load_into = get_inner_module(other, stage)
        if method == "dcp":
            load_by_torch(f"{folder}/torch", load_into, optimizer)
        elif method == "ours":
            load_checkpoint(f"{folder}/torch", other, optimizer)
        else:
            state = copy.deepcopy(whole) if dist.get_rank() == 0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            if method == "plain":
                optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
            else:
                set_optimizer_state_dict(load_into, optimizer, state, options=options)
            load_into.load_state_dict(twin.state_dict())
        fresh = reload_state(twin, theirs)
        train(other, optimizer, *fresh, compute_mean_square, steps=1)

    # A checkpoint of this package, loaded by torch.
    save_checkpoint(f"{folder}/zero", model, ours)
    other, optimizer, _, _ = train_both(stage, name, steps=1)
    load_by_torch(f"{folder}/zero", get_inner_module(other, stage), optimizer)
    train(other, optimizer, *reload_state(twin, theirs), compute_mean_square, steps=1)
    return True


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLED else pytest.param(n, marks=pytest.mark.exhaustive) for n in KINDS],
)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_torchs_tools_get_save_and_set_whole_optimizer_states(stage, name):
    assert all(run_on_shared_ranks(use_tools_of_torch, 2, stage, name))


def train_whole_matrices(name):
    folder = case_folder()
    world = dist.get_world_size()
    model, ours, twin, theirs = train_both(3, name)
    # With closures, clipping by norm, and a layer that is frozen for some steps.
    for number in range(3):
        model.module[0].weight.requires_grad_(number != 1)
        twin[0].weight.requires_grad_(number != 1)

        def closure(number=number):
            ours.zero_grad()
            compute_mean_square(model, draw_batch(number, dist.get_rank())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        ours.step(closure)
        theirs.zero_grad()
        for rank in range(world):
            (compute_mean_square(twin, draw_batch(number, rank)) / world).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        theirs.step()
    ours.zero_grad()
    theirs.zero_grad()
    assert_alike(model, twin)
    # Each parameter's state is on one rank.
    mine = sum(v.numel() for s in ours.state.values() for v in s.values() if v.dim())
    whole = sum(v.numel() for s in theirs.state.values() for v in s.values() if v.dim())
    counts = torch.tensor([mine])
    dist.all_reduce(counts)
    assert name != "Muon" or counts.item() == whole
    save_checkpoint(folder, model, ours)
    for stage in (1, 3):
        resumed, optimizer, _, _ = build_pair(
            stage, name, build=build_matrices if name == "Muon" else make, **KINDS[name]
        )
        load_checkpoint(folder, resumed, optimizer)
        train(resumed, optimizer, *reload_state(twin, theirs), compute_mean_square)
    return True


@pytest.mark.parametrize("name", ["Muon", pytest.param("Adafactor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "world", [2, *[pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 4)]]
)
def test_optimizers_of_whole_matrices_equal_one_process_at_stage_3(name, world):
    assert all(run_on_shared_ranks(train_whole_matrices, world, name))


CREATED_IN_THE_CONSTRUCTOR = [
    cls.__name__
    for cls in vars(torch.optim).values()
    if isinstance(cls, type)
    and cls is not torch.optim.Optimizer
    and cls([nn.Parameter(torch.ones(2, 2))], lr=0.1).state
]


def assert_sharded_state(optimizer):
    """Assert that state is stored as plain tensors, and that state dicts contain DTensors."""
    state_dict = optimizer.state_dict()
    assert isinstance(state_dict["state"][0]["sum"], DTensor)
    assert {type(v) for state in optimizer.state.values() for v in state.values()} == {torch.Tensor}
    assert_same_state(pickle.loads(pickle.dumps(copy.deepcopy(state_dict))), state_dict)
    # A user may add state between steps.
    for parameter, state in optimizer.state.items():
        state["sum"] = torch.full_like(parameter, 0.5)
    assert_same_state(optimizer.state_dict(), state_dict)


def use_state_from_the_constructor(name):
    folder = case_folder()
    model, ours, twin, theirs = build_pair(3, name, initial_accumulator_value=0.5)
    assert_sharded_state(ours)
    # torch's function is the first that reads the state.
    model, ours, *_ = build_pair(3, name, initial_accumulator_value=0.5)
    whole = get_optimizer_state_dict(model.module, ours, options=FULL)
    assert_same_state(whole["state"], get_optimizer_state_dict(twin, theirs)["state"])
    weights, state = get_state_dict(model.module, ours)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    for method in ("dcp", "sharded", "whole"):
        other, optimizer, *_ = build_pair(3, name)
        if method == "dcp":
            load_by_torch(folder, other.module, optimizer)
        else:
            optimizer.load_state_dict((ours if method == "sharded" else theirs).state_dict())
        train(other, optimizer, *reload_state(twin, theirs), compute_mean_square, steps=1)
    return True


@pytest.mark.parametrize("name", CREATED_IN_THE_CONSTRUCTOR)
def test_state_from_the_constructor_is_sharded_state(name):
    assert all(run_on_shared_ranks(use_state_from_the_constructor, 2, name))


class Moments(torch.optim.Optimizer):
    """An element-wise optimizer with state under names of NAdam's and ASGD's numbers."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for key in ("mu", "eta"):
                    state.setdefault(key, torch.zeros_like(parameter))
                state["mu"].lerp_(parameter.grad, 0.1)
                state["eta"].add_(state["mu"].abs())
                parameter.addcdiv_(state["mu"], state["eta"] + 1.0, value=-group["lr"])


def shard_moments(model, stage):
    if stage == 3:
        model = FSDP(model, elementwise_optimizers=(Moments,))
        return model, Moments(model.parameters())
    return model, ShardedOptimizer(model.parameters(), Moments, elementwise=True)


def resume_moments(stage):
    folder = case_folder()
    twin = make()
    theirs = Moments(twin.parameters())
    model, ours = shard_moments(make(), stage)
    train(model, ours, twin, theirs, compute_mean_square)
    save_checkpoint(folder, model, ours)
    for method in ("checkpoint", "state dict"):
        other, optimizer = shard_moments(make(), stage)
        if method == "checkpoint":
            load_checkpoint(folder, other, optimizer)
        else:
            other.load_state_dict(model.state_dict())
            optimizer.load_state_dict(ours.state_dict())
        fresh = copy.deepcopy(twin)
        reference = Moments(fresh.parameters())
        reference.load_state_dict(copy.deepcopy(theirs.state_dict()))
        train(other, optimizer, fresh, reference, compute_mean_square)
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_state_of_every_element_is_sharded_whatever_its_name(stage):
    assert all(run_on_shared_ranks(resume_moments, 2, stage))


class Scaled(torch.optim.SGD):
    """An optimizer whose step has a further positional argument."""

    def step(self, closure=None, scale=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return super().step()


def pass_scale_by_position():
    model, _, twin, _ = build_pair()
    for module in (model, twin):
        optimizer = Scaled(module.parameters(), lr=0.1)

        def closure(module=module):
            loss = compute_mean_square(module, draw_batch(0, 0))
            loss.backward()
            return loss

        if module is twin:
            closure()
        optimizer.step(closure if module is model else None, 0.25)
        # An optimizer without state has none on any rank.
        assert not optimizer.state_dict()["state"]
    return assert_alike(model, twin)


def test_every_positional_argument_of_a_step_is_passed_at_stage_3():
    assert all(run_on_shared_ranks(pass_scale_by_position, 2))


def load_a_learning_rate_in_a_tensor():
    optimizers = [
        ShardedOptimizer(make().parameters(), torch.optim.SGD, lr=torch.tensor(lr))
        for lr in (0.1, 0.5)
    ]
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[0].param_groups[0]["lr"].fill_(9)
    return optimizers[1].param_groups[0]["lr"].item()


def test_a_loaded_option_is_not_shared_with_the_optimizer_that_had_it():
    assert run_on_shared_ranks(load_a_learning_rate_in_a_tensor, 1) == [pytest.approx(0.1)]

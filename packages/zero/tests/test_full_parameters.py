"""FSDP with torch's tools and FSDP2's options, and full parameters outside of training steps."""

import gc
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint
from worker_pool import run_ranks, try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from torch.distributed.fsdp import MixedPrecisionPolicy
from worker_pool import run_on_shared_ranks
from zero import FSDP, fully_shard, load_checkpoint
from zero.fsdp.unit import UnitState
from zero_training import assert_alike, build_pair, compute_mean_square, draw_batch, make, train

DEADLINE = 300.0


def are_same(ours, theirs):
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def use_state_dicts_of_torch(folder):
    expected = make().state_dict()
    full = StateDictOptions(full_state_dict=True)
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    not_strict = StateDictOptions(full_state_dict=True, strict=False)
    for wrapped, prefix in ((True, "module."), (False, "")):

        def part(model, wrapped=wrapped):
            return model if wrapped else model.module

        def check(model):
            assert are_same(model.gather_full_params(), expected)

        model = FSDP(make())
        sharded = get_model_state_dict(part(model))
        assert isinstance(sharded[f"{prefix}0.weight"], DTensor)
        whole = get_model_state_dict(part(model), options=full)
        assert {k.removeprefix(prefix) for k in whole} == expected.keys()
        assert are_same({k.removeprefix(prefix): v for k, v in whole.items()}, expected)
        dcp.save({"model": sharded}, checkpoint_id=f"{folder}/{wrapped}")
        other = FSDP(make(1))
        state = get_model_state_dict(part(other))
        dcp.load({"model": state}, checkpoint_id=f"{folder}/{wrapped}")
        set_model_state_dict(part(other), state)
        check(other)
        other = FSDP(make(2))
        set_model_state_dict(part(other), whole, options=full)
        check(other)
        other = FSDP(make(3))
        state = whole if dist.get_rank() == 0 else {}
        set_model_state_dict(part(other), state, options=everywhere)
        check(other)
        partial = {k: torch.zeros_like(v) for k, v in whole.items() if k.endswith("0.bias")}
        zeros = {k.removeprefix(prefix): v for k, v in partial.items()}
        set_model_state_dict(part(other), partial, options=not_strict)
        assert are_same(other.gather_full_params(), {**expected, **zeros})
    unsharded = fully_shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    unsharded.unshard()
    set_model_state_dict(unsharded, dict(zeros), options=not_strict)  # it adds entries
    # The weights that were not loaded are not rounded to bfloat16.
    assert are_same(get_model_state_dict(unsharded, options=full), {**expected, **zeros})
    plain = make(4)
    load_checkpoint(f"{folder}/False", plain)
    assert are_same(plain.state_dict(), expected)
    with pytest.raises(RuntimeError, match=r"mismatch for 0\.weight: expected .* got \(3, 3\)"):
        other.module.load_state_dict({**expected, "0.weight": torch.zeros(3, 3)})
    return True


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_torchs_tools_get_save_and_set_whole_tensors(tmp_path, world):
    assert all(
        run_on_shared_ranks(use_state_dicts_of_torch, world, str(tmp_path), timeout=DEADLINE)
    )


def keep_dimensions():
    model, twin = FSDP(make()), make()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.dim() == theirs.dim()
        # A norm is over all ranks, so the number of elements must be too.
        assert ours.numel() == ours.nelement() == theirs.numel()
        assert torch.zeros_like(ours).numel() == theirs.numel()
    embedding = FSDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(TypeError, match=r"got a gradient with layout .* of shape \(4, 2\)"):
        embedding(torch.tensor([1])).sum().backward()
    return True


def test_shards_keep_dimensions_and_sparse_gradients_are_refused():
    assert all(run_on_shared_ranks(keep_dimensions, 2))


def change_between_state_dicts():
    """Make several state dicts of one unit without a forward pass in between."""
    model, twin = FSDP(make(), shard=lambda name, module: not name), make()
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, twin))
    for module in (model, twin):
        compute_mean_square(module, draw_batch(0, 0)).backward()
    loaded = make(1).state_dict()

    def load_twice_the_values(module):
        values = module.gather_full_params() if module is model else module.state_dict()
        inner = module.module if module is model else module
        inner.load_state_dict({name: 2 * value for name, value in values.items()})

    changes = {
        "nothing": lambda module: None,
        "a step": lambda module: (ours if module is model else theirs).step(),
        "a load": lambda module: getattr(module, "module", module).load_state_dict(loaded),
        "values of gather_full_params": load_twice_the_values,
        "data": lambda module: [p.data.mul_(2) for p in module.parameters()],
    }
    for change in changes.values():
        for module in (model, twin):
            change(module)
        state = {name: value.full_tensor() for name, value in model.module.state_dict().items()}
        for values in (state, model.gather_full_params()):
            assert values.keys() == twin.state_dict().keys()
            for name, value in twin.state_dict().items():
                torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12)
    return True


def test_state_dicts_have_the_values_of_their_time():
    assert all(run_on_shared_ranks(change_between_state_dicts, 2))


def load_by_assignment():
    model, ours, twin, theirs = build_pair(lr=0.1)
    state = make(1).state_dict()
    model.module.load_state_dict(state, assign=True)
    # torch's load has stored `assign` in the metadata of `state`.
    twin.load_state_dict(make(1).state_dict())
    assert_alike(model, twin)
    return train(model, ours, twin, theirs, compute_mean_square)


def test_a_state_dict_that_is_loaded_with_assign_is_trained():
    assert all(run_on_shared_ranks(load_by_assignment, 2))


def shard_over_a_mesh():
    world = dist.get_world_size()
    both = build_pair(3, group=init_device_mesh("cpu", (world,)))
    with pytest.raises(ValueError, match=r"expected a one-dimensional device mesh, got 2"):
        FSDP(make(), group=init_device_mesh("cpu", (1, world)))
    return train(*both, compute_mean_square)


def test_a_mesh_of_one_dimension_is_a_group():
    assert all(run_on_shared_ranks(shard_over_a_mesh, 2))


def gather_with_options():
    gathered = {}
    for name, chosen in {
        "usual": {},
        "kept": {"reshard_after_forward": False},
        "far": {"prefetch": 3},
        "none": {"prefetch": 0},
    }.items():
        model, ours, twin, theirs = build_pair(**chosen)
        train(model, ours, twin, theirs, compute_mean_square)
        model.communicator.pop_bytes()
        compute_mean_square(model, draw_batch(0, 0)).backward()
        gathered[name] = model.communicator.pop_bytes()["all_gather"]
        assert all(unit.unsharded_bytes == 0 for unit in model.units)
    return gathered


def test_reshard_after_forward_and_prefetch_do_not_change_results():
    for gathered in run_on_shared_ranks(gather_with_options, 2):
        assert gathered["far"] == gathered["none"] == gathered["usual"]
        assert gathered["kept"] < gathered["usual"]


def ignore_parameters(is_ignored_by_inner_call):
    model = make()
    model[0].weight.data.add_(dist.get_rank())
    apart = model[0].weight
    if is_ignored_by_inner_call:
        fully_shard(model[0], ignored_params={apart})
        fully_shard(model)
    else:
        model = FSDP(model, ignored_params={apart})
    compute_mean_square(model, draw_batch(0, dist.get_rank())).backward()
    # The values stay different on each rank and are not averaged; clipping includes them.
    before = apart.grad.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.allclose(apart.grad, before * 1e-3 / norm.item(), rtol=1e-4)
    return apart.data.sum().item(), before.sum().item()


@pytest.mark.parametrize("is_ignored_by_inner_call", [False, True])
def test_ignored_parameters_are_not_synchronized(is_ignored_by_inner_call):
    (a, b), (c, d) = run_on_shared_ranks(ignore_parameters, 2, is_ignored_by_inner_call)
    assert c - a == pytest.approx(35)
    assert b != d


class FailingWork:
    def __init__(self, work):
        self.work = work

    def wait(self):
        self.work.wait()
        raise RuntimeError("the connection was lost")


def change_states():
    """Follow Note [Lifetime of a unit], and gather again after an all-gather that failed."""
    model = FSDP(make())
    unit = model.units[0]
    assert unit.state is UnitState.SHARDED
    for _ in range(2):
        unit.unshard()
        assert unit.state is UnitState.UNSHARDING
    unit.wait_for_unshard()
    assert unit.state is UnitState.UNSHARDED
    with torch.no_grad():
        unit.shard.mul_(2.0)
    unit.unshard()
    assert unit.state is UnitState.UNSHARDING
    unit._unshard_work = FailingWork(unit._unshard_work)
    with pytest.raises(RuntimeError, match="the connection was lost"):
        unit.wait_for_unshard()
    assert unit.state is UnitState.SHARDED
    unit.full.zero_()
    unit.wait_for_unshard()
    expected = 2 * make()[0].weight
    torch.testing.assert_close(unit.parameters[0].full.data, expected.data)
    unit.reshard()
    assert unit.state is UnitState.SHARDED
    return unit.unsharded_bytes


def test_a_unit_changes_its_state_as_documented_and_gathers_again_after_a_failure():
    assert run_on_shared_ranks(change_states, 2) == [0, 0]


def refuse_operations_on_shards():
    model = FSDP(nn.Linear(4, 4, bias=False))
    (parameter,) = model.parameters()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="needs elements of a gradient or parameter"):
            parameter[(parameter * 0).long()] = 1.0
        with pytest.raises(RuntimeError, match="needs elements of a gradient or parameter"):
            parameter.norm("nuc")
    # The average of the ranks' gradients has no derivative.
    parameter.full_tensor().pow(3).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        parameter.grad.sum().backward()
    return True


@pytest.mark.filterwarnings("ignore:Using backward")
def test_indices_matrix_norms_and_second_derivatives_of_shards_are_refused():
    assert all(run_on_shared_ranks(refuse_operations_on_shards, 2))


def compute_penalty(model, inputs):
    """Return a gradient penalty, which needs a backward pass through a backward pass."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return slope.square().sum() + outputs.square().mean()


def differentiate_beside_backward():
    with pytest.raises(RuntimeError, match="gradients of gradients cannot be sharded at stage 3"):
        compute_penalty(build_pair()[0], draw_batch(0, 0))
    transformed = build_pair()[0]
    with pytest.raises(RuntimeError, match=r"torch\.func .* got TransformType.Grad: use torch"):
        torch.func.grad(lambda inputs: transformed(inputs).sum())(draw_batch(0, 0))
    with pytest.raises(RuntimeError, match=r"torch\.func .* got TransformType.Grad: use torch"):
        torch.func.grad(lambda inputs: torch.vmap(transformed)(inputs).sum())(draw_batch(0, 0))
    # torch.autograd.grad between two backward passes of a step must not reduce gradients.
    model, ours, twin, theirs = build_pair()
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(2):
        with model.no_sync():
            compute_mean_square(model, draw_batch(number, rank)).backward()
        inputs = draw_batch(5, rank).requires_grad_()
        loss = compute_mean_square(model, inputs)
        model.communicator.pop_bytes()
        (slope,) = torch.autograd.grad(loss, inputs)
        assert model.communicator.pop_bytes().keys() <= {"all_gather"}
        leaf = inputs.detach().requires_grad_()
        (expected,) = torch.autograd.grad(compute_mean_square(twin, leaf), leaf)
        torch.testing.assert_close(slope, expected)
        compute_mean_square(model, draw_batch(number + 7, rank)).backward()
        for other in range(world):
            for part in (number, number + 7):
                (compute_mean_square(twin, draw_batch(part, other)) / world).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return assert_alike(model, twin)


def test_gradients_of_inputs_are_as_in_one_process_and_of_gradients_are_refused():
    assert all(run_on_shared_ranks(differentiate_beside_backward, 2))


def call_inner_modules():
    """Call the wrapped module or its children directly, so that `FSDP.forward` never runs."""
    for call in (
        lambda model, x: getattr(model, "module", model)(x).square().mean(),
        lambda model, x: run_by_hand(getattr(model, "module", model), x).square().mean(),
    ):
        model, ours, twin, theirs = build_pair()
        train(model, ours, twin, theirs, call, steps=4)
        assert len(model._forward_order) <= len(model.units)
    return True


def run_by_hand(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def test_the_wrapped_module_and_its_children_can_be_called():
    assert all(run_on_shared_ranks(call_inner_modules, 2))


def run_different_layers():
    model = FSDP(nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 9)]))
    dist.barrier()
    # Only the collective that must fail has a short timeout.
    model.communicator.group = dist.new_group(timeout=timedelta(seconds=3))
    model.module[2 * dist.get_rank()](torch.ones(1, 5))


def test_ranks_that_run_different_layers_are_reported():
    for outcome in try_ranks(run_different_layers, 2, timeout=DEADLINE):
        message = str(outcome.error)
        assert "rank 0: all_gather of 120 bytes of 0.weight and 1 more" in message
        assert "rank 1: all_gather of 216 bytes of 2.weight and 1 more" in message
        assert "run the same layers in the same order on every rank" in message


def measure_memory(steps, stage):
    """Return the resident bytes after each quarter of the steps."""
    model, ours, _, _ = build_pair(stage)
    seen = []
    for number in range(steps):
        compute_mean_square(model, draw_batch(0, 0)).backward()
        ours.step()
        ours.zero_grad()
        if (number + 1) % (steps // 4) == 0:
            with open("/proc/self/statm") as file:
                seen.append(int(file.read().split()[1]) * 4096)
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_host_memory_is_constant_over_steps(stage):
    # A list that grew by one object per step would take 64 bytes per step in every quarter. A
    # single late allocation appears in one quarter only. The allocator's own memory grows in the
    # first thousand steps.
    for seen in run_ranks(measure_memory, 2, 10_000, stage, timeout=1500):
        assert min(after - before for before, after in pairwise(seen)) < 1 << 16


def measure_object_sizes(steps, stage):
    """Return rank 0's bytes of all Python objects after 2 steps, half of the steps, and all."""
    model, ours, _, _ = build_pair(stage)
    sizes = []
    for number in range(steps):
        compute_mean_square(model, draw_batch(0, 0)).backward()
        if number % 5:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        ours.step()
        ours.zero_grad()
        # A measurement copies the pages of all imports, which takes a second.
        if dist.get_rank() == 0 and number + 1 in (2, steps // 2, steps):
            gc.collect()
            gc.unfreeze()
            sizes.append(sum(sys.getsizeof(obj) for obj in gc.get_objects() if obj is not sizes))
            # The next collection must not visit the objects of all imports, which takes seconds.
            gc.freeze()
    return sizes


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_no_python_object_grows_over_steps(stage):
    # A list reserves room for an eighth of its entries, so 20 steps show growth by one per step.
    sizes, _ = run_ranks(measure_object_sizes, 2, 40, stage, timeout=DEADLINE)
    # The first measurement changes the sizes of caches.
    assert sizes[2] <= sizes[1], sizes


class Viewed(nn.Module):
    """A layer whose output is a view, which its caller changes in place."""

    def __init__(self, view):
        super().__init__()
        self.view = view
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.view(self.layer(torch.tanh(self.layer(x))))


def change_in_place():
    views = [lambda y: y.view(5, 4), lambda y: y[:, :4], lambda y: y.t(), lambda y: y]
    changes = [lambda y: y.add_(1.5), lambda y: y.mul_(y.detach() + 2), torch.relu_, torch.tanh_]
    for view, change in zip(views, changes, strict=True):

        def build(view=view):
            torch.manual_seed(0)
            return Viewed(view).double()

        def loss(model, inputs, change=change):
            return change(model(inputs)).square().mean()

        for shard in ((Viewed,), (nn.Linear,)):
            train(*build_pair(build=build, shard=shard), loss, steps=2)
    return True


def test_outputs_that_are_views_can_be_changed_in_place():
    assert all(run_on_shared_ranks(change_in_place, 2))


@dataclass
class Output:
    """An output of a user's class with tensors in attributes and containers."""

    hidden: torch.Tensor
    more: dict = field(default_factory=dict)


class Named(NamedTuple):
    hidden: torch.Tensor
    more: object


class Wrapping(nn.Linear):
    """A sharded layer whose output is an object of a user's class."""

    def __init__(self, kind):
        super().__init__(5, 5)
        self.kind = kind

    def forward(self, x):
        y = torch.tanh(super().forward(x))
        if self.kind == "dataclass":
            output = Output(y)
        elif self.kind == "weight":
            output = Output(y, {"weight": self.weight})
        elif self.kind == "nested":
            output = Output(None, {"deep": [Output(None, {"x": Named(None, Output(y))})]})
        else:
            output = Named(y, None)
        return output


class UsesObjects(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([Wrapping(kind) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            output = layer(x)
            if layer.kind == "nested":
                output = output.more["deep"][0].more["x"].more
            x = x + output.hidden
            if layer.kind == "weight":
                x = x + output.more["weight"].square().sum()
        return Output(x)


def return_objects():
    for kind in ("dataclass", "weight", "nested", "named"):
        trained = build_pair(build=lambda kind=kind: _build_seeded(UsesObjects, kind))
        assert train(*trained, lambda m, x: m(x).hidden.square().mean())
        assert all(unit.unsharded_bytes == 0 for unit in trained[0].units)
    return True


def _build_seeded(cls, *arguments):
    torch.manual_seed(0)
    return cls(*arguments).double()


def test_outputs_in_dataclasses_and_containers_gather_weights_for_backward():
    assert all(run_on_shared_ranks(return_objects, 2))


@dataclass(frozen=True)
class Arguments:
    """An input of a user's class."""

    x: torch.Tensor
    name: str = "arguments"


class Log:
    """An object of a class that a program registers as a pytree."""

    def __init__(self, values):
        self.values = values


register_pytree_node(Log, lambda log: (log.values, None), lambda values, _: Log(list(values)))


class Collecting(nn.Module):
    """A block that adds a term of the loss to its caller's list, and counts in a dictionary."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, arguments, terms, cache, log):
        log.values.append(len(terms))
        y = torch.tanh(self.layer(arguments.x))
        terms.append(y.square().mean())
        cache["inputs"].append(arguments.x)
        cache["last"].append(arguments.x)
        cache["count"] = cache.get("count", 0) + 1
        cache.pop("first", None)
        return Arguments(arguments.x + y)


class Collector(nn.Module):
    def __init__(self, has_output):
        super().__init__()
        self.blocks = nn.ModuleList([Collecting() for _ in range(3)])
        self.has_output = has_output

    def forward(self, x):
        terms, cache = [], {"inputs": [x], "first": x, "last": deque(maxlen=2)}
        arguments, log = Arguments(x * 2), Log([torch.ones(1, dtype=torch.int64)])
        for block in self.blocks:
            arguments = block(arguments, terms, cache, log)
            if not self.has_output:
                # The backward pass reaches a block only through its term.
                arguments = Arguments(arguments.x.detach())
        assert cache["count"] == len(terms) == 3
        assert [*cache] == ["inputs", "last", "count"]
        assert len(cache["last"]) == cache["last"].maxlen == 2
        assert cache["inputs"][0] is x
        assert log.values[1:] == [0, 1, 2]
        return arguments.x.square().mean() + sum(terms) + cache["inputs"][-1].sum()


def change_arguments():
    """Train blocks that change their mutable arguments, and cast such arguments."""
    for has_output in (True, False):
        build = partial(_build_seeded, Collector, has_output)
        assert train(*build_pair(build=build), lambda m, x: m(x))
    half = FSDP(Collector(True), compute_dtype=torch.bfloat16)
    layers = [block.layer for block in half.module.blocks]
    dtypes = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    half(torch.ones(2, 5)).backward()
    assert dtypes == [torch.bfloat16] * 3
    return True


def test_arguments_that_a_module_changes_are_changed_for_its_caller():
    assert all(run_on_shared_ranks(change_arguments, 2))


class Hiding(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return iter([y])


def hide_output():
    model = FSDP(nn.Sequential(Hiding(5, 5)))
    with pytest.raises(TypeError, match="returned a list_iterator, in which FSDP finds no tensor"):
        model(torch.ones(2, 5))
    return True


def test_an_output_in_which_no_tensor_is_found_is_refused():
    assert all(run_on_shared_ranks(hide_output, 2))


class Storing(nn.Module):
    """A layer that stores a tensor whose backward pass reads its weight, and returns another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        self.stored = (x * self.weight**2).sum()
        return x + 1


def differentiate_stored_tensor():
    model = nn.Sequential(Storing(), Storing(), nn.Linear(5, 5))
    sharded = FSDP(model)
    loss = sharded(torch.ones(2, 5)).sum()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            model[0].stored.backward()
    # The error must not change the versions of the other graph.
    loss.backward()
    return True


def test_a_backward_that_reads_a_freed_parameter_raises():
    assert all(run_on_shared_ranks(differentiate_stored_tensor, 2))


class Reentrant(nn.Module):
    """All or some layers within reentrant checkpoints, and a layer that is used in two of them."""

    def __init__(self, everything, nested=False):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 5)
        self.everything, self.nested = everything, nested

    def segment(self, block, x):
        return x + torch.tanh(self.norm(block(self.blocks[0](x))))

    def outer(self, x):
        for block in self.blocks:
            x = checkpoint(self.segment, block, x, use_reentrant=True)
        return x

    def forward(self, x):
        x = x.requires_grad_() if not x.requires_grad else x
        x = checkpoint(self.outer, x, use_reentrant=True) if self.nested else self.outer(x)
        return checkpoint(self.head, x, use_reentrant=True) if self.everything else self.head(x)


MODULES = [(False,), (True, True), (True,), (False, True)]
OPTIONS = [{}, {"reshard_after_forward": False}, {"shard": (nn.Linear, nn.LayerNorm)}]
PROGRAMS = {
    "some": list(zip(MODULES[:3], OPTIONS, strict=True)),
    "all": list(product(MODULES, OPTIONS)),
}


class UsedInPart(nn.Module):
    """A block whose second layer only rank 0 uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, rank):
        return self.first(x) if rank else self.first(x) + self.second(x)


class RunThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.block = nn.Linear(5, 5), UsedInPart()

    def forward(self, x, rank):
        x = self.head(x)
        for _ in range(3):
            x = checkpoint(self.block, x, rank, use_reentrant=True)
        return x


def reduce_a_unit_twice_in_one_backward():
    build = partial(_build_seeded, RunThrice)
    model, ours, twin, theirs = build_pair(build=build, name="SGD", shard=(UsedInPart,))
    rank, world = dist.get_rank(), dist.get_world_size()
    model(draw_batch(0, rank), rank).square().mean().backward()
    for other in range(world):
        (twin(draw_batch(0, other), other).square().mean() / world).backward()
    ours.step()
    theirs.step()
    return assert_alike(model, twin)


def test_averages_of_a_parameter_that_only_another_rank_uses_are_summed():
    assert all(run_on_shared_ranks(reduce_a_unit_twice_in_one_backward, 2))


def train_with_reentrant_checkpoints(name):
    for arguments, options in PROGRAMS[name]:
        trained = build_pair(build=lambda a=arguments: _build_seeded(Reentrant, *a), **options)
        assert train(*trained, lambda m, x: m(x).square().mean(), steps=2, clip=0.5)
        assert all(unit.unsharded_bytes == 0 for unit in trained[0].units)
    return True


@pytest.mark.parametrize("name", ["some", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_reentrant_checkpoints_train_as_in_one_process(name):
    assert all(run_on_shared_ranks(train_with_reentrant_checkpoints, 2, name))


def train_with_reentrant_checkpoints_at_stages_1_and_2():
    for stage, arguments in ((1, (False,)), (2, (False,)), (2, (True,)), (2, (False, True))):
        trained = build_pair(stage, build=lambda a=arguments: _build_seeded(Reentrant, *a))
        assert train(*trained, compute_mean_square)
        model, ours, twin, theirs = trained
        # Only the optimizer knows the parts of a gradient that it has not averaged yet.
        compute_mean_square(model, draw_batch(9, dist.get_rank())).backward()
        ours.clip_grad_norm_(0.1)
        ours.step()
        for rank in range(dist.get_world_size()):
            (compute_mean_square(twin, draw_batch(9, rank)) / dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        theirs.step()
        assert_alike(model, twin)
    return True


def test_gradients_in_parts_are_summed_at_stages_1_and_2():
    # Two checkpoints compute parts of one gradient; the second part was lost.
    assert all(run_on_shared_ranks(train_with_reentrant_checkpoints_at_stages_1_and_2, 2))


class OneOfTwo(nn.Module):
    """A model that uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, 5)

    def forward(self, x, index):
        return self.head(torch.tanh(self.layers[index](x)))


def clip_after_local_backward(stage):
    model, ours, twin, theirs = build_pair(stage, build=lambda: _build_seeded(OneOfTwo))
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        with ours.no_sync():
            model(draw_batch(step, rank), rank).square().mean().backward()
        ours.clip_grad_norm_(0.1)
        ours.step()
        # The module's `zero_grad` sets `.grad` of this model's parameters to None.
        (model if step else ours).zero_grad()
        for other in range(world):
            (twin(draw_batch(step, other), other).square().mean() / world).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
        assert_alike(model, twin)
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_other_ranks_are_clipped_after_a_backward_without_reduction(stage):
    assert all(run_on_shared_ranks(clip_after_local_backward, 2, stage))

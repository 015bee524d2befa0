"""`fully_shard` in a program written for FSDP2: equal to torch's, or refused with the remedy."""

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

import zero
from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDPModule, fully_shard, load_checkpoint, save_checkpoint
from zero_training import draw_batch


class Block(nn.Sequential):
    """Layers that may be recomputed in the backward pass, or skipped."""

    recompute = skip = False

    def forward(self, x):
        if self.skip:
            return x
        if self.recompute:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


def build(dtype=torch.float64):
    torch.manual_seed(0)
    blocks = [Block(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)) for _ in range(2)]
    return nn.Sequential(nn.Linear(5, 5), *blocks, nn.Linear(5, 5)).to(dtype)


def tie_and_skip(model):
    model[3].weight = model[0].weight
    model[2].skip = True


def freeze_and_recompute(model):
    model[1].requires_grad_(False)
    model[1].recompute = model[2].recompute = True


def train(shard, model, change=None, accumulate=1, steps=2, **options):
    """Run a program written for FSDP2 with `shard`.

    Return its full state dict together with the norms of the gradients, and the optimizer.
    """
    if change is not None:
        change(model)
    for block in (model[1], model[2]):
        shard(block, **options)
    shard(model, **options)
    model[1].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    # The steps of SGD depend on the scale of the gradients, unlike those of Adam.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for number in range(steps):
        for micro in range(accumulate):
            is_last = micro + 1 == accumulate
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            inputs = draw_batch(10 * number + micro, dist.get_rank())
            model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.full_tensor() for name, value in model.state_dict().items()}
    # Clipping hides the scale of the gradients.
    return {**values, "norms": torch.stack(norms)}, optimizer


def run_programs():
    """Run programs with torch's implementation and with this package's."""
    programs = {
        "usual": {},
        "mesh, kept, accumulated": {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "reshard_after_forward": False,
            "accumulate": 2,
        },
        "frozen, recomputed": {"change": freeze_and_recompute},
        "tied, skipped": {"change": tie_and_skip},
    }
    for name, options in programs.items():
        expected, _ = train(torchs_fully_shard, build(), **options)
        actual, _ = train(fully_shard, build(), **options)
        assert list(actual) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, msg=lambda m, n=name: f"{n}: {m}")
    return True


def test_programs_of_fsdp2_train_equally_with_one_import_changed():
    assert all(run_on_shared_ranks(run_programs, 2))


def mix_precision():
    """Cast parameters, inputs and outputs as torch does, also with a policy per module."""
    half, single = torch.bfloat16, torch.float32
    policies = [
        (MixedPrecisionPolicy(half, single), MixedPrecisionPolicy(half, single)),
        (MixedPrecisionPolicy(half), MixedPrecisionPolicy(half, output_dtype=single)),
        # The root computes in float32, and the blocks' outputs are cast.
        (MixedPrecisionPolicy(half, output_dtype=single), MixedPrecisionPolicy()),
        (MixedPrecisionPolicy(cast_forward_inputs=False), MixedPrecisionPolicy()),
    ]
    for of_blocks, of_root in policies:
        outputs = []
        for shard in (torchs_fully_shard, fully_shard):
            model = build(single)
            for block in (model[1], model[2]):
                shard(block, mp_policy=of_blocks)
            shard(model, mp_policy=of_root)
            output = model(draw_batch(0, dist.get_rank()).float())
            output.float().square().mean().backward()
            gradients = [p.grad.full_tensor() for p in model.parameters()]
            outputs.append((output.detach(), *gradients))
        for actual, expected in zip(outputs[1], outputs[0], strict=True):
            assert actual.dtype == expected.dtype
            # A value that is rounded to bfloat16 once more or less differs by up to 4e-3.
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    return True


def test_policies_of_mixed_precision_cast_as_torchs():
    assert all(run_on_shared_ranks(mix_precision, 2))


def reduce_by_default():
    """Without `reduce_dtype`, gradients are reduced in float32; complex ones are never cast."""
    layer = nn.Linear(4, 3, bias=False)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    scale = 1 + 2**-7 * dist.get_rank()
    (layer(torch.ones(1, 4)) * scale).sum().backward()
    # The average has more digits than bfloat16.
    expected = torch.full((3, 4), 1 + 2**-8)
    assert torch.equal(layer.weight.grad.full_tensor(), expected)
    # Complex gradients keep their imaginary parts.
    layer = nn.Linear(4, 3, bias=False, dtype=torch.complex64)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    layer(torch.full((1, 4), 1 + 2j)).real.sum().backward()
    return torch.equal(layer.weight.grad.full_tensor(), torch.full((3, 4), 1 - 2j))


def test_gradients_are_reduced_in_the_dtype_of_the_parameters_by_default():
    assert all(run_on_shared_ranks(reduce_by_default, 2))


def synchronize_some():
    """Hold back the gradients of one block only, and sum them in a later backward pass."""
    results = []
    for shard in (torchs_fully_shard, fully_shard):
        model = build()
        for block in (model[1], model[2]):
            shard(block)
        shard(model)
        for micro in range(2):
            model[1].set_requires_gradient_sync(micro == 1)
            model(draw_batch(micro, dist.get_rank())).square().mean().backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected)
    return True


def test_gradients_of_some_modules_are_held_back_as_torch_holds_them():
    assert all(run_on_shared_ranks(synchronize_some, 2))


def use_methods():
    folder = case_folder()
    model = build()
    expected, optimizer = train(fully_shard, model)
    assert isinstance(model, FSDPModule)
    assert isinstance(model[1], FSDPModule)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0:2]) is nn.Sequential
    assert not list(fully_shard(nn.Tanh()).parameters())
    save_checkpoint(folder, model, optimizer)
    other = build()
    other_optimizer = torch.optim.SGD(fully_shard(other).parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(folder, other, other_optimizer)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), expected[name])
    for async_op in (False, True):
        handle = model[1].unshard(async_op=async_op)
        if handle is not None:
            handle.wait()
        assert torch.equal(model[1][0].weight, expected["1.0.weight"])
        if async_op:
            model[1].reshard()
        else:
            # A forward pass frees the parameters too.
            with torch.no_grad():
                model(draw_batch(0, 0))
        assert model[1][0].weight.shape.numel() < 25
    # Gathered parameters are gathered again if the optimizer changes them.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model(draw_batch(0, 0)).sum().backward()
    handle = model.unshard(async_op=True)
    optimizer.step()
    handle.wait()
    outputs = model(draw_batch(0, 0))
    assert torch.equal(outputs, model(draw_batch(0, 0)))
    # The constructor of a linear layer has required arguments.
    for module in (model, nn.Sequential(fully_shard(nn.Linear(2, 2)))):
        with pytest.raises(AssertionError, match=r"copy it before calling fully_shard, then load"):
            copy.deepcopy(module)
    return True


def test_sharded_modules_have_fsdp2s_methods_and_are_saved():
    assert all(run_on_shared_ranks(use_methods, 2))


class OverridingPolicy(NamedTuple):
    """A policy of torch 2.15; earlier versions do not have the last field."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Any = len


def refuse():
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    fully_shard(tied[0])
    part = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    other_group = dist.new_group()
    groups_of_one = [dist.new_group([rank]) for rank in range(2)]
    cases = [
        (lambda: fully_shard(tied), r"1\.weight is tied to a parameter that an earlier FSDP or"),
        (lambda: zero.FSDP(nn.Sequential(tied[1])), r"0\.weight is tied to a parameter that an"),
        (lambda: fully_shard(part), "FSDPLinear was passed to fully_shard before: pass it once"),
        (lambda: fully_shard([nn.Linear(2, 2)]), "expected one module, .* got a list: pass a"),
        (
            lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=2),
            "reshard_after_forward=2 is not supported",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: None),
            "shard_placement_fn=.* is not supported",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy()),
            "offload_policy=.* is not supported",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), mp_policy=OverridingPolicy()),
            "param_dtype_override_fn=.* is not supported, because a unit has one dtype",
        ),
        (
            lambda: fully_shard(nn.Sequential(part, nn.Linear(4, 4)), mesh=other_group),
            "expected one process group for a module and the modules within it",
        ),
        (lambda: zero.FSDP(nn.Sequential(part)), r"parameter 0\.weight is sharded already"),
        (
            lambda: zero.FSDP(nn.Linear(2, 2), group=groups_of_one[1 - dist.get_rank()]),
            "expected a group that contains this rank, got a group without global rank",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    model = nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0].unshard()
    with pytest.raises(ValueError, match=r"which unshard\(\) has gathered: call reshard\(\) first"):
        fully_shard(model)
    model[0].reshard()
    fully_shard(model)(torch.ones(1, 2)).sum().backward()
    alone = zero.FSDP(nn.Linear(2, 2), group=groups_of_one[dist.get_rank()])
    with pytest.raises(
        RuntimeError, match=r"of ranks \[0\], got ranks \[0, 1\]: pass it as group="
    ):
        save_checkpoint(case_folder(), alone, group=dist.group.WORLD)
    # By default, a model is saved and loaded by the ranks over which it is sharded.
    if dist.get_rank() == 0:
        save_checkpoint(Path(case_folder(), "alone"), alone, extra={"step": 1})
        assert load_checkpoint(Path(case_folder(), "alone"), alone) == {"step": 1}
    # A mesh may list the ranks in another order than its group.
    reversed_mesh = DeviceMesh("cpu", [1, 0])
    save_checkpoint(case_folder(), zero.FSDP(nn.Linear(2, 2), group=reversed_mesh))
    return True


def test_arguments_and_models_without_an_equivalent_are_refused():
    assert all(run_on_shared_ranks(refuse, 2))

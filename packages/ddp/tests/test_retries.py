"""Training that continues after a caught exception averages its gradients or raises again."""

import copy
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from worker_pool import run_on_shared_ranks


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def train(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()


def get_error(model: nn.Module) -> str:
    """Return the error of a training step, or "" if the step averaged the gradients."""
    try:
        train(model)
    except (MemoryError, RuntimeError, ValueError) as error:
        return str(error)
    module = copy.deepcopy(model.module)
    module.zero_grad()
    for rank in range(dist.get_world_size()):
        module(torch.full((2, 3), 1.0 + rank)).sum().backward()
    for ours, expected in zip(model.module.parameters(), module.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad, expected.grad / dist.get_world_size())
    return ""


def unfreeze_different_layers() -> list[str]:
    module = build_net().requires_grad_(False)
    module[1].bias.requires_grad_(True)
    model = DDP(module)
    errors = [get_error(model)]
    module[0].requires_grad_(True)
    module[1].weight.requires_grad_(dist.get_rank() == 1)
    errors += [get_error(model), get_error(model)]
    module[1].requires_grad_(True)
    return [*errors, get_error(model)]


def test_models_that_changed_differently_are_refused_until_they_are_equal() -> None:
    for unchanged, first, second, corrected in run_on_shared_ranks(unfreeze_different_layers, 2):
        assert unchanged == corrected == ""
        assert first == second
        assert "rank 1 has parameter '1.weight' (2, 3) torch.float32, but rank 0 has" in first


def fail_to_allocate() -> list[str]:
    is_full = False

    def allocate(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
        if is_full:
            raise MemoryError("no memory for a bucket")
        return torch.empty(numel, dtype=dtype)

    module = build_net()
    module[0].requires_grad_(False)
    model = DDP(module, allocate=allocate)
    errors = [get_error(model)]
    is_full = True
    module[0].requires_grad_(True)
    return [*errors, get_error(model), get_error(model)]


def fail_to_rebuild() -> list[str]:
    """Fail to allocate the buckets in the new order, at the start of an accumulating pass."""
    is_full = False

    def allocate(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
        if is_full:
            raise MemoryError("no memory for a bucket")
        return torch.empty(numel, dtype=dtype)

    class Reversed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](self[1](x))

    torch.manual_seed(0)
    model = DDP(Reversed(nn.Linear(3, 2), nn.Linear(3, 3)), None, allocate=allocate)
    errors = [get_error(model)]
    is_full = True
    with model.no_sync():
        errors.append(get_error(model))
    return [*errors, get_error(model)]


def interrupt_agreement_on_order() -> str:
    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    model = DDP(build_net())
    assert get_error(model) == ""
    with pytest.MonkeyPatch.context() as patch, model.no_sync():
        patch.setattr(dist, "broadcast", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get_error(model)
    return get_error(model)


def test_interrupted_agreement_on_the_order_of_buckets_is_reported_again() -> None:
    (error,) = run_on_shared_ranks(interrupt_agreement_on_order, 1)
    assert "the buckets could not be rebuilt: KeyboardInterrupt()" in error


def test_failed_allocation_of_rebuilt_buckets_is_reported_again() -> None:
    for unchanged, first, second in run_on_shared_ranks(fail_to_rebuild, 2):
        assert unchanged == ""
        assert "no memory for a bucket" in first
        assert "inconsistent since an earlier failure (rank" in second
        assert "no memory for a bucket" in second


def test_failed_allocation_of_new_buckets_is_reported_again() -> None:
    for unchanged, first, second in run_on_shared_ranks(fail_to_allocate, 2):
        assert unchanged == ""
        assert "no memory for a bucket" in first
        assert "no memory for a bucket" in second


def skip_an_optimizer_step() -> list[str]:
    model = DDP(build_net())
    errors = []
    for step in range(4):
        errors.append(get_error(model))
        if step != 1 or dist.get_rank() == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1
    return errors


def test_weights_that_differ_after_a_skipped_step_are_refused_until_a_restart() -> None:
    for first, second, third, fourth in run_on_shared_ranks(skip_an_optimizer_step, 2):
        assert first == second == ""
        assert "on ranks [0], but not on ranks [1]" in third
        assert "on ranks [0], but not on ranks [1]" in fourth


def repeat_backward(trains_last_layer: bool) -> str:
    module = build_net()
    module[1].requires_grad_(trains_last_layer)
    fails = True

    def fail(_: torch.Tensor) -> None:
        if fails:
            raise ArithmeticError("on purpose")

    def register(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        inputs[0].register_hook(fail)

    module[1].register_forward_pre_hook(register)
    model = DDP(module)
    loss = model(torch.full((2, 3), 1.0 + dist.get_rank())).sum()
    with suppress(ArithmeticError):
        loss.backward(retain_graph=True)
    fails = False
    model.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    gradients = [parameter.grad.clone() for parameter in module[0].parameters()]
    assert get_error(model) == ""
    for gradient, parameter in zip(gradients, module[0].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    return ""


@pytest.mark.parametrize("trains_last_layer", [False, True])
def test_backward_pass_that_raised_is_repeated_or_refused(trains_last_layer: bool) -> None:
    for error in run_on_shared_ranks(repeat_backward, 2, trains_last_layer):
        if trains_last_layer:
            # Gradients of the last layer were being reduced.
            assert "the last backward pass raised an error" in error
        else:
            assert error == ""

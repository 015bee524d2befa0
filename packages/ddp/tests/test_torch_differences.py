"""Situations in which `DDP` behaves differently from torch's DDP on purpose."""

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from worker_pool import run_on_shared_ranks


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, steps: int = 2) -> None:
    """Train with different batches on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def unfreeze(wrap: Callable) -> nn.Module:
    module = build_net()
    module[0].requires_grad_(False)
    model = wrap(module)
    module[0].requires_grad_(True)
    train(model)
    return module


def replace_parameters(wrap: Callable) -> nn.Module:
    module = build_net()
    model = wrap(module)
    state = OrderedDict((name, value.clone()) for name, value in module.state_dict().items())
    module.load_state_dict(state, assign=True)
    train(model)
    return module


def add_layer(wrap: Callable) -> nn.Module:
    module = build_net()
    model = wrap(module)
    module.append(nn.Linear(2, 2))
    train(model)
    return module


def read_buffers_after_step(wrap: Callable) -> nn.Module:
    module = build_net()
    train(wrap(module))
    return module


def skip_optimizer_step(wrap: Callable) -> nn.Module:
    module = build_net()
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 5) * step).sum().backward()
        if step != 1 or dist.get_rank() == 0:
            optimizer.step()
    return module


def change_copy_on_one_rank(wrap: Callable) -> nn.Module:
    copied = copy.deepcopy(wrap(build_net()))
    with torch.no_grad():
        copied.module[2].bias += dist.get_rank()
    train(copied)
    return copied.module


def replace_module(wrap: Callable) -> nn.Module:
    model = wrap(build_net())
    train(model)
    model.module = build_net()
    train(model)
    return model.module


def limit_norms_in_forward(wrap: Callable) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1))
    model = wrap(module)
    model(torch.tensor([dist.get_rank()])).sum().backward()
    return module


def step_in_gradient_hooks(wrap: Callable, *, num_layers: int = 3) -> nn.Module:
    module = build_net()[-num_layers:]
    model = wrap(module)
    for parameter in module.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(partial(step_alone, optimizer))
    model(torch.ones(3, 5 if num_layers == 3 else 4) * (1 + dist.get_rank())).sum().backward()
    return module


def run_two_backward_passes(wrap: Callable, *, has_two_losses: bool = False) -> nn.Module:
    module = build_net()
    model = wrap(module)
    output = model(torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank())))
    losses = output.square().mean(0) if has_two_losses else [output.square().mean()] * 2
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return module


def convert_after_wrapping(wrap: Callable) -> nn.Module:
    module = build_net()
    model = wrap(module).double()
    model(torch.eye(3, 5).double() * (1 + dist.get_rank())).square().mean().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return module


def call_wrapped_module(wrap: Callable) -> nn.Module:
    model = wrap(build_net())
    train(model.module)
    return model.module


def step_alone(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


SITUATIONS = {
    "unfreeze": unfreeze,
    "replace parameters": replace_parameters,
    "add layer": add_layer,
    "read buffers": read_buffers_after_step,
    "skip optimizer step": skip_optimizer_step,
    "changed copy": change_copy_on_one_rank,
    "replace module": replace_module,
    "limit norms": limit_norms_in_forward,
    "step in hooks": step_in_gradient_hooks,
    "step in hooks of one layer": partial(step_in_gradient_hooks, num_layers=1),
    "retained graph": run_two_backward_passes,
    "two losses": partial(run_two_backward_passes, has_two_losses=True),
    "convert": convert_after_wrapping,
    "call module": call_wrapped_module,
}


def compare_ranks(situation: str, *, use_torch: bool) -> str:
    """Return whether the weights or buffers of two ranks are equal, or the error."""
    wrap = nn.parallel.DistributedDataParallel if use_torch else DDP
    try:
        module = SITUATIONS[situation](wrap)
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"
    states: list = [None, None]
    # The buffers of torch's DDP differ after any step, so they do not show whether weights do.
    tensors = module.buffers() if situation == "read buffers" else module.parameters()
    dist.all_gather_object(states, [tensor.tolist() for tensor in tensors])
    return "equal" if states[0] == states[1] else "different"


def compare_with_torch_ddp(situation: str) -> tuple[str, str]:
    """Return the outcomes with torch's DDP and with `DDP`."""
    return compare_ranks(situation, use_torch=True), compare_ranks(situation, use_torch=False)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ("unfreeze", "equal"),
        ("replace parameters", "equal"),
        ("add layer", "equal"),
        ("read buffers", "equal"),
        ("skip optimizer step", "refused: the weights were changed"),
        ("changed copy", "refused: a copy of a DDP does not average gradients"),
        ("replace module", "equal"),
        ("limit norms", "refused: the weights differ across ranks"),
        ("step in hooks", "refused: the weights differ across ranks"),
        ("step in hooks of one layer", "refused: the weights differ across ranks"),
        ("retained graph", "equal"),
        ("two losses", "equal"),
        ("convert", "equal"),
        ("call module", "equal"),
    ],
)
def test_ranks_of_torch_ddp_diverge_and_ours_do_not(situation: str, expected: str) -> None:
    for theirs, ours in run_on_shared_ranks(compare_with_torch_ddp, 2, situation):
        assert theirs == "different"
        assert ours.startswith(expected)


# ----- buffers that change between two steps -----


class Scaled(nn.Module):
    """A linear layer whose output is scaled by buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("hidden", torch.ones(2, 2).t(), persistent=False)
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.inner = nn.Sequential(nn.Identity())
        self.inner[0].register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = sum(buffer.real.sum() for buffer in self.buffers())
        return self.linear(x) * scale


def replace_buffer(module: nn.Module, value: int) -> None:
    module.scale = torch.full((1,), float(value))


def add_module_with_buffer(module: nn.Module, value: int) -> None:
    module.inner.append(nn.BatchNorm1d(1, affine=False))
    module.inner[-1].running_mean.fill_(value)


#: Changes of a module with a value that may depend on the rank.
CHANGES: dict[str, Callable[[nn.Module, int], object]] = {
    "float": lambda module, value: module.scale.fill_(value),
    "data": lambda module, value: module.scale.data.fill_(value),
    "assigned": replace_buffer,
    "not persistent": lambda module, value: module.hidden.fill_(value),
    "integer": lambda module, value: module.count.fill_(value),
    "boolean": lambda module, value: module.mask.fill_(value == 2),
    "complex": lambda module, value: module.phase.fill_(value),
    "nested": lambda module, value: module.inner[0].narrow.fill_(value),
    "added module": add_module_with_buffer,
}


def change_buffers(change: str, rank: int, wrapper: Callable) -> list[tuple[float, list]]:
    """Train three steps, with a change on `rank` before the second one.

    Returns the output and the gradient of each step.
    """
    torch.manual_seed(0)
    model = wrapper(Scaled())
    results = []
    for step in range(3):
        if step == 1:
            CHANGES[change](model.module, 2 if rank == dist.get_rank() else 1)
        model.zero_grad()
        output = model(torch.ones(1, 1)).sum()
        output.backward()
        results.append((output.item(), model.module.linear.weight.grad.item()))
    return results


def compare_changed_buffers(rank: int) -> dict[str, list[tuple[float, list]]]:
    outcomes = {}
    for change in CHANGES:
        outcomes[change] = change_buffers(change, rank, DDP)
        theirs = change_buffers(change, rank, nn.parallel.DistributedDataParallel)
        assert outcomes[change] == theirs, change
    return outcomes


@pytest.mark.parametrize("changed_rank", [0, 1])
def test_buffers_changed_on_one_rank_are_those_of_rank_0_as_with_torch_ddp(
    changed_rank: int,
) -> None:
    first, second = run_on_shared_ranks(compare_changed_buffers, 2, changed_rank)
    assert first == second
    before, changed, _ = first["float"]
    assert (before == changed) == (changed_rank == 1)


def use_buffers(operations: Sequence[str], wrapper: Callable) -> list[float]:
    """Return the buffers that forward passes use if each rank changes them before each pass."""
    torch.manual_seed(0)
    model = wrapper(Scaled())
    nn.init.ones_(model.module.linear.weight)
    outputs = []
    for number, operation in enumerate(operations):
        model.module.scale.fill_(10 * number + dist.get_rank())
        if operation == "no gradient":
            with torch.no_grad():
                outputs.append(model(torch.ones(1, 1)).item())
            continue
        with model.no_sync() if operation == "no_sync" else nullcontext():
            output = model(torch.ones(1, 1)).sum()
        outputs.append(output.item())
        if operation != "no backward pass":
            output.backward()
    return outputs


def build_sequence_with_every_triple(operations: Sequence[str]) -> list[str]:
    """Return a de Bruijn sequence: each three operations follow each other once."""
    seen = set()
    sequence = [operations[0]] * 2
    while True:
        for operation in reversed(operations):
            triple = (*sequence[-2:], operation)
            if triple not in seen:
                break
        else:
            return sequence
        seen.add(triple)
        sequence.append(operation)


def compare_used_buffers() -> list[list[float]]:
    operations = ("step", "no backward pass", "no_sync", "no gradient")
    # A new model runs every sequence of two operations.
    sequences = [
        *itertools.product(operations, repeat=2),
        build_sequence_with_every_triple(operations),
    ]
    outcomes = []
    for sequence in sequences:
        outcomes.append(use_buffers(sequence, DDP))
        theirs = use_buffers(sequence, nn.parallel.DistributedDataParallel)
        assert outcomes[-1] == theirs, sequence
    return outcomes


def test_every_kind_of_forward_pass_copies_buffers_if_torch_ddp_does() -> None:
    first, second = run_on_shared_ranks(compare_used_buffers, 2)
    are_equal = [ours == theirs for ours, theirs in zip(first, second, strict=True)]
    # A forward pass after one without gradients or in `no_sync` uses the buffers of its rank.
    assert any(are_equal)
    assert not all(are_equal)


def change_local_buffer() -> list[tuple[float, list]]:
    return change_buffers("float", 1, partial(DDP, sync_buffers=False))


def test_buffers_that_are_not_synchronized_stay_local() -> None:
    first, second = run_on_shared_ranks(change_local_buffer, 2)
    assert first[0][0] == first[1][0] == second[0][0] != second[1][0]


def keep_flat_buffer(model: nn.Module) -> list[torch.Tensor]:
    """Set each `.grad` to a part of one buffer, and return only the buffer."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    flat = torch.zeros(sum(sizes))
    for parameter, piece in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return [flat]


def keep_references(model: nn.Module) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters()]


def keep_aliases(model: nn.Module) -> list[torch.Tensor]:
    return [gradient.view(-1) for gradient in keep_references(model)]


def keep_nothing(model: nn.Module) -> list[torch.Tensor]:
    keep_references(model)
    return []


def average_into_memory_of_the_caller(
    keep: Callable, is_accumulated: bool, **options: bool
) -> tuple[list[float], list[float], list[str]]:
    """Return the memory that the caller kept of `.grad`, torch's gradients, and the warnings."""
    model, twin = DDP(build_net(), **options), nn.parallel.DistributedDataParallel(build_net())
    memory = keep(model)
    x = torch.full((3, 5), 1.0 + dist.get_rank())
    x[0] += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wrapper in (model, twin):
            for _ in range(2):
                with wrapper.no_sync() if is_accumulated else nullcontext():
                    wrapper(x).square().mean().backward()
            wrapper(x).square().mean().backward()
    received = [value for tensor in memory for value in tensor.reshape(-1).tolist()]
    expected = [value for p in twin.parameters() for value in p.grad.reshape(-1).tolist()]
    return received, expected, [str(warning.message) for warning in caught]


def average_into_all_memory_of_the_caller() -> list[tuple]:
    results = []
    for keep in (keep_flat_buffer, keep_references, keep_aliases, keep_nothing):
        for is_accumulated in (False, True):
            by_default = average_into_memory_of_the_caller(keep, is_accumulated)
            options = {"gradient_as_bucket_view": False}
            separate = average_into_memory_of_the_caller(keep, is_accumulated, **options)
            results.append((keep is keep_nothing, by_default, separate))
    return results


def move_gradients() -> list[str]:
    """Move `.grad` to memory without other references, and return the warnings."""
    model = DDP(build_net())
    x = torch.ones(3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data.clone()
        model(x).sum().backward()
        model.double()
        model(x.double()).sum().backward()
    return [str(warning.message) for warning in caught]


def test_moved_gradients_do_not_warn() -> None:
    assert run_on_shared_ranks(move_gradients, 2) == [[], []]


def test_memory_of_the_caller_receives_the_mean_or_a_warning_is_issued() -> None:
    for results in run_on_shared_ranks(average_into_all_memory_of_the_caller, 2):
        assert len(results) == 8
        for is_nothing_kept, by_default, separate in results:
            if is_nothing_kept:
                assert by_default[2] == separate[2] == []
                continue
            (message,) = by_default[2]
            assert "another tensor or variable had the memory of" in message
            assert by_default[0] != pytest.approx(by_default[1], rel=1e-4)
            assert separate[0] == pytest.approx(separate[1], rel=1e-4, abs=1e-6)
            assert separate[2] == []


class IgnoresBias(torch.autograd.Function):
    """A product with a weight; the gradient of the bias is None instead of zeros."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum(0), None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.bias = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return IgnoresBias.apply(x, self.weight, self.bias)


def train_with_undefined_gradients(**options: bool) -> list[list]:
    results = []
    for wrap in (nn.parallel.DistributedDataParallel, DDP):
        module = Scale()
        model = wrap(module, **options)
        for step in range(3):
            model(torch.full((2, 5), 1.0 + step + dist.get_rank())).sum().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        results.append([None if g is None else g.tolist() for g in gradients])
    return results


def train_with_all_options() -> list[list[list]]:
    find_unused = train_with_undefined_gradients(find_unused_parameters=True)
    static = train_with_undefined_gradients(static_graph=True)
    return [train_with_undefined_gradients(), find_unused, static]


def test_undefined_gradient_of_a_custom_function_counts_as_zero_as_in_torch_ddp() -> None:
    for by_default, find_unused, static in run_on_shared_ranks(train_with_all_options, 2):
        for theirs, ours in (by_default, find_unused, static):
            assert ours == theirs
        assert by_default[1][1] == [0.0] * 5
        # As with a parameter that no rank used, `.grad` stays None.
        assert find_unused[1][1] is None


def share_gradients() -> list[str]:
    errors = []
    for is_synchronized, num_shared in ((True, 25), (False, 1)):
        module = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
        model = DDP(module)
        model.require_backward_grad_sync = is_synchronized
        memory = torch.zeros(50)
        module[0].weight.grad = memory[:25].view(5, 5)
        module[1].weight.grad = memory[25 - num_shared :][:25].view(5, 5)
        for program in (
            lambda model=model: model(torch.ones(1, 5)).sum().backward(),
            lambda module=module: DDP(module),
        ):
            with pytest.raises(RuntimeError) as error:
                program()
            errors.append(str(error.value))
    return errors


def test_parameters_that_share_one_gradient_are_refused() -> None:
    for errors in run_on_shared_ranks(share_gradients, 2):
        assert len(errors) == 4
        for error in errors:
            assert "expected a separate .grad of each parameter" in error
            assert "'0.weight' and '1.weight'" in error

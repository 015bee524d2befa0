"""Situations in which `DDP` behaves differently from torch's DDP on purpose."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from worker_pool import run_ranks


def net() -> nn.Sequential:
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
    module = net()
    module[0].requires_grad_(False)
    model = wrap(module)
    module[0].requires_grad_(True)
    train(model)
    return module


def replace_parameters(wrap: Callable) -> nn.Module:
    module = net()
    model = wrap(module)
    state = OrderedDict((name, value.clone()) for name, value in module.state_dict().items())
    module.load_state_dict(state, assign=True)
    train(model)
    return module


def add_layer(wrap: Callable) -> nn.Module:
    module = net()
    model = wrap(module)
    module.append(nn.Linear(2, 2))
    train(model)
    return module


def read_buffers_after_step(wrap: Callable) -> nn.Module:
    module = net()
    train(wrap(module))
    return module


def skip_optimizer_step(wrap: Callable) -> nn.Module:
    module = net()
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 5) * step).sum().backward()
        if step != 1 or dist.get_rank() == 0:
            optimizer.step()
    return module


def change_copy_on_one_rank(wrap: Callable) -> nn.Module:
    copied = copy.deepcopy(wrap(net()))
    with torch.no_grad():
        copied.module[2].bias += dist.get_rank()
    train(copied)
    return copied.module


SITUATIONS = {
    "unfreeze": unfreeze,
    "replace parameters": replace_parameters,
    "add layer": add_layer,
    "read buffers": read_buffers_after_step,
    "skip optimizer step": skip_optimizer_step,
    "changed copy": change_copy_on_one_rank,
}


def compare_ranks(situation: str, use_torch: bool) -> str:
    wrap = nn.parallel.DistributedDataParallel if use_torch else DDP
    try:
        module = SITUATIONS[situation](wrap)
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"
    states: list = [None, None]
    dist.all_gather_object(states, [value.tolist() for value in module.state_dict().values()])
    return "equal" if states[0] == states[1] else "different"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ("unfreeze", "equal"),
        ("replace parameters", "equal"),
        ("add layer", "equal"),
        ("read buffers", "equal"),
        ("skip optimizer step", "refused: the weights were changed"),
        ("changed copy", "refused: the models differ across ranks"),
    ],
)
def test_ranks_of_torch_ddp_diverge_and_ours_do_not(situation: str, expected: str) -> None:
    assert run_ranks(compare_ranks, 2, situation, True, timeout=120) == ["different"] * 2
    for outcome in run_ranks(compare_ranks, 2, situation, False, timeout=120):
        assert outcome.startswith(expected)


def run_one_pass_inside_no_sync(forward_inside: bool) -> tuple[list[str], float]:
    model = DDP(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            if forward_inside:
                with model.no_sync():
                    output = model(x)
                output.sum().backward()
            else:
                output = model(x)
                with model.no_sync():
                    output.sum().backward()
    messages = [str(warning.message) for warning in caught]
    return messages, float(model.module.weight.grad)


@pytest.mark.parametrize("forward_inside", [True, False])
def test_no_sync_around_one_pass_warns_once(forward_inside: bool) -> None:
    ranks = run_ranks(run_one_pass_inside_no_sync, 2, forward_inside)
    for messages, _ in ranks:
        (message,) = messages
        assert "run both passes inside no_sync() or both outside" in message
        assert ("gradients are synchronized here" in message) == forward_inside
    gradients = [gradient for _, gradient in ranks]
    assert gradients == ([1.5, 1.5] if forward_inside else [1.0, 2.0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


BUFFER_CHANGES: dict[str, Callable[[nn.Module, int], None]] = {
    "on rank 0": lambda module, rank: module.scale.fill_(2.0 if rank == 0 else 1.0),
    "on rank 1": lambda module, rank: module.scale.fill_(2.0 if rank == 1 else 1.0),
    "replaced on rank 1": lambda module, rank: setattr(module, "scale", torch.ones(1) * (1 + rank)),
    "on every rank": lambda module, rank: module.scale.fill_(2.0),
    "nowhere": lambda module, rank: None,
}


def change_buffers(change: str, sync: bool = True) -> tuple[list[str], list[float]]:
    """Train three steps, with a change of the buffers before the last two."""
    torch.manual_seed(0)
    model = DDP(Scaled(), forward_sync_buffers=sync)
    scales = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if step:
                BUFFER_CHANGES[change](model.module, dist.get_rank())
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            model(torch.ones(1, 1)).sum().backward()
            scales.append(float(model.module.scale))
    return [str(warning.message) for warning in caught], scales


@pytest.mark.parametrize(
    ("change", "scale"),
    [
        ("on rank 0", 2.0),
        ("on rank 1", 1.0),
        ("replaced on rank 1", 1.0),
        ("on every rank", 2.0),
        ("nowhere", 1.0),
    ],
)
def test_buffers_changed_on_one_rank_before_a_forward_pass_warn_once(
    change: str, scale: float
) -> None:
    (first, scales), (second, other_scales) = run_ranks(change_buffers, 2, change)
    assert scales == other_scales == [1.0, scale, scale]
    assert first == []
    if "on rank" not in change:
        assert second == []
        return
    (message,) = second
    assert "rank 1: before the forward pass of this step, the buffers differed" in message


def test_buffers_that_are_not_synchronized_do_not_warn() -> None:
    assert run_ranks(change_buffers, 2, "on rank 1", False)[1] == ([], [1.0, 2.0, 2.0])

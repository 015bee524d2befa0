"""Averages by weight give the gradient of the mean over all tokens of all ranks."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.nn import functional as F
from worker_pool import run_ranks, try_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()


def loss_of(model: nn.Module, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction=reduction)


def tokens_of(world: int, step: int) -> list[list[torch.Tensor]]:
    """Return two batches per rank, all of different lengths."""
    draw = torch.Generator().manual_seed(step)
    return [
        [torch.randint(11, (3 + 2 * rank + 5 * part + step,), generator=draw) for part in (0, 1)]
        for rank in range(world)
    ]


def train_on_uneven_tokens(average: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    module, count = net(), [0]
    twin = copy.deepcopy(module)
    model = DDP(module, average="sum" if average == "sum" else lambda: count[0])
    for step in range(3):
        everything = tokens_of(world, step)
        total = sum(len(part) - 1 for parts in everything for part in parts)
        model.zero_grad()
        twin.zero_grad()
        for number, part in enumerate(everything[rank]):
            count[0] = len(part) - 1
            model.require_backward_grad_sync = number == 1
            if average == "sum":
                (loss_of(model, part, "sum") / total).backward()
            else:
                loss_of(model, part).backward()
        losses = [loss_of(twin, part, "sum") for parts in everything for part in parts]
        (sum(losses) / total).backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return True


@pytest.mark.parametrize(
    ("average", "world"),
    [
        ("sum", 2),
        ("weight", 3),
        pytest.param("sum", 3, marks=pytest.mark.exhaustive),
        pytest.param("weight", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_uneven_tokens_give_the_gradient_of_the_mean_over_all_tokens(
    average: str, world: int
) -> None:
    assert run_ranks(train_on_uneven_tokens, world, average) == [True] * world


def exclude_a_rank_without_tokens(sparse: bool) -> list[bool]:
    rank, module = dist.get_rank(), net()
    module[0].sparse = sparse
    count, equal = [0], []
    twin = copy.deepcopy(module)
    model = DDP(module, average=lambda: count[0])
    for step in range(3):
        model.zero_grad()
        twin.zero_grad()
        # Rank 1 has no tokens in the first pass, and rank 0 none in the second.
        for part in range(2):
            model.require_backward_grad_sync = part == 1
            tokens = torch.arange(2 + step + part)
            count[0] = len(tokens) - 1 if rank == part else 0
            # Without tokens, this mean over a mask is 0 / 0, and so are its gradients.
            mask = torch.full((len(tokens) - 1,), float(count[0] > 0)).double()
            losses = F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")
            ((losses * mask).sum() / mask.sum()).backward()
            (loss_of(twin, tokens, "sum") / (3 + 2 * step)).backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            equal.append(torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense()))
    return equal


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_weight_0_are_ignored_even_if_they_are_nan(sparse: bool) -> None:
    assert run_ranks(exclude_a_rank_without_tokens, 2, sparse) == [[True] * 9] * 2


def pass_unsupported_averages() -> list[str]:
    errors = []
    for average in ("mean", None):
        try:
            DDP(net(), average=average)
        except ValueError as error:
            errors.append(str(error))
    for weight in (0, math.inf, math.nan):
        model = DDP(net(), average=lambda: weight)  # noqa: B023
        try:
            loss_of(model, torch.arange(4)).backward()
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_unsupported_averages_are_refused() -> None:
    for outcome in try_ranks(pass_unsupported_averages, 2):
        text, none, zero, infinite, not_a_number = outcome.value
        assert "got 'mean'" in text
        assert "got None" in none
        for value, message in (("0.0", zero), ("inf", infinite), ("nan", not_a_number)):
            assert f"expected a positive sum of weights over all ranks, got {value}" in message


def compute_gradients_on_one_rank(average) -> bool:
    rank, module = dist.get_rank(), net()
    model = DDP(module, average=average if average == "sum" else lambda: 1.0)
    if rank == 0:
        # This adds nothing to `.grad`, so no other rank needs to take part.
        torch.autograd.grad(loss_of(model, torch.arange(5)), list(module.parameters()))
    loss_of(model, torch.arange(5)).backward()
    twin = net()
    (loss_of(twin, torch.arange(5)) * (2 if average == "sum" else 1)).backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return True


@pytest.mark.parametrize("average", ["sum", "weight"])
def test_autograd_grad_opens_no_step(average: str) -> None:
    assert run_ranks(compute_gradients_on_one_rank, 2, average, timeout=60) == [True] * 2


def unfreeze_between_steps(average: str) -> bool:
    rank, module = dist.get_rank(), net()
    module[1].requires_grad_(False)
    twin, model = copy.deepcopy(module), DDP(module, average=average)
    for step in range(3):
        # Gradients are not zeroed: `.grad` is a sum over the ranks already.
        tokens = tokens_of(2, step)
        loss_of(model, tokens[rank][0]).backward()
        sum(loss_of(twin, parts[0]) for parts in tokens).backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        for replica in (module, twin):
            replica[1].requires_grad_(True)
    return True


def test_sums_stay_sums_when_parameters_are_unfrozen() -> None:
    assert run_ranks(unfreeze_between_steps, 2, "sum") == [True] * 2

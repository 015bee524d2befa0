"""Uneven work: parameters that only some ranks use, and ranks with fewer inputs."""

import copy

import ddp
import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from ddp.consistency import gradient_agreement
from ddp.consistency.gradient_parts import GradientParts
from torch import nn
from worker_pool import run_on_shared_ranks

MIB = 2**20


class Experts(nn.Module):
    """A module that routes each sample to one of three experts; the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.trunk(x)).square().mean()


def train_experts() -> bool:
    rank, x = dist.get_rank(), torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(5))
    module = Experts()
    alone = copy.deepcopy(module)
    model = DDP(module, 50 / MIB, find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(x[rank], expert=rank % 2).backward()
        model.finish_gradient_synchronization()
        (sum(alone(x[r], expert=r % 2) for r in range(3)) / 3).backward()
        for (name, p), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (theirs.grad is None) == name.startswith("experts.2")
            if p.grad is not None:
                torch.testing.assert_close(p.grad, theirs.grad)
    return True


def test_find_unused_parameters_counts_missing_gradients_as_zero() -> None:
    assert run_on_shared_ranks(train_experts, 3) == [True] * 3


def train_experts_on_many_ranks() -> int:
    """Train on three ranks with `MAX_EXACT_RANKS` = 2; return how often names were compared."""
    compare = gradient_agreement.check_same_gradients
    calls = []

    def count(*args, **options) -> set[str]:
        calls.append(args)
        return compare(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_agreement, "check_same_gradients", count)
        for module in (gradient_agreement, ddp.ddp):
            patch.setattr(module, "MAX_EXACT_RANKS", 2)
        train_experts()
        with pytest.raises(ValueError, match="at most 2 ranks with divide_by_initial_world"):
            DDP(nn.Linear(2, 2)).join(divide_by_initial_world_size=False)
    return len(calls)


def test_names_are_compared_if_sums_over_many_ranks_may_be_rounded() -> None:
    assert run_on_shared_ranks(train_experts_on_many_ranks, 3) == [3] * 3


def train_with_uneven_inputs(by_initial: bool, accumulate: bool) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank r has r + 1 inputs; a parameter is unused on all ranks.
    inputs = torch.randn(world, world, 2, 4, generator=torch.Generator().manual_seed(7))
    module = Experts()
    alone = copy.deepcopy(module)
    model = DDP(module, 50 / MIB, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(rank + 1):
            optimizer.zero_grad()
            if accumulate:
                with model.no_sync():
                    model(inputs[rank, step], 0).backward()
            model(inputs[rank, step], 0).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    for step in range(world):
        reference.zero_grad()
        active = [r for r in range(world) if r >= step]
        losses = [(1 + accumulate) * alone(inputs[r, step], 0) for r in active]
        (sum(losses) / (world if by_initial else len(active))).backward()
        reference.step()
    # After the context, a step has no collectives except those of the buckets.
    calls = []
    monitored = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), monitored(*args, **kwargs))[1]
    optimizer.zero_grad()
    model(inputs[0, 0], 0).backward()
    model.finish_gradient_synchronization()
    dist.all_reduce = monitored
    assert len(calls) == model.meter.last.calls
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    return {name: p.tolist() for name, p in module.named_parameters()}


def train_without_reports(by_initial: bool, accumulate: bool) -> dict:
    """Train with uneven inputs, where an exchange of reports would be an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_agreement, "check_same_gradients", None)
        return train_with_uneven_inputs(by_initial, accumulate)


@pytest.mark.parametrize(
    ("by_initial", "accumulate"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
        pytest.param(False, True, marks=pytest.mark.exhaustive),
    ],
)
def test_join_averages_over_ranks_with_uneven_inputs(by_initial, accumulate) -> None:
    ranks = run_on_shared_ranks(train_without_reports, 3, by_initial, accumulate)
    assert ranks[0] == ranks[1] == ranks[2]


def test_parts_of_gradients_are_counted_in_the_first_step_that_computes_some() -> None:
    parts = GradientParts(2)
    parts.start_step()  # as in `join()` on a rank without inputs
    parts.start_step()
    assert [parts.has_more(index) for index in (0, 1, 1)] == [True] * 3
    parts.start_step()
    assert [parts.has_more(index) for index in (1, 0, 1)] == [True, False, False]


def train_sparse_with_uneven_inputs(by_initial: bool) -> None:
    """Average gradients of the last rank in the last step; earlier gradients are infinite."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    alone = copy.deepcopy(module)
    model = DDP(module)
    tokens = torch.tensor([0, 1])
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(1 + rank):
            model.zero_grad()
            is_last = step == world - 1
            (model(tokens).sum() * (1.0 if is_last else float("inf"))).backward()
    (alone(tokens).sum() / (world if by_initial else 1)).backward()
    if rank == world - 1:
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("by_initial", [True, False])
def test_join_averages_sparse_gradients_over_ranks_with_inputs(by_initial: bool) -> None:
    run_on_shared_ranks(train_sparse_with_uneven_inputs, 3, by_initial)

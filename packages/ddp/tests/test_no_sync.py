"""`no_sync()` around the forward pass, the backward pass or both, compared with torch's DDP."""

from contextlib import nullcontext
from itertools import product

import ddp
import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from worker_pool import run_on_shared_ranks

#: A pass: True if its forward pass, and True if its backward pass, runs inside `no_sync()`.
PASSES = list(product([False, True], repeat=2))


class Result:
    """An output in which no tensor is found."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Net(nn.Module):
    """Two layers, and a layer whose loss is an attribute instead of an output."""

    def __init__(self, output: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.auxiliary = nn.Linear(4, 1)
        self.output = output

    def forward(self, x: torch.Tensor):
        hidden = self.first(x).tanh()
        value = self.second(hidden)
        self.auxiliary_loss = self.auxiliary(hidden).sum()
        outputs = {"tensor": value, "dictionary": {"value": [value]}, "object": Result(value)}
        return outputs[self.output]


def compute_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    if isinstance(output, dict):
        (output,) = output["value"]
    elif isinstance(output, Result):
        output = output.value
    return output.square().sum() + getattr(model, "module", model).auxiliary_loss


def draw_batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank)).double()


def wrap(use_torch: bool, output: str) -> nn.Module:
    wrapper = nn.parallel.DistributedDataParallel if use_torch else DDP
    return wrapper(Net(output).double())


def copy_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run_sequence(sequence: list, use_torch: bool, output: str, is_compiled: bool = False) -> list:
    """Return the gradients after each pass."""
    model = wrap(use_torch, output)
    runnable = torch.compile(model, backend="eager") if is_compiled else model
    results = []
    for number, (is_forward_inside, is_backward_inside) in enumerate(sequence):
        with model.no_sync() if is_forward_inside else nullcontext():
            loss = compute_loss(runnable, draw_batch(number, dist.get_rank()))
        with model.no_sync() if is_backward_inside else nullcontext():
            loss.backward()
        results.append(copy_gradients(model))
    return results


def compare_sequences(sequences: dict[str, list], is_compiled: bool = False) -> int:
    """Compare the sequences of passes of each output with torch's DDP; return their number."""
    cases = [(output, case) for output, cases in sequences.items() for case in cases]
    for output, sequence in cases:
        ours = run_sequence(sequence, False, output, is_compiled)
        theirs = run_sequence(sequence, True, output)
        torch.testing.assert_close(ours, theirs, msg=f"{sequence} of {output}")
    return len(cases)


@pytest.mark.filterwarnings("default")
def test_no_sync_around_any_pass_gives_the_gradients_of_torch_ddp() -> None:
    single = list(product(PASSES, repeat=1))
    sequences = {
        "tensor": list(product(PASSES, repeat=2)),
        "dictionary": single,
        "object": single,
    }
    assert run_on_shared_ranks(compare_sequences, 2, sequences) == [24, 24]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("world", [2, 3])
def test_long_sequences_of_no_sync_give_the_gradients_of_torch_ddp(world: int) -> None:
    sequences = {
        "tensor": list(product(PASSES, repeat=4)),
        "dictionary": list(product(PASSES, repeat=3)),
        "object": list(product(PASSES, repeat=3)),
    }
    assert run_on_shared_ranks(compare_sequences, world, sequences, timeout=400) == [384] * world


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_no_sync_around_any_pass_of_a_compiled_wrapper() -> None:
    sequences = {"tensor": list(product(PASSES, repeat=2))}
    assert run_on_shared_ranks(compare_sequences, 2, sequences, True, timeout=400) == [16, 16]


def run_two_graphs(inside: tuple, order: tuple) -> None:
    """Run two forward passes, then their backward passes in `order`, or together.

    Gradients are averaged by the last backward pass of a synchronized forward pass.
    """
    model = wrap(False, "tensor")
    rank = dist.get_rank()
    losses = []
    for number in range(2):
        with model.no_sync() if inside[number] else nullcontext():
            losses.append(compute_loss(model, draw_batch(number, rank)))
    expected = Net("tensor").double()
    last_synchronized = -1
    for position, number in enumerate(order):
        if not inside[number]:
            last_synchronized = position
    if len(order) == 1:
        last_synchronized = 0
        order = (0, 1)
        sum(losses).backward()
        scales = {(number, other): 0.5 for number in order for other in range(2)}
    else:
        scales = {}
        for position, number in enumerate(order):
            losses[number].backward()
            for other in range(2):
                is_averaged = position <= last_synchronized
                scales[number, other] = 0.5 if is_averaged else float(other == rank)
    for (number, other), scale in scales.items():
        (scale * compute_loss(expected, draw_batch(number, other))).backward()
    torch.testing.assert_close(
        copy_gradients(model), copy_gradients(expected), msg=f"{inside} {order}"
    )


def run_pairs_of_graphs() -> bool:
    for inside in product([False, True], repeat=2):
        for order in ((0, 1), (1, 0)):
            run_two_graphs(inside, order)
        if not all(inside):
            run_two_graphs(inside, (0,))
    return True


def test_each_backward_pass_follows_its_own_forward_pass() -> None:
    assert run_on_shared_ranks(run_pairs_of_graphs, 2) == [True, True]


def count_accumulation_calls() -> list[int]:
    """Accumulate gradients once, and count three calls.

    The calls are counts of references, checks whether `.grad` is a view, and copies of tensors.
    """
    model = DDP(nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)]))
    num_references = num_checks = num_copies = 0
    count_references = ddp.aliased_gradients._count_references
    is_grad_view = ddp.bucket.Bucket.is_grad_view
    clone = torch.Tensor.clone

    def count_tensors(tensors: list[torch.Tensor]) -> list[int]:
        nonlocal num_references
        num_references += len(tensors)
        return count_references(tensors)

    def count_check(bucket: ddp.bucket.Bucket, slot: int) -> bool:
        nonlocal num_checks
        num_checks += 1
        return is_grad_view(bucket, slot)

    def count_copy(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_copies
        num_copies += 1
        return clone(tensor)

    with pytest.MonkeyPatch.context() as patch, model.no_sync():
        patch.setattr(ddp.aliased_gradients, "_count_references", count_tensors)
        patch.setattr(ddp.bucket.Bucket, "is_grad_view", count_check)
        patch.setattr(torch.Tensor, "clone", count_copy)
        model(torch.ones(1, 2)).sum().backward()
    return [num_references, num_checks, num_copies]


def test_cost_of_accumulation_is_linear_in_the_number_of_parameters() -> None:
    assert run_on_shared_ranks(count_accumulation_calls, 1) == [[40, 40, 0]]


def retry_after_an_error() -> bool:
    """Raise an error before the first gradient of a step, then repeat the step."""
    model = wrap(False, "tensor")
    rank = dist.get_rank()
    for is_inside in (False, True):
        model.zero_grad()
        with model.no_sync() if is_inside else nullcontext():
            output = model(draw_batch(0, rank))
        # The error comes after the wrapper's hook on the output, and before the first gradient.
        output.grad_fn.register_prehook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        compute_loss(model, draw_batch(0, rank)).backward()
        expected = Net("tensor").double()
        for other in range(dist.get_world_size()):
            (compute_loss(expected, draw_batch(0, other)) / dist.get_world_size()).backward()
        torch.testing.assert_close(copy_gradients(model), copy_gradients(expected))
    return True


def test_step_is_averaged_after_an_error_before_its_first_gradient() -> None:
    assert run_on_shared_ranks(retry_after_an_error, 2) == [True, True]

"""An argument that cannot be right is refused with what to pass instead."""

import pytest
import torch
from ddp import DDP, all_reduce_gradients
from torch import nn
from worker_pool import try_ranks


def bad_arguments() -> list[str]:
    said = []
    for arguments in (
        {"bucket_size_mb": 0},
        {"bucket_size_mb": float("nan")},
        {"gradient_dtype": torch.bfloat16, "compression": object()},
        {"allocate": lambda numel, dtype, group: torch.empty(numel - 1, dtype=dtype)},
    ):
        try:
            DDP(nn.Linear(2, 2), **arguments)
        except ValueError as error:
            said.append(str(error))
    model = DDP(nn.Embedding(5, 2))
    model.module.sparse = True
    try:
        model(torch.tensor([1])).sum().backward()
    except TypeError as error:
        said.append(str(error))
    return said


def test_bad_arguments_say_what_to_pass() -> None:
    (outcome,) = try_ranks(bad_arguments, 1)
    zero, nan, both, short, sparse = outcome.value
    assert "bucket_size_mb is 0; it must be above zero, or None" in zero
    assert "bucket_size_mb is nan" in nan
    assert "two ways to send" in both
    assert "allocate returned (10,)" in short
    assert "need (11,) torch.float32" in short
    assert "sparse=False" in sparse


def larger_than_memory() -> list:
    def exhausted(numel: int, **_: object) -> torch.Tensor:
        if numel > 100:
            raise RuntimeError(f"no memory for {numel} elements")
        return torch.empty(numel)

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    said = []
    for size in (2.0**60, 2.0**-13):
        try:
            model = DDP(net, size, allocate=exhausted)
        except RuntimeError as error:
            said.append(str(error))
    model(torch.ones(1, 8)).sum().backward()
    # Without allocate: a bucket is as large as its gradients, not as it might be.
    endless = DDP(net, 2.0**60)
    endless(torch.ones(1, 8)).sum().backward()
    return [*said, endless.meter.last.gradient_bytes]


def test_a_bucket_larger_than_memory_says_which_gradients_and_what_to_pass() -> None:
    (outcome,) = try_ranks(larger_than_memory, 1)
    said, whole = outcome.value
    assert "the bucket of '1.bias' and 3 more takes 604 bytes" in said
    assert "pass a smaller bucket_size_mb" in said
    assert whole == 4 * 144


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        DDP(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="init_process_group"):
        all_reduce_gradients(nn.Linear(2, 2))

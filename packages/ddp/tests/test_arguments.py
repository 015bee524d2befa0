"""Invalid arguments are refused with an error that names the remedy."""

import pytest
import torch
from ddp import DDP, all_reduce_gradients
from ddp.options import BucketSize, check_restricted_arguments, select_bucket_size
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from worker_pool import try_ranks


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ((BucketSize.DEFAULT, None, None), 25.0),
        ((BucketSize.DEFAULT, 10.0, None), 10.0),
        ((BucketSize.DEFAULT, 10.0, [1.0, 5.0]), (1.0, 5.0)),
        ((None, None, None), None),
        ((5.0, 5.0, []), 5.0),
    ],
)
def test_bucket_size_has_one_value(arguments: tuple, selected: object) -> None:
    assert select_bucket_size(*arguments) == selected


@pytest.mark.parametrize("size", [5.0, 25.0, None])
def test_two_bucket_sizes_are_refused(size: float | None) -> None:
    with pytest.raises(ValueError, match=f"bucket_size_mb={size} and bucket_cap_mb=10.0; pass one"):
        DDP(nn.Linear(2, 2), bucket_size_mb=size, bucket_cap_mb=10.0)
    with pytest.raises(ValueError, match=f"bucket_size_mb={size} and bucket_cap_mb_list="):
        DDP(nn.Linear(2, 2), bucket_size_mb=size, bucket_cap_mb_list=[1.0, 10.0])


def pass_invalid_arguments() -> list[str]:
    errors = []
    for arguments in (
        {"bucket_size_mb": 0},
        {"bucket_size_mb": float("nan")},
        {"mixed_precision": _MixedPrecision(torch.bfloat16)},
        {"allocate": lambda numel, dtype, group: torch.empty(numel - 1, dtype=dtype)},
    ):
        try:
            DDP(nn.Linear(2, 2), **arguments)
        except ValueError as error:
            errors.append(str(error))
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("table", torch.zeros(1).expand(3))
    DDP(expanded, forward_sync_buffers=False, init_sync=False)  # no rank copies the buffer
    try:
        DDP(expanded)
    except ValueError as error:
        errors.append(str(error))
    sparse_buffer = nn.Linear(2, 2)
    sparse_buffer.register_buffer("adjacency", torch.eye(3).to_sparse())
    for module in (sparse_buffer, nn.Sequential(DDP(nn.Linear(2, 2)))):
        try:
            DDP(module)
        except ValueError as error:
            errors.append(str(error))
    model = DDP(nn.Embedding(5, 2))
    model.module.sparse = True
    try:
        model(torch.tensor([1])).sum().backward()
    except TypeError as error:
        errors.append(str(error))
    return errors


def test_invalid_arguments_are_refused_with_the_remedy() -> None:
    (outcome,) = try_ranks(pass_invalid_arguments, 1)
    zero, nan, mixed, short, expanded, sparse_buffer, nested, sparse = outcome.value
    assert "elements of 'table' share memory" in expanded
    assert "expected bucket_size_mb > 0, got 0; pass None" in zero
    assert "bucket_size_mb > 0, got nan" in nan
    assert "is not supported: torch.autocast and gradient_dtype replace it" in mixed
    assert "got (10,), torch.float32" in short
    assert "shape (11,), torch.float32" in short
    assert "'adjacency' to be a dense tensor, got torch.sparse_coo" in sparse_buffer
    assert "got '0' of type DDP; wrap its .module" in nested
    assert "sparse=False" in sparse


def allocate_too_much() -> list:
    def exhausted(numel: int, **_: object) -> torch.Tensor:
        if numel > 100:
            raise RuntimeError(f"no memory for {numel} elements")
        return torch.empty(numel)

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    errors = []
    for size in (2.0**60, 2.0**-13):
        try:
            model = DDP(net, size, allocate=exhausted)
        except RuntimeError as error:
            errors.append(str(error))
    model(torch.ones(1, 8)).sum().backward()
    # A bucket has the size of its gradients, not the size limit.
    endless = DDP(net, 2.0**60)
    endless(torch.ones(1, 8)).sum().backward()
    return [*errors, endless.meter.last.gradient_bytes]


def test_bucket_larger_than_memory_names_gradients_and_remedy() -> None:
    (outcome,) = try_ranks(allocate_too_much, 1)
    error, whole = outcome.value
    assert "the bucket of '1.bias' and 3 more takes 604 bytes" in error
    assert "pass a smaller bucket_size_mb" in error
    assert whole == 4 * 144


def test_missing_process_group_names_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        DDP(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="init_process_group"):
        all_reduce_gradients(nn.Linear(2, 2))


def test_error_for_an_unsupported_argument_does_not_print_its_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 100))
    with pytest.raises(ValueError, match="no reduction can be delayed") as error:
        check_restricted_arguments({"delay_all_reduce_named_params": [("weight", weight)]})
    assert len(str(error.value)) < 200

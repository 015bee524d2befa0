"""Invalid arguments are refused with an error that names the remedy."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp import DDP, all_reduce_gradients
from ddp.options import BucketSize, check_restricted_arguments, select_bucket_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel.distributed import _MixedPrecision
from worker_pool import run_on_shared_ranks


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ((BucketSize.DEFAULT, None, None), (25.0,)),
        ((BucketSize.DEFAULT, 10.0, None), (10.0,)),
        ((BucketSize.DEFAULT, 10.0, [1.0, 5.0]), (1.0, 5.0)),
        ((None, None, None), ()),
        ((5.0, 5.0, []), (5.0,)),
    ],
)
def test_bucket_size_has_one_value(arguments: tuple, selected: object) -> None:
    assert select_bucket_size(*arguments) == selected


@pytest.mark.parametrize("size", [5.0, 25.0, None])
def test_two_bucket_sizes_are_refused(size: float | None) -> None:
    with pytest.raises(ValueError, match=rf"bucket_size_mb={size} and \(10\.0,\) MiB in .*; pass"):
        DDP(nn.Linear(2, 2), bucket_size_mb=size, bucket_cap_mb=10.0)
    with pytest.raises(ValueError, match=rf"bucket_size_mb={size} and \(1\.0, 10\.0\) MiB in"):
        DDP(nn.Linear(2, 2), bucket_size_mb=size, bucket_cap_mb_list=[1.0, 10.0])


#: Values of `sync_buffers` and of torch's names for it, and two results: whether each step copies
#: buffers, and whether the constructor copies them.
BUFFER_ARGUMENTS = [
    ({}, True, True),
    ({"sync_buffers": False}, False, True),
    ({"forward_sync_buffers": False}, False, True),
    ({"forward_sync_buffers": True, "broadcast_buffers": False}, True, True),
    ({"forward_sync_buffers": False, "broadcast_buffers": True}, False, True),
    ({"broadcast_buffers": False}, False, False),
    ({"broadcast_buffers": True}, True, True),
    ({"sync_buffers": True, "forward_sync_buffers": True}, True, True),
    ({"sync_buffers": False, "broadcast_buffers": False}, False, False),
]


def synchronize_buffers(arguments: dict, wrapper: type) -> list[float]:
    """Return the buffer after wrapping, after a step and after `join()`, on this rank."""
    module = nn.Linear(1, 1)
    module.register_buffer("table", torch.tensor(float(dist.get_rank())))
    model = wrapper(module, **arguments)
    values = [module.table.item()]
    with model.join():
        for _ in range(1 + dist.get_rank()):
            module.table.fill_(2 + dist.get_rank())
            model(torch.ones(1, 1)).sum().backward()
            values.append(module.table.item())
    return [*values[:2], module.table.item()]


def compare_buffer_arguments() -> list[list]:
    torch_ddp = nn.parallel.DistributedDataParallel
    names_of_torch = inspect.signature(torch_ddp).parameters.keys()
    outcomes = []
    for arguments, _, _ in BUFFER_ARGUMENTS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = synchronize_buffers(arguments, DDP)
        outcomes.append([values, any(c.category is FutureWarning for c in caught)])
        if arguments.keys() <= names_of_torch:
            assert values == synchronize_buffers(arguments, torch_ddp), arguments
    return outcomes


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_name_of_sync_buffers_selects_it_as_in_torch() -> None:
    outcomes = zip(BUFFER_ARGUMENTS, *run_on_shared_ranks(compare_buffer_arguments, 2), strict=True)
    for (arguments, in_step, in_constructor), (first, first_warned), (second, warned) in outcomes:
        # In a step and at the end of join(), the highest rank with inputs is the source.
        assert first == ([0, 3, 3] if in_step else [0, 2, 2]), arguments
        assert second == [0 if in_constructor else 1, 3, 3], arguments
        assert first_warned == warned == ("broadcast_buffers" in arguments), arguments


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("synonym", ["forward_sync_buffers", "broadcast_buffers"])
@pytest.mark.parametrize("value", [False, True])
def test_contradictory_values_of_sync_buffers_are_refused(synonym: str, value: bool) -> None:
    message = f"got sync_buffers={not value} and {synonym}={value}; pass one of them"
    with pytest.raises(ValueError, match=message):
        DDP(nn.Linear(2, 2), sync_buffers=not value, **{synonym: value})


def pass_invalid_arguments() -> list[str]:
    errors = []
    memory = torch.empty(100)
    for arguments in (
        {"bucket_size_mb": 0},
        {"bucket_size_mb": float("nan")},
        {"mixed_precision": _MixedPrecision(torch.bfloat16)},
        {"gradient_dtype": "bfloat16"},
        {"allocate": lambda numel, dtype, group: torch.empty(numel - 1, dtype=dtype)},
        {"allocate": lambda numel, dtype, group: torch.empty(2 * numel, dtype=dtype)[::2]},
        {"allocate": lambda numel, dtype, group: memory[:numel], "bucket_size_mb": None},
    ):
        try:
            DDP(nn.Linear(2, 2), **arguments)
        except ValueError as error:
            errors.append(str(error))
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("table", torch.zeros(1).expand(3))
    DDP(expanded, sync_buffers=False, init_sync=False)  # no rank copies the buffer
    try:
        DDP(expanded)
    except ValueError as error:
        errors.append(str(error))
    sparse_buffer = nn.Linear(2, 2)
    sparse_buffer.register_buffer("adjacency", torch.eye(3).to_sparse())
    other_dtype = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    other_dtype.weight.grad_dtype = torch.float32
    for module in (sparse_buffer, nn.Sequential(DDP(nn.Linear(2, 2))), other_dtype):
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
    (errors,) = run_on_shared_ranks(pass_invalid_arguments, 1)
    zero, nan, mixed, named, short, strided, shared, *others = errors
    expanded, sparse_buffer, nested, dtype, sparse = others
    assert "elements of 'table' share memory" in expanded
    assert "expected bucket_size_mb > 0, got 0; pass None" in zero
    assert "bucket_size_mb > 0, got nan" in nan
    assert "is not supported: torch.autocast and gradient_dtype replace it" in mixed
    assert "at least 16 bits, got 'bfloat16'; pass torch.bfloat16" in named
    assert "got (10,) with strides (1,), torch.float32" in short
    assert "shape (11,), torch.float32" in short
    assert "a contiguous tensor of shape (11,)" in strided
    assert "with strides (2,)" in strided
    assert "overlapping memory for the bucket of" in shared
    assert "'adjacency' to be a dense tensor, got torch.sparse_coo" in sparse_buffer
    assert "got '0' of type DDP; wrap its .module" in nested
    assert "grad_dtype=torch.float32; pass gradient_dtype" in dtype
    assert "sparse=False" in sparse


def refuse_groups_devices_and_tensors() -> None:
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (1,))
    for arguments, error, message in (
        ({"group": group, "device_mesh": mesh}, RuntimeError, "expected one of group"),
        ({"process_group": group, "device_mesh": mesh}, RuntimeError, "both process_group and dev"),
        ({"group": group, "process_group": group}, RuntimeError, "got two of them"),
        ({"device_ids": [0, 1]}, ValueError, r"at most one entry in device_ids, got \[0, 1\]"),
        ({"device_ids": [0]}, ValueError, r"a module on one GPU, got a module on \['cpu'\]"),
        ({"devices": [0]}, TypeError, "expected arguments of DDP .*, got 'devices'"),
    ):
        with pytest.raises(error, match=message):
            DDP(nn.Linear(2, 2), **arguments)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device; call module\.to_"):
        DDP(nn.Linear(2, 2, device="meta"))
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="got DTensor parameter 'weight'"):
        DDP(sharded)


def test_groups_devices_and_tensors_that_cannot_be_used_are_refused() -> None:
    run_on_shared_ranks(refuse_groups_devices_and_tensors, 1)


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
    ((error, whole),) = run_on_shared_ranks(allocate_too_much, 1)
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

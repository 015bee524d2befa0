"""The collectives, with the names and arguments of torch.distributed.

Each takes `algorithm`: "auto" lets the cost model pick; "shared_memory", "ring", ... insist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check, op_name
from collectives.communicator import Communicator, communicator
from collectives.shared_memory.fingerprint import Call

ReduceOp = dist.ReduceOp


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Reduce `tensor` over all ranks, in place."""
    if not tensor.is_cpu and algorithm == "auto":
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    comm, name = communicator(group), op_name(op)
    check(name, tensor.dtype)
    call = _call(comm, "all_reduce", tensor, algorithm, op=name)

    def body(packed: bytes) -> None:
        flat = _flat(tensor)
        dispatch.all_reduce(comm, call, packed, flat)
        _copy_back(tensor, flat)

    return comm.run(call, tensor, body, async_op=async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """output = this rank's slice of the reduction of `input`, which is `world` times as long."""
    if not output.is_cpu and algorithm == "auto":
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    comm, name = communicator(group), op_name(op)
    check(name, input.dtype)
    _check_pair("input", input, "output", output, comm.world)
    call = _call(comm, "reduce_scatter", input, algorithm, op=name)

    def body(packed: bytes) -> None:
        out, flat = _flat(output), _flat(input)
        dispatch.reduce_scatter(comm, call, packed, out, flat)
        _copy_back(output, out)

    return comm.run(call, input, body, async_op=async_op, result=output)


def all_gather_into_tensor(
    output: Tensor,
    input: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """output = the inputs of all ranks, one after the other."""
    if not output.is_cpu and algorithm == "auto":
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)
    comm = communicator(group)
    _check_pair("output", output, "input", input, comm.world)
    call = _call(comm, "all_gather", input, algorithm)

    def body(packed: bytes) -> None:
        out, own = _flat(output), _flat(input)
        dispatch.all_gather(comm, call, packed, out, own)
        _copy_back(output, out)

    return comm.run(call, input, body, async_op=async_op, result=output)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Give every rank the tensor of rank `src` (`group_src` counts within the group)."""
    if not tensor.is_cpu and algorithm == "auto":
        return dist.broadcast(tensor, src, group=group, async_op=async_op, group_src=group_src)
    comm = communicator(group)
    root = _root(comm, src, group, group_src)
    call = _call(comm, "broadcast", tensor, algorithm, root=root)

    def body(packed: bytes) -> None:
        flat = _flat(tensor)
        dispatch.broadcast(comm, call, packed, flat)
        _copy_back(tensor, flat)

    return comm.run(call, tensor, body, async_op=async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Send the i-th part of `input` (rows) to rank i; `output` collects what comes, in order."""
    if not output.is_cpu and algorithm == "auto":
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    comm = communicator(group)
    if output.dtype != input.dtype:
        raise TypeError(f"output is {output.dtype} but input is {input.dtype}; make them the same")
    lengths_out = _lengths("output", output, output_split_sizes, comm.world)
    lengths_in = _lengths("input", input, input_split_sizes, comm.world)
    call = replace(_call(comm, "all_to_all", input, algorithm), shape=())

    def body(packed: bytes) -> None:
        out, flat = _flat(output), _flat(input)
        dispatch.all_to_all(comm, call, packed, _split(out, lengths_out), _split(flat, lengths_in))
        _copy_back(output, out)

    return comm.run(call, input, body, async_op=async_op, result=output)


def barrier(group: Any = None, async_op: bool = False) -> dist.Work | None:
    """Return when every rank of the group has called it."""
    comm, nothing = communicator(group), torch.empty(0)
    call = Call("barrier", (), nothing.dtype)
    return comm.run(call, nothing, lambda packed: dispatch.barrier(comm, packed), async_op=async_op)


def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: Any = None
) -> Tensor:
    """A tensor of zeros in memory that all ranks of the host map, reduced without a copy.

    Every rank of the group must call it, with the same size. Where ranks cannot share memory the
    tensor is an ordinary one: everything works, slower.
    """
    shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    comm, dtype = communicator(group), dtype or torch.get_default_dtype()
    call = Call("shared_empty", tuple(shape), dtype)
    made: list[Tensor] = []

    def body(packed: bytes) -> None:
        dispatch.agree(comm, packed)
        made.append(comm.topology.allocate(shape.numel(), dtype))

    comm.run(call, torch.empty(0), body, async_op=False)
    return made[0].view(shape)


def _call(
    comm: Communicator, kind: str, tensor: Tensor, algorithm: str, *, op: str = "", root: int = 0
) -> Call:
    dispatch.validate(comm, kind, algorithm, tensor.dtype, op)
    if tensor.is_cuda and algorithm in ("shared_memory", "hierarchical"):
        raise ValueError(f'{algorithm} takes CPU tensors; use "ring", or "auto" for NCCL itself')
    return _remembered(kind, tensor.shape, tensor.dtype, op, root, algorithm)


# A training loop makes the same few calls again and again.
@lru_cache(maxsize=1024)
def _remembered(
    kind: str, shape: torch.Size, dtype: torch.dtype, op: str, root: int, algorithm: str
) -> Call:
    return Call(kind, tuple(shape), dtype, op, root, algorithm)


def _flat(tensor: Tensor) -> Tensor:
    """The tensor in one dimension: itself if it is contiguous, else a copy."""
    dense = tensor.detach().contiguous()
    # Not `view`: a single element may keep a stride that is not 1.
    return dense.as_strided((dense.numel(),), (1,))


def _copy_back(tensor: Tensor, flat: Tensor) -> None:
    # Only a tensor that was not contiguous was copied.
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _check_pair(long_name: str, long: Tensor, short_name: str, short: Tensor, world: int) -> None:
    if long.dtype != short.dtype:
        raise TypeError(
            f"{long_name} is {long.dtype} but {short_name} is {short.dtype}; make them the same"
        )
    if long.numel() != short.numel() * world:
        raise ValueError(
            f"{long_name} has {long.numel()} elements; {world} ranks with {short.numel()} each in "
            f"{short_name} need {short.numel() * world}"
        )


def _root(comm: Communicator, src: int | None, group: Any, group_src: int | None) -> int:
    if (src is None) == (group_src is None):
        raise ValueError("give the source as either src (global rank) or group_src (group's rank)")
    if group_src is None:
        group_src = src if group is None else dist.get_group_rank(group, src)  # type: ignore[arg-type]
    assert group_src is not None
    if not 0 <= group_src < comm.world:
        raise ValueError(f"source rank {group_src} is not one of the group's {comm.world} ranks")
    return group_src


def _lengths(what: str, tensor: Tensor, sizes: list[int] | None, world: int) -> list[int]:
    """Elements for each rank, from rows for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % world:
            raise ValueError(
                f"{what} has {rows} rows, not a multiple of {world} ranks; give {what}_split_sizes"
            )
        sizes = [rows // world] * world
    if len(sizes) != world or sum(sizes) != rows:
        raise ValueError(
            f"{what}_split_sizes {sizes} must be {world} numbers that sum to {rows} rows"
        )
    return [size * (tensor.numel() // rows if rows else 0) for size in sizes]


def _split(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]

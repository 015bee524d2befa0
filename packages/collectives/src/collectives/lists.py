"""Collectives with lists of tensors or with a root.

Each function runs the algorithm of another collective:

    all_gather        all_gather_into_tensor, whose output is split into the list
    reduce_scatter    reduce_scatter_tensor, whose input is the concatenated list
    all_to_all        all_to_all_single; the parts are separate tensors
    gather, scatter   an all-to-all in which only the root receives or sends
    reduce            an all-reduce whose result only the root keeps, or gloo's reduce

They therefore compare calls, time out and report lost ranks like the functions in `collective.py`,
and raise the same errors. Lists have one tensor per rank, in rank order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check_dtype, get_op_name
from collectives.arguments import (
    check_memory,
    copy_back,
    describe_call,
    flatten,
    get_root_rank,
    separate,
    skip_non_members,
)
from collectives.communicator import Communicator
from collectives.groups import get_communicator
from collectives.shared_memory.fingerprint import Call

Tensors = Sequence[Tensor]


@skip_non_members
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Reduce `tensor` over all ranks into the tensor of rank `dst`.

    The tensors of the other ranks do not change. `dst` is a global rank; `group_dst` is the rank in
    the group and can be passed instead.
    """
    comm = get_communicator(group)
    name = get_op_name(op)
    check_dtype(name, tensor.dtype)
    root = get_root_rank(comm, dst, group, group_dst)
    call = describe_call(comm, "reduce", tensor, "auto", op=name, root=root, outputs=[tensor])

    def run_call() -> None:
        flat = flatten(tensor)
        result = flat if comm.rank == root else flat.clone()
        dispatch.run(comm, call, result)
        if comm.rank == root:
            copy_back(tensor, result)

    return comm.run(call, tensor, run_call, async_op=async_op)


@skip_non_members
def gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Copy the tensors of all ranks to `gather_list`, which only rank `dst` passes.

    All tensors have the same dtype and number of elements. `dst` is a global rank, by default 0;
    `group_dst` is the rank in the group and can be passed instead.
    """
    comm = get_communicator(group)
    root = get_root_rank(comm, 0 if dst is None and group_dst is None else dst, group, group_dst)
    outputs = _check_root_list("gather_list", comm, root, gather_list, tensor)
    call = describe_call(comm, "gather", tensor, "auto", root=root, outputs=outputs)
    inputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world_size)]
    return _exchange(comm, call, outputs, inputs, async_op)


@skip_non_members
def scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """Copy the i-th tensor of `scatter_list`, which only rank `src` passes, to rank i's `tensor`.

    All tensors have the same dtype and number of elements. `src` is a global rank, by default 0;
    `group_src` is the rank in the group and can be passed instead.
    """
    comm = get_communicator(group)
    root = get_root_rank(comm, 0 if src is None and group_src is None else src, group, group_src)
    inputs = _check_root_list("scatter_list", comm, root, scatter_list, tensor)
    call = describe_call(comm, "scatter", tensor, "auto", root=root, outputs=[tensor])
    outputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world_size)]
    return _exchange(comm, call, outputs, inputs, async_op, [tensor])


@skip_non_members
def all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Copy the tensors of all ranks to `tensor_list`.

    Sizes may differ between ranks: `tensor_list[i]` has as many elements as the tensor of rank i.
    """
    comm = get_communicator(group)
    outputs = _check_list("tensor_list", comm, tensor_list, tensor, comm.rank)
    sizes = [output.numel() for output in outputs]
    call = _describe_list(comm, "all_gather", tensor, sizes, outputs=outputs)

    def run_call() -> None:
        local = _pad(flatten(tensor), max(sizes))
        gathered = local.new_empty(comm.world_size * max(sizes))
        dispatch.run(comm, call, gathered, local)
        for output, part in zip(outputs, gathered.tensor_split(comm.world_size), strict=True):
            copy_back(output, part[: output.numel()])

    return comm.run(call, outputs, run_call, async_op=async_op)


@skip_non_members
def reduce_scatter(
    output: Tensor,
    input_list: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce the i-th tensors of all ranks' lists into the output of rank i.

    Sizes may differ within a list: `input_list[i]` has as many elements as the output of rank i.
    """
    comm = get_communicator(group)
    name = get_op_name(op)
    check_dtype(name, output.dtype)
    inputs = _check_list("input_list", comm, input_list, output, comm.rank)
    sizes = [tensor.numel() for tensor in inputs]
    call = _describe_list(comm, "reduce_scatter", output, sizes, op=name, outputs=[output])

    def run_call() -> None:
        flat_input = torch.cat([_pad(flatten(tensor), max(sizes)) for tensor in inputs])
        flat_output = _pad(flatten(output), max(sizes))
        dispatch.run(comm, call, flat_output, flat_input)
        copy_back(output, flat_output[: output.numel()])

    return comm.run(call, output, run_call, async_op=async_op)


@skip_non_members
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Send the i-th input to rank i, and write the tensor of rank i to the i-th output.

    Sizes may differ: output i has as many elements as the input that rank i sends to this rank.
    """
    comm = get_communicator(group)
    outputs = _check_list("output_tensor_list", comm, output_tensor_list)
    inputs = _check_list("input_tensor_list", comm, input_tensor_list)
    # Shapes may differ between ranks. The lengths are compared when the call runs.
    call = describe_call(comm, "all_to_all", inputs[0], "auto", outputs=outputs, shape=())
    return _exchange(comm, call, outputs, inputs, async_op)


def _exchange(
    comm: Communicator,
    call: Call,
    outputs: Tensors,
    inputs: Tensors,
    async_op: bool,
    result: Tensors | None = None,
) -> dist.Work | None:
    """Run a call that copies inputs[j] of rank i to outputs[i] of rank j, for all i and j.

    `result` are the tensors of the handle's result; by default the outputs.
    """
    for tensor in (*outputs, *inputs):
        check_memory(call.kind, tensor, inputs[0])
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(
            f"{call.kind} expected tensors of one dtype, got {sorted(map(str, dtypes))}; convert "
            f"them to {call.dtype}"
        )

    def run_call() -> None:
        flat_outputs = [flatten(output) for output in outputs]
        flat_inputs = [separate(flatten(tensor), flat_outputs) for tensor in inputs]
        dispatch.all_to_all(comm, call, flat_outputs, flat_inputs)
        for output, part in zip(outputs, flat_outputs, strict=True):
            copy_back(output, part)

    return comm.run(call, result or outputs, run_call, async_op=async_op)


def _describe_list(
    comm: Communicator, kind: str, tensor: Tensor, sizes: list[int], **fields: Any
) -> Call:
    """Return the `Call` of a list of tensors; `sizes` must be the same on all ranks."""
    if len(set(sizes)) == 1:
        return describe_call(comm, kind, tensor, "auto", **fields)
    shapes = tuple((size,) for size in sizes)
    return describe_call(comm, kind, tensor, "auto", shape=(sum(sizes),), shapes=shapes, **fields)


def _pad(flat: Tensor, length: int) -> Tensor:
    """Return the tensor, or a copy of `length` elements with zeros at the end if it is shorter."""
    if flat.numel() == length:
        return flat
    padded = flat.new_zeros(length)
    padded[: flat.numel()] = flat
    return padded


def _check_list(
    name: str,
    comm: Communicator,
    tensors: Tensors | None,
    like: Tensor | None = None,
    position: int | None = None,
) -> list[Tensor]:
    """Return the list; raise an error unless it has one tensor per rank and they match `like`.

    Every tensor must have the dtype of `like`, and its number of elements. With `position`, only
    the tensor at that position must have that number.
    """
    length = 0 if tensors is None else len(tensors)
    if tensors is None or length != comm.world_size:
        raise ValueError(
            f"expected {name} to have one tensor for each of {comm.world_size} ranks, got {length} "
            f"tensors on rank {comm.rank}"
        )
    if like is None:
        return list(tensors)
    for i, tensor in enumerate(tensors):
        check_memory(name, tensor, like)
        if tensor.dtype != like.dtype:
            raise ValueError(
                f"expected {name}[{i}] to have the dtype {like.dtype} of this rank's tensor, got "
                f"{tensor.dtype}; convert one of them"
            )
        if tensor.numel() != like.numel() and position in (None, i):
            raise ValueError(
                f"expected {name}[{i}] to have {like.numel()} elements, as this rank's tensor has, "
                f"got {tensor.numel()}; pass a tensor of that size"
            )
    return list(tensors)


def _check_root_list(
    name: str, comm: Communicator, root: int, tensors: Tensors | None, like: Tensor
) -> list[Tensor]:
    """Return the root's list, or empty tensors on other ranks, which must not pass a list."""
    if comm.rank == root:
        return _check_list(name, comm, tensors, like)
    if tensors:
        raise ValueError(
            f"expected {name} on the root, rank {root}, only, got a list on rank {comm.rank}; pass "
            "None on this rank"
        )
    return [like.new_empty(0) for _ in range(comm.world_size)]

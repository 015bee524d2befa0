"""Collectives with lists of tensors or with a root, composed of the other collectives.

    all_gather, reduce_scatter    the collective on single tensors, whose parts are the list
    all_to_all                    the same steps; lengths may differ
    gather, scatter               an all-to-all in which only the root receives or sends
    reduce                        an all-reduce whose result only the root keeps

They are therefore compared across ranks, end at the timeout and name lost ranks as the others do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check_dtype, op_name
from collectives.arguments import copy_back, describe_call, flatten, for_members, root_rank
from collectives.communicator import Communicator, communicator
from collectives.shared_memory.fingerprint import Call

Tensors = Sequence[Tensor]


@for_members
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Reduce over all ranks into the tensor of rank `dst`; other ranks' tensors do not change."""
    comm = communicator(group)
    name = op_name(op)
    check_dtype(name, tensor.dtype)
    root = root_rank(comm, dst, group, group_dst)
    call = describe_call(comm, "reduce", tensor, "auto", op=name, root=root, outputs=[tensor])

    def body(packed: bytes) -> None:
        flat = flatten(tensor)
        result = flat if comm.rank == root else flat.clone()
        dispatch.run(comm, call, packed, result)
        if comm.rank == root:
            copy_back(tensor, result)

    return comm.run(call, tensor, body, async_op=async_op)


@for_members
def gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Fill the list of rank `dst` with every rank's tensor, in rank order."""
    comm = communicator(group)
    root = root_rank(comm, 0 if dst is None and group_dst is None else dst, group, group_dst)
    outputs = _check_root_list("gather_list", comm, root, gather_list, tensor)
    call = describe_call(comm, "gather", tensor, "auto", root=root, outputs=outputs)
    inputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world)]
    return _exchange(comm, call, outputs, inputs, async_op)


@for_members
def scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """Copy the i-th tensor in the list of rank `src` to the tensor of rank i."""
    comm = communicator(group)
    root = root_rank(comm, 0 if src is None and group_src is None else src, group, group_src)
    inputs = _check_root_list("scatter_list", comm, root, scatter_list, tensor)
    call = describe_call(comm, "scatter", tensor, "auto", root=root, outputs=[tensor])
    outputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world)]
    return _exchange(comm, call, outputs, inputs, async_op, [tensor])


@for_members
def all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Fill every rank's list with every rank's tensor, in rank order."""
    comm = communicator(group)
    outputs = _check_list("tensor_list", comm, tensor_list, tensor)
    call = describe_call(comm, "all_gather", tensor, "auto", outputs=outputs)

    def body(packed: bytes) -> None:
        local = flatten(tensor)
        gathered = local.new_empty(comm.world * local.numel())
        dispatch.run(comm, call, packed, gathered, local)
        # `chunk` returns a single part of an empty tensor.
        for output, part in zip(outputs, gathered.chunk(comm.world), strict=local.numel() > 0):
            copy_back(output, part)

    return comm.run(call, tensor, body, async_op=async_op, result=outputs)


@for_members
def reduce_scatter(
    output: Tensor,
    input_list: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce the i-th tensors of all ranks' lists into the output of rank i."""
    comm = communicator(group)
    name = op_name(op)
    check_dtype(name, output.dtype)
    inputs = _check_list("input_list", comm, input_list, output)
    call = describe_call(comm, "reduce_scatter", output, "auto", op=name, outputs=[output])

    def body(packed: bytes) -> None:
        flat_output = flatten(output)
        flat_input = torch.cat([flatten(tensor) for tensor in inputs])
        dispatch.run(comm, call, packed, flat_output, flat_input)
        copy_back(output, flat_output)

    return comm.run(call, inputs, body, async_op=async_op, result=output)


@for_members
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Send the i-th input to rank i; write the received tensors to the outputs in rank order."""
    comm = communicator(group)
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
    """Copy inputs[j] of rank i to outputs[i] of rank j, for all i and j."""
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(
            f"{call.kind} expected tensors of one dtype, got {sorted(map(str, dtypes))}; convert "
            f"them to {call.dtype}"
        )

    def body(packed: bytes) -> None:
        flat_outputs = [flatten(output) for output in outputs]
        flat_inputs = [flatten(tensor) for tensor in inputs]
        dispatch.all_to_all(comm, call, packed, flat_outputs, flat_inputs)
        for output, part in zip(outputs, flat_outputs, strict=True):
            copy_back(output, part)

    return comm.run(call, inputs, body, async_op=async_op, result=result or outputs)


def _check_list(
    name: str, comm: Communicator, tensors: Tensors | None, like: Tensor | None = None
) -> list[Tensor]:
    """Return the list if it has one tensor per rank, of the size and dtype of `like` if passed."""
    if not tensors or len(tensors) != comm.world:
        count = len(tensors) if tensors else "none"
        raise ValueError(f"{name} needs a tensor for each of {comm.world} ranks, but has {count}")
    for i, tensor in enumerate(tensors):
        if like is not None and (tensor.numel(), tensor.dtype) != (like.numel(), like.dtype):
            raise ValueError(
                f"{name}[{i}] has {tensor.numel()} elements of {tensor.dtype}; expected as many as "
                f"this rank's tensor: {like.numel()} elements of {like.dtype}"
            )
    return list(tensors)


def _check_root_list(
    name: str, comm: Communicator, root: int, tensors: Tensors | None, like: Tensor
) -> list[Tensor]:
    """Return the root's list; on other ranks, which must not pass one, return empty tensors."""
    if comm.rank == root:
        return _check_list(name, comm, tensors, like)
    if tensors:
        raise ValueError(
            f"{name} must be passed on the root only: it is passed on rank {comm.rank}, but rank "
            f"{root} is the root"
        )
    return [like.new_empty(0) for _ in range(comm.world)]

"""Collectives with lists of tensors and with a root, made of the others.

    all_gather, reduce_scatter    those of single tensors, whose parts are the list's tensors
    all_to_all                    the same steps; lengths may differ
    gather, scatter               an all-to-all in which all but the root send (or receive) nothing
    reduce                        an all-reduce whose result the root alone keeps

So they are compared, end at the timeout and name the odd rank as the others do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check, op_name
from collectives.arguments import copy_back, describe_call, flatten, root_of
from collectives.communicator import Communicator, communicator
from collectives.shared_memory.fingerprint import Call

Tensors = Sequence[Tensor]


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False, group_dst: int | None = None,
) -> dist.Work | None:  # fmt: skip
    """Reduce over all ranks into the tensor of rank `dst`; the others' stay as they are."""
    comm, name = communicator(group), op_name(op)
    check(name, tensor.dtype)
    root = root_of(comm, dst, group, group_dst)
    call = describe_call(comm, "reduce", tensor, "auto", op=name, root=root, written=[tensor])

    def body(packed: bytes) -> None:
        flat = flatten(tensor)
        result = flat if comm.rank == root else flat.clone()
        dispatch.run(comm, call, packed, result)
        if comm.rank == root:
            copy_back(tensor, result)

    return comm.run(call, tensor, body, async_op=async_op)


def gather(
    tensor: Tensor, gather_list: Tensors | None = None, dst: int | None = None, group: Any = None,
    async_op: bool = False, group_dst: int | None = None,
) -> dist.Work | None:  # fmt: skip
    """Fill the list of rank `dst` with every rank's tensor, in the order of the ranks."""
    comm = communicator(group)
    root = root_of(comm, 0 if dst is None and group_dst is None else dst, group, group_dst)
    outputs = _of_the_root("gather_list", comm, root, gather_list, tensor)
    call = describe_call(comm, "gather", tensor, "auto", root=root, written=outputs)
    inputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world)]
    return _exchange(comm, call, outputs, inputs, async_op)


def scatter(
    tensor: Tensor, scatter_list: Tensors | None = None, src: int | None = None, group: Any = None,
    async_op: bool = False, group_src: int | None = None,
) -> dist.Work | None:  # fmt: skip
    """tensor = the one for this rank in the list of rank `src`."""
    comm = communicator(group)
    root = root_of(comm, 0 if src is None and group_src is None else src, group, group_src)
    inputs = _of_the_root("scatter_list", comm, root, scatter_list, tensor)
    call = describe_call(comm, "scatter", tensor, "auto", root=root, written=[tensor])
    outputs = [tensor if rank == root else tensor.new_empty(0) for rank in range(comm.world)]
    return _exchange(comm, call, outputs, inputs, async_op, [tensor])


def all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False
) -> dist.Work | None:
    """Fill every rank's list with every rank's tensor, in the order of the ranks."""
    comm = communicator(group)
    outputs = _one_each("tensor_list", comm, tensor_list, tensor)
    call = describe_call(comm, "all_gather", tensor, "auto", written=outputs)

    def body(packed: bytes) -> None:
        own = flatten(tensor)
        gathered = own.new_empty(comm.world * own.numel())
        dispatch.run(comm, call, packed, gathered, own)
        for output, part in zip(outputs, gathered.chunk(comm.world), strict=own.numel() > 0):
            copy_back(output, part)

    return comm.run(call, tensor, body, async_op=async_op, result=outputs)


def reduce_scatter(
    output: Tensor, input_list: Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:  # fmt: skip
    """output = the reduction over all ranks of the tensor for this rank in their lists."""
    comm, name = communicator(group), op_name(op)
    check(name, output.dtype)
    inputs = _one_each("input_list", comm, input_list, output)
    call = describe_call(comm, "reduce_scatter", output, "auto", op=name, written=[output])

    def body(packed: bytes) -> None:
        out, flat = flatten(output), torch.cat([flatten(each) for each in inputs])
        dispatch.run(comm, call, packed, out, flat)
        copy_back(output, out)

    return comm.run(call, inputs, body, async_op=async_op, result=output)


def all_to_all(
    output_tensor_list: Tensors, input_tensor_list: Tensors, group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:  # fmt: skip
    """Send the i-th tensor of the inputs to rank i; the outputs collect what comes, in order."""
    comm = communicator(group)
    outputs = _one_each("output_tensor_list", comm, output_tensor_list)
    inputs = _one_each("input_tensor_list", comm, input_tensor_list)
    # Shapes are each rank's own: that lengths fit is found out on the way.
    call = describe_call(comm, "all_to_all", inputs[0], "auto", written=outputs, shape=())
    return _exchange(comm, call, outputs, inputs, async_op)


def _exchange(
    comm: Communicator, call: Call, outputs: Tensors, inputs: Tensors, async_op: bool,
    result: Tensors | None = None,
) -> dist.Work | None:  # fmt: skip
    """outputs[i] on rank j = inputs[j] on rank i."""
    if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
        raise TypeError(f"{call.kind} takes tensors of one dtype; convert them to {call.dtype}")

    def body(packed: bytes) -> None:
        flat = [flatten(output) for output in outputs]
        dispatch.all_to_all(comm, call, packed, flat, [flatten(each) for each in inputs])
        for output, part in zip(outputs, flat, strict=True):
            copy_back(output, part)

    return comm.run(call, inputs, body, async_op=async_op, result=result or outputs)


def _one_each(
    what: str, comm: Communicator, tensors: Tensors | None, like: Tensor | None = None
) -> list[Tensor]:
    """The list, if it has a tensor for each rank, of the size and dtype of `like`."""
    if not tensors or len(tensors) != comm.world:
        found = len(tensors) if tensors else "none"
        raise ValueError(f"{what} needs a tensor for each of {comm.world} ranks, but has {found}")
    for i, each in enumerate(tensors):
        if like is not None and (each.numel(), each.dtype) != (like.numel(), like.dtype):
            raise ValueError(
                f"{what}[{i}] has {each.numel()} elements of {each.dtype}; give it as many as this "
                f"rank's own tensor: {like.numel()} of {like.dtype}"
            )
    return list(tensors)


def _of_the_root(
    what: str, comm: Communicator, root: int, tensors: Tensors | None, like: Tensor
) -> list[Tensor]:
    """The root's list; of the others, who must not give any, one of empty tensors."""
    if comm.rank == root:
        return _one_each(what, comm, tensors, like)
    if tensors:
        raise ValueError(f"{what} is given on rank {comm.rank}, but rank {root} is the root")
    return [like.new_empty(0) for _ in range(comm.world)]

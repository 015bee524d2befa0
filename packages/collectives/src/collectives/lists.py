"""Collectives with lists of tensors or with a root, composed of the other collectives.

    all_gather, reduce_scatter    the collective on single tensors, whose parts are the list
    all_to_all                    the same steps; lengths may differ
    gather, scatter               an all-to-all in which only the root receives or sends
    reduce                        an all-reduce whose result only the root keeps
    coalesced calls               the collective on one tensor that packs several tensors

These functions therefore compare calls, time out and report lost ranks like other collectives.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check_dtype, op_name
from collectives.arguments import (
    check_memory,
    check_tensors,
    compared_shape,
    copy_back,
    describe_call,
    flatten,
    for_members,
    root_rank,
    separate,
)
from collectives.communicator import Communicator
from collectives.groups import communicator
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
    """Fill every rank's list with every rank's tensor, in rank order; sizes may differ."""
    comm = communicator(group)
    outputs = _check_list("tensor_list", comm, tensor_list, tensor, comm.rank)
    sizes = [output.numel() for output in outputs]
    call = _describe_list(comm, "all_gather", tensor, sizes, outputs=outputs)

    def body(packed: bytes) -> None:
        local = _pad(flatten(tensor), max(sizes))
        gathered = local.new_empty(comm.world * max(sizes))
        dispatch.run(comm, call, packed, gathered, local)
        for output, part in zip(outputs, gathered.tensor_split(comm.world), strict=True):
            copy_back(output, part[: output.numel()])

    return comm.run(call, tensor, body, async_op=async_op, result=outputs)


@for_members
def reduce_scatter(
    output: Tensor,
    input_list: Tensors,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce the i-th tensors of all ranks' lists into the output of rank i; sizes may differ."""
    comm = communicator(group)
    name = op_name(op)
    check_dtype(name, output.dtype)
    inputs = _check_list("input_list", comm, input_list, output, comm.rank)
    sizes = [tensor.numel() for tensor in inputs]
    call = _describe_list(comm, "reduce_scatter", output, sizes, op=name, outputs=[output])

    def body(packed: bytes) -> None:
        flat_input = torch.cat([_pad(flatten(tensor), max(sizes)) for tensor in inputs])
        flat_output = _pad(flatten(output), max(sizes))
        dispatch.run(comm, call, packed, flat_output, flat_input)
        copy_back(output, flat_output[: output.numel()])

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
    for tensor in (*outputs, *inputs):
        check_memory(call.kind, tensor, inputs[0])
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(
            f"{call.kind} expected tensors of one dtype, got {sorted(map(str, dtypes))}; convert "
            f"them to {call.dtype}"
        )

    def body(packed: bytes) -> None:
        flat_outputs = [flatten(output) for output in outputs]
        flat_inputs = [separate(flatten(tensor), flat_outputs) for tensor in inputs]
        dispatch.all_to_all(comm, call, packed, flat_outputs, flat_inputs)
        for output, part in zip(outputs, flat_outputs, strict=True):
            copy_back(output, part)

    return comm.run(call, inputs, body, async_op=async_op, result=result or outputs)


def coalesced(
    kind: str,
    outputs: Sequence[Tensors],
    inputs: Tensors,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Run one collective on several inputs as one call, with one comparison and one handle.

    The inputs of each dtype are packed into one tensor. outputs[i] receives the result of
    inputs[i]: it contains one tensor, or one tensor per rank.
    """
    comm = communicator(group)
    name = op_name(op) if op is not None else ""
    in_rows = comm.world if kind == "reduce_scatter" else 1
    out_rows = comm.world if kind == "all_gather" else 1
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, (targets, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        check_tensors(kind, tensor, targets)
        if name:
            check_dtype(name, tensor.dtype)
        _check_sizes(f"coalesced {kind}", i, tensor, targets, in_rows, out_rows)
        by_dtype.setdefault(tensor.dtype, []).append(i)
    shapes = tuple((tensor.dtype, *compared_shape(comm, tensor)) for tensor in inputs)
    calls = [
        describe_call(
            comm,
            kind,
            inputs[indices[0]],
            "auto",
            op=name,
            outputs=[target for i in indices for target in outputs[i]],
            shape=(sum(inputs[i].numel() for i in indices),),
            shapes=shapes,
            coalesced=len(inputs),
        )
        for indices in by_dtype.values()
    ]

    def run_dtype(call: Call, packed: bytes, indices: list[int]) -> None:
        sizes = [inputs[i].numel() // in_rows for i in indices]
        rows = [
            flatten(inputs[i]).view(in_rows, size) for i, size in zip(indices, sizes, strict=True)
        ]
        local = torch.cat(rows, dim=1).view(-1)
        result = local if kind == "all_reduce" else local.new_empty(sum(sizes) * out_rows)
        dispatch.run(comm, call, packed, *([result] if result is local else [result, local]))
        blocks = result.view(out_rows, sum(sizes)).split(sizes, dim=1)
        for i, block in zip(indices, blocks, strict=True):
            parts = block.tensor_split(len(outputs[i]))
            for target, part in zip(outputs[i], parts, strict=True):
                target.detach().copy_(part.reshape(target.shape))

    def body(packed: bytes) -> None:
        for call, indices in zip(calls, by_dtype.values(), strict=True):
            # The first call reports a NaN in any of the inputs.
            run_dtype(call, packed if call is calls[0] else call.packed, indices)

    result = [target for targets in outputs for target in targets]
    return comm.run(calls[0], inputs, body, async_op=async_op, result=result)


def _check_sizes(
    kind: str, position: int, tensor: Tensor, targets: Tensors, in_rows: int, out_rows: int
) -> None:
    """Raise ValueError unless each target has an equal part of the result's rows.

    The input is the tensor at `position`. It has `in_rows` equal rows, and its result has
    `out_rows` rows.
    """
    if tensor.numel() % in_rows:
        raise ValueError(
            f"{kind} expected the number of elements of input {position} to be a multiple of "
            f"{in_rows} ranks, got {tensor.numel()}"
        )
    numel = tensor.numel() // in_rows * out_rows // len(targets)
    for target in targets:
        if (target.dtype, target.numel()) != (tensor.dtype, numel):
            raise ValueError(
                f"{kind} expected outputs of {numel} elements of {tensor.dtype} for input "
                f"{position}, got {target.numel()} elements of {target.dtype}"
            )


def _describe_list(
    comm: Communicator, kind: str, tensor: Tensor, sizes: list[int], **fields: Any
) -> Call:
    """Describe a call on a list of tensors whose sizes all ranks know."""
    if len(set(sizes)) == 1:
        return describe_call(comm, kind, tensor, "auto", **fields)
    shapes = tuple((size,) for size in sizes)
    return describe_call(comm, kind, tensor, "auto", shape=(sum(sizes),), shapes=shapes, **fields)


def _pad(flat: Tensor, length: int) -> Tensor:
    """Return the tensor, or a longer copy if it is shorter than `length`."""
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
    """Return the list if it has one tensor per rank, and each has the dtype and size of `like`.

    If `position` is passed, only the size of the tensor at that position is compared.
    """
    if not tensors or len(tensors) != comm.world:
        count = len(tensors) if tensors else "none"
        raise ValueError(f"{name} needs a tensor for each of {comm.world} ranks, but has {count}")
    if like is None:
        return list(tensors)
    for i, tensor in enumerate(tensors):
        check_memory(name, tensor, like)
        is_same_size = tensor.numel() == like.numel() or position not in (None, i)
        if not is_same_size or tensor.dtype != like.dtype:
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

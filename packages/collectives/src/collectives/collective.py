"""The collectives, with the names and arguments of torch.distributed.

Each takes `algorithm`: "auto" lets the cost model pick; "shared_memory", "ring", ... insist.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check, op_name
from collectives.arguments import check_pair, copy_back, describe_call, flatten, lengths_of, root_of
from collectives.communicator import Communicator, communicator
from collectives.shared_memory.fingerprint import Call

ReduceOp = dist.ReduceOp


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, *,
    algorithm: str = "auto",
) -> dist.Work | None:  # fmt: skip
    """Reduce `tensor` over all ranks, in place."""
    if not tensor.is_cpu and algorithm == "auto":
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    comm, name = communicator(group), op_name(op)
    check(name, tensor.dtype)
    call = describe_call(comm, "all_reduce", tensor, algorithm, op=name, written=[tensor])
    return do(comm, call, async_op, tensor)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False, *, algorithm: str = "auto",
) -> dist.Work | None:  # fmt: skip
    """output = this rank's slice of the reduction of `input`, which is `world` times as long."""
    if not output.is_cpu and algorithm == "auto":
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    comm, name = communicator(group), op_name(op)
    check(name, input.dtype)
    check_pair("input", input, "output", output, comm.world)
    call = describe_call(comm, "reduce_scatter", input, algorithm, op=name, written=[output])
    return do(comm, call, async_op, output, input)


def all_gather_into_tensor(
    output: Tensor, input: Tensor, group: Any = None, async_op: bool = False, *,
    algorithm: str = "auto",
) -> dist.Work | None:  # fmt: skip
    """output = the inputs of all ranks, one after the other."""
    if not output.is_cpu and algorithm == "auto":
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)
    comm = communicator(group)
    check_pair("output", output, "input", input, comm.world)
    call = describe_call(comm, "all_gather", input, algorithm, written=[output])
    return do(comm, call, async_op, output, input)


def broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False,
    group_src: int | None = None, *, algorithm: str = "auto",
) -> dist.Work | None:  # fmt: skip
    """Give every rank the tensor of rank `src` (`group_src` counts within the group)."""
    if not tensor.is_cpu and algorithm == "auto":
        return dist.broadcast(tensor, src, group=group, async_op=async_op, group_src=group_src)
    comm = communicator(group)
    root = root_of(comm, src, group, group_src)
    call = describe_call(comm, "broadcast", tensor, algorithm, root=root, written=[tensor])
    return do(comm, call, async_op, tensor)


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None, group: Any = None, async_op: bool = False, *,
    algorithm: str = "auto",
) -> dist.Work | None:  # fmt: skip
    """Send the i-th part of `input` (rows) to rank i; `output` collects what comes, in order."""
    if not output.is_cpu and algorithm == "auto":
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    comm = communicator(group)
    if output.dtype != input.dtype:
        raise TypeError(f"output is {output.dtype} but input is {input.dtype}; make them the same")
    splits = output_split_sizes or input_split_sizes
    if algorithm == "auto" and not splits and _is_gloos(comm, output, input):
        size = (input.numel(),)
        even = describe_call(comm, "all_to_all", input, "auto", written=[output], shape=size)
        if comm.gloo.has_room_for(even.packed):
            return do(comm, even, async_op, output, input)
    lengths_out = lengths_of("output", output, output_split_sizes, comm.world)
    lengths_in = lengths_of("input", input, input_split_sizes, comm.world)
    # Shapes are each rank's own: that lengths fit is found out on the way.
    call = describe_call(comm, "all_to_all", input, algorithm, written=[output], shape=())

    def body(packed: bytes) -> None:
        out, flat = flatten(output), flatten(input)
        outputs, inputs = out.split(lengths_out), flat.split(lengths_in)
        dispatch.all_to_all(comm, call, packed, outputs, inputs)
        copy_back(output, out)

    return comm.run(call, input, body, async_op=async_op, result=output)


def _is_gloos(comm: Communicator, output: Tensor, input: Tensor) -> bool:
    """Whether an all-to-all of equal parts is for gloo: between hosts, of the same size on each."""
    if comm.topology.one_host or not 0 < input.numel() == output.numel():
        return False
    odd = any(not t.dim() or t.shape[0] % comm.world for t in (input, output))
    return not odd and comm.gloo.can("all_to_all", input.dtype, "")


def do(
    comm: Communicator, call: Call, async_op: bool, output: Tensor, *inputs: Tensor
) -> dist.Work | None:
    """Run a call whose result goes to `output`, which is its input too if there is no other."""
    if not async_op and call.packed in comm.gloo.groups:
        flats = flatten(output), *map(flatten, inputs)
        if comm.at_once(call, *flats):
            copy_back(output, flats[0])
            return None

    def body(packed: bytes) -> None:
        flat = flatten(output)
        dispatch.run(comm, call, packed, flat, *map(flatten, inputs))
        copy_back(output, flat)

    brought = inputs[0] if inputs else output
    job = partial(dispatch.job, comm, call, output, brought)
    return comm.run(call, brought, body, async_op=async_op, result=output, engine_job=job)


def barrier(group: Any = None, async_op: bool = False) -> dist.Work | None:
    """Return when every rank of the group has called it."""
    comm, nothing = communicator(group), torch.empty(0)
    call = Call("barrier", (), nothing.dtype)
    return comm.run(call, nothing, lambda packed: dispatch.barrier(comm, packed), async_op=async_op)


def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: Any = None
) -> Tensor:
    """Zeros in memory that all ranks of the host map: the engine reduces them without a copy.

    Every rank of the group must call it, with the same size. Where ranks cannot share memory the
    tensor is an ordinary one: everything works, slower.
    """
    shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    comm, dtype = communicator(group), dtype or torch.get_default_dtype()
    call = Call("shared_empty", tuple(shape), dtype)
    made: list[Tensor] = []

    def body(packed: bytes) -> None:
        dispatch.agree(comm, packed)
        made.append(comm.topology.allocate(shape.numel(), dtype, comm.timeout))

    comm.run(call, torch.empty(0), body, async_op=False)
    return made[0].view(shape)

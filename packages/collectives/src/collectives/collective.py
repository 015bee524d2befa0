"""Collectives with the names and arguments of torch.distributed, and an `algorithm` argument.

With `algorithm="auto"`, tensors that are not on the CPU are passed to torch's function of the same
name. Other calls run in shared memory if all ranks share memory. Otherwise, an all-to-all runs on
gloo if gloo can run it, and on the ring if not. For other collectives, the cost model chooses the
algorithm (`choice/cost.py`). Another name, such as "ring", selects that algorithm.

Every function must be called on all ranks of the group, with equal dtypes and shapes unless its
docstring says otherwise. A collective returns None when the call has finished, or a handle at once
if `async_op` is True; the handle's `wait` then raises the last two errors. A collective raises

    ValueError, TypeError   if an argument is not valid or the group cannot run the algorithm
    RuntimeError            if no process group exists, or inside FakeTensorMode
    Mismatch                if the ranks' calls were compared and differ
    RankLost                if a rank has died, left, or not made the call within the timeout, or if
                            an earlier call has made the group unusable
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check_dtype, get_op_name
from collectives.arguments import (
    check_pair,
    check_same_dtype,
    copy_back,
    describe_call,
    flatten,
    get_root_rank,
    is_forwarded,
    may_overlap,
    separate,
    skip_non_members,
    split_lengths,
    split_sizes,
)
from collectives.communicator import Communicator
from collectives.execution.timeouts import limit_calls
from collectives.groups import get_communicator
from collectives.shared_memory.engine import Job
from collectives.shared_memory.fingerprint import Call

ReduceOp = dist.ReduceOp


@skip_non_members
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Reduce `tensor` of any shape over all ranks, in place.

    float16, bfloat16 and 8-bit floats are accumulated in float32. AVG needs a floating or complex
    dtype.
    """
    if is_forwarded("all_reduce", tensor, algorithm):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    comm = get_communicator(group)
    name = get_op_name(op)
    check_dtype(name, tensor.dtype)
    call = describe_call(comm, "all_reduce", tensor, algorithm, op=name, outputs=[tensor])
    return run(comm, call, async_op, tensor)


@skip_non_members
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Reduce `input` over all ranks and write this rank's slice to `output`.

    `input` has `world_size` times as many elements as `output`.
    """
    if is_forwarded("reduce_scatter_tensor", output, algorithm):
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    comm = get_communicator(group)
    name = get_op_name(op)
    check_dtype(name, input.dtype)
    check_pair("input", input, "output", output, comm.world_size)
    call = describe_call(comm, "reduce_scatter", input, algorithm, op=name, outputs=[output])
    return run(comm, call, async_op, output, input)


@skip_non_members
def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Write the inputs of all ranks to `output_tensor`, in rank order.

    `output_tensor` has `world_size` times as many elements as `input_tensor`.
    """
    if is_forwarded("all_gather_into_tensor", output_tensor, algorithm):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    comm = get_communicator(group)
    check_pair("output_tensor", output_tensor, "input_tensor", input_tensor, comm.world_size)
    call = describe_call(comm, "all_gather", input_tensor, algorithm, outputs=[output_tensor])
    return run(comm, call, async_op, output_tensor, input_tensor)


@skip_non_members
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: str = "auto",
) -> dist.Work | None:
    """Copy the tensor of rank `src` to every rank.

    `src` is a global rank. `group_src` is the rank in the group and can be passed instead.
    """
    if is_forwarded("broadcast", tensor, algorithm):
        return dist.broadcast(tensor, src, group=group, async_op=async_op, group_src=group_src)
    comm = get_communicator(group)
    root = get_root_rank(comm, src, group, group_src)
    call = describe_call(comm, "broadcast", tensor, algorithm, root=root, outputs=[tensor])
    return run(comm, call, async_op, tensor)


@skip_non_members
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
    """Send the i-th part of `input` to rank i; write the received parts to `output` in rank order.

    The tensors are split along the first dimension, into equal parts by default. Split sizes are
    numbers of rows per rank. Either all ranks or no rank must pass them.
    """
    if is_forwarded("all_to_all_single", output, algorithm):
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    comm = get_communicator(group)
    check_same_dtype("output", output, "input", input)
    output_sizes = split_sizes(output_split_sizes)
    input_sizes = split_sizes(input_split_sizes)
    is_even = not (output_sizes or input_sizes)
    if algorithm == "auto" and is_even and _should_use_gloo(comm, output, input):
        shape = (input.numel(),)
        call = describe_call(comm, "all_to_all", input, "auto", outputs=[output], shape=shape)
        return run(comm, call, async_op, output, input)
    lengths_out = split_lengths("output", output, output_sizes, comm.world_size)
    lengths_in = split_lengths("input", input, input_sizes, comm.world_size)
    # Shapes may differ between ranks. The lengths are compared when the call runs.
    call = describe_call(comm, "all_to_all", input, algorithm, outputs=[output], shape=())

    def run_call() -> None:
        flat_output = flatten(output)
        outputs = flat_output.split(lengths_out)
        inputs = separate(flatten(input), [output]).split(lengths_in)
        dispatch.all_to_all(comm, call, outputs, inputs)
        copy_back(output, flat_output)

    return comm.run(call, output, run_call, async_op=async_op)


def _should_use_gloo(comm: Communicator, output: Tensor, input: Tensor) -> bool:
    """Return True if this all-to-all of equal parts runs between hosts and gloo can run it."""
    if comm.topology.is_single_host or not 0 < input.numel() == output.numel():
        return False
    for tensor in (input, output):
        if not tensor.dim() or tensor.shape[0] % comm.world_size:
            return False
    return comm.gloo.can_run("all_to_all", input.dtype, "")


def run(
    comm: Communicator, call: Call, async_op: bool, output: Tensor, input: Tensor | None = None
) -> dist.Work | None:
    """Run a call that writes to `output`, which is also its input if `input` is None."""
    source = output if input is None else input
    must_copy = input is not None and _can_overwrite_input(comm, output, input)
    # A broadcast only writes to the tensors of the other ranks.
    is_written = call.kind != "broadcast" or comm.rank != call.root

    def flatten_tensors() -> list[Tensor]:
        if input is None:
            return [flatten(output)]
        return [flatten(output), flatten(input.clone() if must_copy else input)]

    if not async_op and call.packed in comm.gloo.groups and comm.can_skip_queue(output):
        tensors = flatten_tensors()
        comm.run_without_queue(call, *tensors)
        if is_written:
            copy_back(output, tensors[0])
        return None

    def run_call() -> None:
        # The input is not copied before this point, because earlier calls may still write to it.
        tensors = flatten_tensors()
        dispatch.run(comm, call, *tensors)
        if is_written:
            copy_back(output, tensors[0])

    def make_job() -> Job | None:
        # The engine cannot copy the input at the time when the call runs.
        return None if must_copy else dispatch.make_job(comm, call, output, source)

    return comm.run(call, output, run_call, async_op=async_op, make_job=make_job)


def _can_overwrite_input(comm: Communicator, output: Tensor, input: Tensor) -> bool:
    """Return True if writing the output could overwrite elements of the input before they are read.

    If the shorter tensor is this rank's slice of the longer one, return False: the algorithms of
    reduce-scatter and all-gather support this overlap.
    """
    longer, shorter = (output, input) if output.numel() > input.numel() else (input, output)
    slice_address = longer.data_ptr() + comm.rank * shorter.nbytes
    is_in_place = longer.is_contiguous() and shorter.is_contiguous()
    if is_in_place and longer.numel() > shorter.numel() and shorter.data_ptr() == slice_address:
        return False
    return may_overlap(input, [output])


@skip_non_members
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> dist.Work | None:
    """Wait until every rank of the group has called this function.

    `device_ids` has no effect, as on gloo: no device takes part in the call. `timeout` applies to
    this call only; the default is the group's timeout.
    """
    comm = get_communicator(group)
    call = Call("barrier", (), torch.uint8)
    run_call = partial(dispatch.barrier, comm, call)
    with limit_calls(timeout):
        return comm.run(call, [], run_call, async_op=async_op)


def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: Any = None
) -> Tensor:
    """Return a tensor of zeros in memory that all ranks of the host share.

    On one host, an `all_reduce` of more than 32 KiB in this memory needs no copies if the engine
    (`shared_memory/engine.py`) was compiled and supports the op and the dtype, and if all ranks
    pass the same part of the tensor. Otherwise the ranks copy, and the result is the same.

    Every rank of the group must call this function with the same size and dtype. If the ranks of a
    host cannot share memory, the result is an ordinary tensor, whose collectives are slower.
    """
    comm = get_communicator(group)
    # torch validates the size and the dtype, and chooses the default dtype.
    like: Tensor = torch.empty(*size, dtype=dtype, device="meta")  # type: ignore[arg-type]
    call = Call("shared_empty", tuple(like.shape), like.dtype)
    allocated: list[Tensor] = []

    def run_call() -> None:
        dispatch.compare_calls(comm, call)
        allocated.append(comm.topology.allocate(like.numel(), like.dtype, comm.timeout))

    comm.run(call, [], run_call, async_op=False)
    return allocated[0].view(like.shape)

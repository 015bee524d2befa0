"""Coalesced calls: one collective on several tensors, with one comparison and one handle.

The tensors of each dtype are packed into one tensor, on which the collective runs:

    inputs a, b      packed input                         result
    all_reduce       [a b]                                [a b]
    all_gather       [a b]                                one row [a b] per rank
    reduce_scatter   one row per rank, of its slices      this rank's slices of a and b
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.algorithms.reduction import check_dtype, get_op_name
from collectives.arguments import check_tensors, describe_call, flatten, get_compared_shape
from collectives.communicator import Communicator
from collectives.groups import get_communicator
from collectives.shared_memory.fingerprint import Call

Tensors = Sequence[Tensor]


def run_coalesced(
    kind: str,
    outputs: Sequence[Tensors],
    inputs: Tensors,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Run one collective on several inputs as one call; return None, or a handle if `async_op`.

    Args:
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        outputs: outputs[i] receives the result of inputs[i], in one tensor or in one per rank.
        inputs: at least one tensor.
        op: the reduce op; None for an all-gather.
    """
    comm = get_communicator(group)
    name = get_op_name(op) if op is not None else ""
    _check_tensors(comm, kind, outputs, inputs, name)
    indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(inputs):
        indices_by_dtype.setdefault(tensor.dtype, []).append(i)
    shapes = tuple((tensor.dtype, *get_compared_shape(comm, tensor)) for tensor in inputs)
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
        for indices in indices_by_dtype.values()
    ]

    def run_call() -> None:
        for call, indices in zip(calls, indices_by_dtype.values(), strict=True):
            _run_packed(comm, call, [outputs[i] for i in indices], [inputs[i] for i in indices])

    result = [target for targets in outputs for target in targets]
    return comm.run(calls[0], result, run_call, async_op=async_op)


def _run_packed(
    comm: Communicator, call: Call, outputs: Sequence[Tensors], inputs: Tensors
) -> None:
    """Run a coalesced call on inputs of one dtype."""
    rows_in, rows_out = _count_rows(call.kind, comm.world_size)
    widths = [tensor.numel() // rows_in for tensor in inputs]
    rows = [flatten(tensor).view(rows_in, -1) for tensor in inputs]
    local = torch.cat(rows, dim=1).view(-1)
    if call.kind == "all_reduce":
        result = local
        dispatch.run(comm, call, local)
    else:
        result = local.new_empty(sum(widths) * rows_out)
        dispatch.run(comm, call, result, local)
    blocks = result.view(rows_out, sum(widths)).split(widths, dim=1)
    for targets, block in zip(outputs, blocks, strict=True):
        for target, part in zip(targets, block.tensor_split(len(targets)), strict=True):
            target.detach().copy_(part.reshape(target.shape))


def _count_rows(kind: str, world_size: int) -> tuple[int, int]:
    """Return how many rows the packed input and its result have: see the module docstring."""
    rows_in = world_size if kind == "reduce_scatter" else 1
    rows_out = world_size if kind == "all_gather" else 1
    return rows_in, rows_out


def _check_tensors(
    comm: Communicator, kind: str, outputs: Sequence[Tensors], inputs: Tensors, op: str
) -> None:
    """Raise an error unless every input can be used and its outputs have its dtype and size."""
    if not inputs or len(outputs) != len(inputs):
        raise ValueError(
            f"a coalesced {kind} expected at least one input, and one output per input, got "
            f"{len(inputs)} inputs and {len(outputs)} outputs"
        )
    rows_in, rows_out = _count_rows(kind, comm.world_size)
    for i, (targets, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        check_tensors(kind, tensor, targets)
        if op:
            check_dtype(op, tensor.dtype)
        if tensor.numel() % rows_in:
            raise ValueError(
                f"a coalesced {kind} expected the number of elements of input {i} to be a multiple "
                f"of {rows_in} ranks, got {tensor.numel()}"
            )
        numel = tensor.numel() // rows_in * rows_out // len(targets)
        for target in targets:
            if (target.dtype, target.numel()) != (tensor.dtype, numel):
                raise ValueError(
                    f"a coalesced {kind} expected outputs of {numel} elements of {tensor.dtype} "
                    f"for input {i}, got {target.numel()} elements of {target.dtype}"
                )

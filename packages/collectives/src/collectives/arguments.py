"""What is checked of a call's arguments before anything moves, and how a tensor lies in memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.algorithms import dispatch
from collectives.coalescing import current
from collectives.communicator import Communicator
from collectives.shared_memory.fingerprint import Call


def describe_call(
    comm: Communicator, kind: str, tensor: Tensor, algorithm: str, *, op: str = "", root: int = 0,
    written: Sequence[Tensor] = (), shape: tuple[int, ...] | None = None,
) -> Call:  # fmt: skip
    """The call as the other ranks are to see it; `written` are the tensors that get its result."""
    dispatch.validate(comm, kind, algorithm, tensor.dtype, op)
    if tensor.layout != torch.strided:
        raise TypeError(f"{kind} takes dense tensors, not {tensor.layout}; use to_dense()")
    for result in written:
        # A contiguous one cannot, and asking is not free.
        if not result.is_contiguous() and torch._debug_has_internal_overlap(result) == 1:
            raise ValueError(
                f"{kind} would write several results to one place of an expanded tensor of shape "
                f"{tuple(result.shape)}; pass a clone"
            )
    if tensor.is_cuda and algorithm in ("shared_memory", "hierarchical"):
        raise ValueError(f'{algorithm} takes CPU tensors; use "ring", or "auto" for NCCL itself')
    told = tensor.shape if shape is None else shape
    batch = current()
    count = batch.count if batch else 1
    return _remembered(kind, told, tensor.dtype, op, root, algorithm, count)


# A training loop makes the same few calls again and again.
@lru_cache(maxsize=1024)
def _remembered(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, op: str, root: int, algorithm: str,
    coalesced: int,
) -> Call:  # fmt: skip
    return Call(kind, tuple(shape), dtype, op, root, algorithm, coalesced=coalesced)


def flatten(tensor: Tensor) -> Tensor:
    """The tensor in one dimension: itself if it is contiguous, else a copy."""
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.dim() == 1 and tensor.stride(0) == 1 and not (lazy or tensor.requires_grad):
        return tensor
    dense = tensor.detach().contiguous()
    # What a lazy conjugate or negative holds in memory is not what it stands for.
    if lazy:
        dense = dense.resolve_conj().resolve_neg()
    # Not `view`: a single element may keep a stride that is not 1.
    return dense.as_strided((dense.numel(),), (1,))


def copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Put a result into the tensor that it belongs to."""
    # Only a tensor that was not contiguous was copied.
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def check_pair(long_name: str, long: Tensor, short_name: str, short: Tensor, world: int) -> None:
    """Raise unless the long one holds one short one for each rank."""
    if long.dtype != short.dtype:
        raise TypeError(
            f"{long_name} is {long.dtype} but {short_name} is {short.dtype}; make them the same"
        )
    if long.numel() != short.numel() * world:
        raise ValueError(
            f"{long_name} has {long.numel()} elements; {world} ranks with {short.numel()} each in "
            f"{short_name} need {short.numel() * world}"
        )


def root_of(comm: Communicator, src: int | None, group: Any, group_src: int | None) -> int:
    """The root's rank in the group, from either of torch's two ways to say it."""
    if (src is None) == (group_src is None):
        raise ValueError("give the source as either src (global rank) or group_src (group's rank)")
    if group_src is None:
        group_src = src if group is None else dist.get_group_rank(group, src)  # type: ignore[arg-type]
    assert group_src is not None
    if not 0 <= group_src < comm.world:
        raise ValueError(f"source rank {group_src} is not one of the group's {comm.world} ranks")
    return group_src


def lengths_of(what: str, tensor: Tensor, sizes: list[int] | None, world: int) -> list[int]:
    """Elements for each rank, from rows for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % world:
            raise ValueError(
                f"{what} has {rows} rows, not a multiple of {world} ranks; give {what}_split_sizes"
            )
        sizes = [rows // world] * world
    if len(sizes) != world or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"{what}_split_sizes {sizes} must be {world} numbers, none negative, that sum to "
            f"{rows} rows"
        )
    return [size * (tensor.numel() // rows if rows else 0) for size in sizes]

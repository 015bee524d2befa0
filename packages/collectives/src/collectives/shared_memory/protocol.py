"""Collectives for ranks that map the same memory, by copies and sums without messages.

    one shot   copy in | tick | sum all slots                           small tensors, or two ranks
    two shot   copy in | tick | sum one slice | tick | copy out         more ranks
    in place           | tick | sum one slice into all copies | tick    tensors from `shared_empty`,
                                                                        in the engine only

`arena.py` explains why one tick per step is sufficient. A tensor of any size passes through a chunk
of memory per rank (`CHUNK_BYTES`, two slots), which is small enough to stay in the cache.

Every element is summed in rank order, so all ranks get the same bits. The first tick also
compares the ranks' calls, so finding a mismatch costs no extra step. A rank does not know whether
its peers' tensors are shared too. Therefore ranks exchange notes at the first tick and all make the
same decision.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives.algorithms.reduction import get_wide_dtype, reduce_into, split_into_pieces
from collectives.shared_memory import engine
from collectives.shared_memory.arena import ONE_SHOT_BYTES, SLOT_BYTES, Arena

# Number of elements of a narrow dtype that are converted at a time.
WIDE_ELEMENTS = 32 * 1024
_NOTE = struct.Struct("<qq")


@dataclass(frozen=True)
class Shared:
    """A tensor in memory that all ranks map."""

    #: The address of every rank's copy.
    addresses: Sequence[int]
    #: The number of the allocation, and the tensor's offset in it in bytes.
    allocation: int
    offset: int


def all_reduce(
    arena: Arena, flat: Tensor, op: str, packed: bytes, shared: Shared | None = None
) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    if _run_in_engine(arena, "all_reduce", packed, flat, flat, op, shared=shared):
        return
    # The Python implementation cannot reduce in place, so all ranks copy through the slots.
    arena.announce(packed)
    is_small = flat.numel() * flat.element_size() <= ONE_SHOT_BYTES
    scratch = _allocate_scratch(flat)
    for i, piece in enumerate(split_into_pieces(flat, SLOT_BYTES // flat.element_size())):
        _copy_in(arena, piece)
        arena.sync()
        if i == 0:
            arena.compare_calls()
        if is_small or arena.world_size <= 2:
            reduce_into(op, _get_copies(arena, piece), piece, scratch)
        else:
            _sum_slices(arena, piece, op, scratch)


def reduce_scatter(arena: Arena, out: Tensor, flat: Tensor, op: str, packed: bytes) -> None:
    """Reduce this rank's slice of `flat` over all ranks into `out`."""
    if _run_in_engine(arena, "reduce_scatter", packed, out, flat, op):
        return
    arena.announce(packed)
    slices = flat.tensor_split(arena.world_size)
    width = SLOT_BYTES // arena.world_size // flat.element_size()
    scratch = _allocate_scratch(flat)
    for start in range(0, max(1, out.numel()), width):
        slots = arena.get_slots(flat.dtype, ahead=1)
        piece = out[start : start + width]
        size = piece.numel()
        for i, part in enumerate(slices):
            slots[arena.rank][i * width :][:size].copy_(part[start : start + width])
        arena.sync()
        if start == 0:
            arena.compare_calls()
        parts = [slot[arena.rank * width :][:size] for slot in slots]
        reduce_into(op, parts, piece, scratch)


def all_gather(arena: Arena, out: Tensor, local: Tensor, packed: bytes) -> None:
    """Write every rank's `local` to `out`, in rank order."""
    if _run_in_engine(arena, "all_gather", packed, out, local):
        return
    arena.announce(packed)
    slices = out.tensor_split(arena.world_size)
    width = SLOT_BYTES // local.element_size()
    for start in range(0, max(1, local.numel()), width):
        piece = local[start : start + width]
        _copy_in(arena, piece)
        arena.sync()
        if start == 0:
            arena.compare_calls()
        for part, copied in zip(slices, _get_copies(arena, piece), strict=True):
            part[start : start + width].copy_(copied)


def broadcast(arena: Arena, flat: Tensor, source: int, packed: bytes) -> None:
    """Copy the tensor of one rank to every rank; `source` is its position on this host."""
    if _run_in_engine(arena, "broadcast", packed, flat, flat, root=source):
        return
    arena.announce(packed)
    for i, piece in enumerate(split_into_pieces(flat, SLOT_BYTES // flat.element_size())):
        if arena.rank == source:
            _copy_in(arena, piece)
        arena.sync()
        if i == 0:
            arena.compare_calls()
        if arena.rank != source:
            piece.copy_(_get_copies(arena, piece)[source])


def all_to_all(
    arena: Arena, outputs: Sequence[Tensor], inputs: Sequence[Tensor], packed: bytes
) -> None:
    """Copy inputs[j] of rank i to outputs[i] of rank j, for all i and j; lengths may differ.

    The arena must have the engine.
    """
    lengths = [part.numel() for part in (*inputs, *outputs)]
    arena.announce(packed)
    job = arena.make_job(
        "all_to_all",
        itemsize=inputs[0].dtype.itemsize,
        lengths=(ctypes.c_int64 * len(lengths))(*lengths),
        inputs=engine.make_address_array([part.data_ptr() for part in inputs]),
        outputs=engine.make_address_array([part.data_ptr() for part in outputs]),
    )
    arena.run_job(job)


def barrier(arena: Arena, packed: bytes) -> None:
    """Wait until every rank has made this call."""
    arena.announce(packed)
    arena.sync()
    arena.compare_calls()


def make_job(
    arena: Arena,
    kind: str,
    packed: bytes,
    out: Tensor,
    source: Tensor,
    op: str = "",
    root: int = 0,
    shared: Shared | None = None,
) -> engine.Job | None:
    """Announce a call and return its job for the engine, or None if the engine cannot run it.

    A job's count is the number of elements of the input, or of the output of a reduce-scatter. A
    job without an op counts bytes instead of elements, because it only copies.
    """
    if not arena.has_engine or (op and not engine.can_reduce(source.dtype, op)):
        return None
    counted = out if kind == "reduce_scatter" else source
    count = counted.numel()
    size = source.element_size()
    fields: dict[str, Any] = {"input": source.data_ptr(), "output": out.data_ptr(), "root": root}
    if op:
        fields |= {"dtype": engine.DTYPES[source.dtype], "op": engine.OPS[op]}
    else:
        count *= size
        size = 1
    note = b""
    if kind == "all_reduce":
        if count * size <= ONE_SHOT_BYTES:
            shared = None
        fields["copies"] = engine.make_address_array(shared.addresses) if shared else None
        # Zeros mean that the tensor is not shared.
        note = _NOTE.pack(shared.allocation, shared.offset) if shared else bytes(_NOTE.size)
    arena.announce(packed, note)
    return arena.make_job(kind, count=count, itemsize=size, **fields)


def _run_in_engine(arena: Arena, *args: Any, **kwargs: Any) -> bool:
    """Run a call in the engine; return False if the engine cannot run it."""
    job = make_job(arena, *args, **kwargs)
    if job is None:
        return False
    arena.run_job(job)
    return True


def _copy_in(arena: Arena, piece: Tensor) -> None:
    """Copy a piece to this rank's slot of the next tick."""
    _get_copies(arena, piece, ahead=1)[arena.rank].copy_(piece)


def _get_copies(arena: Arena, piece: Tensor, *, ahead: int = 0) -> list[Tensor]:
    """Return the part for a piece in the slots of all ranks; see `Arena.get_slots`."""
    return [slot[: piece.numel()] for slot in arena.get_slots(piece.dtype, ahead=ahead)]


def _sum_slices(arena: Arena, piece: Tensor, op: str, scratch: Tensor | None) -> None:
    """Reduce this rank's slice of a piece; collect the other slices after the next tick."""
    rank, world_size = arena.rank, arena.world_size
    parts = [copied.tensor_split(world_size)[rank] for copied in _get_copies(arena, piece)]
    result = _get_copies(arena, piece, ahead=1)[rank].tensor_split(world_size)[rank]
    reduce_into(op, parts, result, scratch)
    arena.sync()
    results = _get_copies(arena, piece)
    for i, part in enumerate(piece.tensor_split(world_size)):
        part.copy_(results[i].tensor_split(world_size)[i])


def _allocate_scratch(like: Tensor) -> Tensor | None:
    """Return the scratch tensor of `reduce_into`, or None if it needs none."""
    wide = get_wide_dtype(like.dtype)
    size = max(1, min(like.numel(), WIDE_ELEMENTS))
    return None if wide == like.dtype else torch.empty(size, dtype=wide, device="cpu")

"""Collectives for ranks that map the same memory: copies and sums, no messages.

    one shot   copy in | tick | sum all slots                      small, or two ranks
    two shot   copy in | tick | sum own slice | tick | copy out    more ranks
    in place           | tick | sum own slice, write it to all | tick    tensors in `shared_empty`,
                                                                         by the engine alone

The rule that makes a tick enough stands in `arena`. A tensor of any size passes through a chunk of
memory per rank (`CHUNK_BYTES`, two slots), which is small enough to stay in the cache.

Notable:
- every element is summed once, in rank order: all ranks get the same bits;
- the first tick also compares what the ranks are about to do, so a mismatch costs nothing to find;
- a rank cannot know whether its peers' tensors are shared too; they say so at that tick, and all
  go by the same answer.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives.algorithms.reduction import accumulation_dtype, in_pieces, reduce_into
from collectives.shared_memory import engine
from collectives.shared_memory.arena import ONE_SHOT_BYTES, SLOT_BYTES, Arena

# How many elements of a narrow dtype are widened at a time.
WIDE_ELEMENTS = 32 * 1024
_NOTE = struct.Struct("<qq")


@dataclass(frozen=True)
class Shared:
    """A tensor that all ranks can reach: every rank's copy, and where it lies."""

    copies: Sequence[Tensor]
    allocation: int
    offset: int


def all_reduce(
    arena: Arena, flat: Tensor, name: str, call: bytes, shared: Shared | None = None
) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    if _by_engine(arena, "all_reduce", call, flat, flat, name, shared=shared):
        return
    # Offers no shared tensor, so all ranks go through the slots.
    arena.announce(call, _note(None))
    pieces = in_pieces(flat, SLOT_BYTES // flat.element_size())
    _copy_in(arena, pieces[0])
    arena.sync()
    # Ranks that offered theirs have copied nothing yet.
    again = any(note != _note(None) for note in arena.heard(_NOTE.size))
    small = flat.numel() * flat.element_size() <= ONE_SHOT_BYTES
    scratch = _scratch(flat)
    for i, piece in enumerate(pieces):
        if i or again:
            _copy_in(arena, piece)
            arena.sync()
        if small or arena.world <= 2:
            parts = [slot[: piece.numel()] for slot in arena.slots(piece.dtype)]
            reduce_into(name, parts, piece, scratch)
        else:
            _sum_slices(arena, piece, name, scratch)


def reduce_scatter(arena: Arena, out: Tensor, flat: Tensor, name: str, call: bytes) -> None:
    """out = this rank's slice of the reduction of `flat`."""
    if _by_engine(arena, "reduce_scatter", call, out, flat, name):
        return
    arena.announce(call)
    slices = flat.tensor_split(arena.world)
    width = SLOT_BYTES // arena.world // flat.element_size()
    scratch = _scratch(flat)
    for start in range(0, max(1, out.numel()), width):
        slots = arena.slots(flat.dtype, ahead=1)
        piece = out[start : start + width]
        size = piece.numel()
        for i, part in enumerate(slices):
            slots[arena.rank][i * width :][:size].copy_(part[start : start + width])
        arena.sync()
        if start == 0:
            arena.heard()
        parts = [slot[arena.rank * width :][:size] for slot in slots]
        reduce_into(name, parts, piece, scratch)


def all_gather(arena: Arena, out: Tensor, own: Tensor, call: bytes) -> None:
    """out = every rank's `own`, one after the other."""
    if _by_engine(arena, "all_gather", call, out, own):
        return
    arena.announce(call)
    slices = out.tensor_split(arena.world)
    width = SLOT_BYTES // own.element_size()
    for start in range(0, max(1, own.numel()), width):
        piece = own[start : start + width]
        _copy_in(arena, piece)
        arena.sync()
        if start == 0:
            arena.heard()
        for part, slot in zip(slices, arena.slots(own.dtype), strict=True):
            part[start : start + width].copy_(slot[: piece.numel()])


def broadcast(arena: Arena, flat: Tensor, source: int, call: bytes) -> None:
    """Give every rank the tensor of rank `source`."""
    if _by_engine(arena, "broadcast", call, flat, flat, root=source):
        return
    arena.announce(call)
    for i, piece in enumerate(in_pieces(flat, SLOT_BYTES // flat.element_size())):
        if arena.rank == source:
            _copy_in(arena, piece)
        arena.sync()
        if i == 0:
            arena.heard()
        if arena.rank != source:
            piece.copy_(arena.slots(flat.dtype)[source][: piece.numel()])


def all_to_all(
    arena: Arena, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: bytes
) -> None:
    """outputs[i] on rank j = inputs[j] on rank i; lengths may differ."""
    dtype, rank, world = inputs[0].dtype, arena.rank, arena.world
    lengths = [part.numel() for part in (*inputs, *outputs)]
    arena.announce(call)
    if engine.library() is not None:
        places = {"inputs": engine.addresses(inputs), "outputs": engine.addresses(outputs)}
        numbers = (ctypes.c_int64 * len(lengths))(*lengths)
        arena.do(arena.job("all_to_all", itemsize=dtype.itemsize, lengths=numbers, **places))
        return
    # A slot: how much its rank sends and expects, 2 x world numbers; a part for each other rank.
    head = arena.lengths_room
    width = (SLOT_BYTES - head) // max(1, world - 1) // dtype.itemsize
    raw = arena.slots(torch.uint8, ahead=1)
    raw[rank][:head].view(torch.int64)[: 2 * world] = torch.tensor(lengths)
    start, longest = 0, max(lengths[:world])
    while start == 0 or start < longest:
        slots = [slot[head:].view(dtype) for slot in raw]
        for to, part in enumerate(inputs):
            piece = part[start : start + width]
            if to != rank:
                slots[rank][(to - (to > rank)) * width :][: piece.numel()].copy_(piece)
        arena.sync()
        if start == 0:
            arena.heard()
            longest = max(max(each.sends) for each in arena.heard_lengths())
            outputs[rank].copy_(inputs[rank])
        for source, part in enumerate(outputs):
            piece = part[start : start + width]
            if source != rank:
                at = (rank - (rank > source)) * width
                piece.copy_(slots[source][at:][: piece.numel()])
        raw = arena.slots(torch.uint8, ahead=1)
        start += width


def barrier(arena: Arena, call: bytes) -> None:
    """Return when every rank is here."""
    arena.announce(call)
    arena.sync()
    arena.heard()


def job(
    arena: Arena, kind: str, call: bytes, out: Tensor, source: Tensor, op: str = "", root: int = 0,
    shared: Shared | None = None,
) -> engine.Job | None:  # fmt: skip
    """What does it without this interpreter, announced; None (and not announced) if nothing can.

    It reduces, or (without an op) moves bytes whatever they mean. It counts what a rank brings; of
    a reduce-scatter what it gets.
    """
    if not (engine.reduces(source.dtype, op) if op else engine.library()):
        return None
    count, size = (out if kind == "reduce_scatter" else source).numel(), source.element_size()
    fields: dict[str, Any] = {"input": source.data_ptr(), "output": out.data_ptr(), "root": root}
    if op:
        fields |= {"dtype": engine.DTYPES[source.dtype], "op": engine.OPS[op]}
    else:
        count, size = count * size, 1
    if kind == "all_reduce":
        if count * size <= ONE_SHOT_BYTES:
            shared = None
        fields["copies"] = engine.addresses(shared.copies) if shared else None
    arena.announce(call, _note(shared) if kind == "all_reduce" else b"")
    return arena.job(kind, count=count, itemsize=size, **fields)


def _by_engine(arena: Arena, *call: Any, **more: Any) -> bool:
    if (found := job(arena, *call, **more)) is not None:
        arena.do(found)
    return found is not None


def _note(shared: Shared | None) -> bytes:
    return _NOTE.pack(shared.allocation, shared.offset) if shared else _NOTE.pack(0, 0)


def _copy_in(arena: Arena, piece: Tensor) -> None:
    arena.slots(piece.dtype, ahead=1)[arena.rank][: piece.numel()].copy_(piece)


def _sum_slices(arena: Arena, piece: Tensor, name: str, scratch: Tensor | None) -> None:
    rank, world = arena.rank, arena.world
    parts = [slot[: piece.numel()].tensor_split(world)[rank] for slot in arena.slots(piece.dtype)]
    result = arena.slots(piece.dtype, ahead=1)[rank][: piece.numel()].tensor_split(world)[rank]
    reduce_into(name, parts, result, scratch)
    arena.sync()
    results = [slot[: piece.numel()].tensor_split(world) for slot in arena.slots(piece.dtype)]
    for i, part in enumerate(piece.tensor_split(world)):
        part.copy_(results[i][i])


def _scratch(like: Tensor) -> Tensor | None:
    wide = accumulation_dtype(like.dtype)
    size = max(1, min(like.numel(), WIDE_ELEMENTS))
    return None if wide == like.dtype else torch.empty(size, dtype=wide)

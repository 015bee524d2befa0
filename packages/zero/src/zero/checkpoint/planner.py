"""What of a torch.distributed.checkpoint folder each rank writes and reads.

Notable: a run of elements of an n-dimensional tensor is at most 2n-1 boxes, which is what that
format stores; so the folder holds whole tensors that any other reader of it can load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zero.checkpoint.holding import Part


class SavePlanner(DefaultSavePlanner):
    """Writes this rank's `parts`, box by box, and `objects`."""

    def __init__(self, parts: Sequence[Part], objects: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects = objects
        self._objects: dict[MetadataIndex, Any] = {MetadataIndex(k): v for k, v in objects.items()}
        items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        for part in parts:
            for chunk, values in _chunks(part):
                index = MetadataIndex(part.name, chunk.offsets)
                self._objects[index] = values
                properties = TensorProperties(dtype=values.dtype)
                data = TensorWriteData(chunk, properties, part.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)

    def create_local_plan(self) -> SavePlan:
        """Return all of it; who writes what was decided before."""
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of one box, or an object."""
        return self._objects[index]


class LoadPlanner(DefaultLoadPlanner):
    """Fills the values of `parts` from whatever boxes were saved; reads `objects` into `loaded`."""

    def __init__(self, parts: Sequence[Part], objects: Sequence[str]) -> None:
        super().__init__()
        self.loaded: dict[str, Any] = {}
        self._parts = parts
        self._names = objects
        self._values: dict[MetadataIndex, Tensor] = {}

    def plan_for(self, metadata: Metadata) -> LoadPlan:
        """Say which saved boxes overlap with which of ours."""
        items: list[ReadItem] = []
        for number, part in enumerate(self._parts):
            saved = metadata.state_dict_metadata[part.name]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = list(_chunks(part))
            for item in create_read_items_for_chunk_list(part.name, saved, [c for c, _ in wanted]):
                # Two parts may want the same elements, so the place is named by the part's number.
                place = MetadataIndex(str(number), item.dest_index.offset)
                items.append(dataclasses.replace(item, dest_index=place))
            for chunk, values in wanted:
                self._values[MetadataIndex(str(number), chunk.offsets)] = values
        nothing = torch.Size((0,))
        for name in self._names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Keep one object."""
        self.loaded[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return where the values of one box go."""
        return self._values[index]


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover row-major elements `start` to `stop` by boxes, in order: (offsets, sizes) of each."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Within one row.
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _chunks(part: Part) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    """The boxes of a part, each with its values in its shape."""
    at = 0
    wanted = boxes(part.shape, part.start, part.stop)
    if prod(part.shape) == 0:
        wanted = iter([(tuple(0 for _ in part.shape), tuple(part.shape))])
    for offsets, sizes in wanted:
        values = part.values[at : at + prod(sizes)].view(sizes)
        at += values.numel()
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), values

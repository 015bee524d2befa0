"""The boxes of a torch.distributed.checkpoint folder that each rank writes and reads.

The format stores boxes: rectangular blocks of tensors. A run of elements of an n-dimensional tensor
consists of at most 2n-1 boxes, so any other reader of the format can load whole tensors.
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

from zero.checkpoint.ownership import Part


class SavePlanner(DefaultSavePlanner):
    """A plan to write this rank's `parts`, box by box, and `objects`."""

    def __init__(self, parts: Sequence[Part], objects: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._objects: dict[MetadataIndex, Any] = {MetadataIndex(k): v for k, v in objects.items()}
        items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        for part in parts:
            for chunk, values in _iter_chunks(part):
                index = MetadataIndex(part.name, chunk.offsets)
                self._objects[index] = values
                properties = TensorProperties(dtype=values.dtype)
                data = TensorWriteData(chunk, properties, part.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)

    def create_local_plan(self) -> SavePlan:
        """Return the plan to write all parts, which are already distributed over the ranks."""
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of a box, or an object."""
        return self._objects[index]


class LoadPlanner(DefaultLoadPlanner):
    """A plan to fill the values of `parts` from saved boxes of any shape, and to load `objects`."""

    def __init__(self, parts: Sequence[Part], objects: Sequence[str]) -> None:
        super().__init__()
        self.loaded: dict[str, Any] = {}
        self._parts = parts
        self._names = objects
        self._values: dict[MetadataIndex, Tensor] = {}

    def plan_for(self, metadata: Metadata) -> LoadPlan:
        """Return the plan to read all overlaps of saved boxes with the boxes of the parts."""
        items: list[ReadItem] = []
        for number, part in enumerate(self._parts):
            saved = metadata.state_dict_metadata[part.name]
            assert isinstance(saved, TensorStorageMetadata)
            boxes = list(_iter_chunks(part))
            for item in create_read_items_for_chunk_list(part.name, saved, [c for c, _ in boxes]):
                # Two parts may contain the same elements, so parts are identified by number.
                index = MetadataIndex(str(number), item.dest_index.offset)
                items.append(dataclasses.replace(item, dest_index=index))
            for chunk, values in boxes:
                self._values[MetadataIndex(str(number), chunk.offsets)] = values
        nothing = torch.Size((0,))
        for name in self._names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Load an object; its tensors are on the CPU, because every rank loads rank 0's object."""
        self.loaded[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that a box is read into."""
        return self._values[index]


#: The offsets and sizes of a box.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def iter_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cover row-major elements `start` to `stop` by boxes; yield offsets and sizes in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_numel = prod(shape[1:])
    # The first row that starts in the run, and the row in which the run stops.
    first = -(-start // row_numel)
    last = stop // row_numel
    if first > last:
        # The run is within one row.
        yield from _iter_row_boxes(shape, last, start - last * row_numel, stop - last * row_numel)
        return
    if start < first * row_numel:
        row_start = (first - 1) * row_numel
        yield from _iter_row_boxes(shape, first - 1, start - row_start, row_numel)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row_numel < stop:
        yield from _iter_row_boxes(shape, last, 0, stop - last * row_numel)


def _iter_row_boxes(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in iter_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _iter_chunks(part: Part) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    """Yield the boxes of a part, each with its values in the box's shape."""
    start = 0
    boxes = iter_boxes(part.shape, part.start, part.stop)
    if prod(part.shape) == 0:
        boxes = iter([(tuple(0 for _ in part.shape), tuple(part.shape))])
    for offsets, sizes in boxes:
        values = part.values[start : start + prod(sizes)].view(sizes)
        start += values.numel()
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), values

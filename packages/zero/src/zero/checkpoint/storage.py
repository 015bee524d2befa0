"""A torch.distributed.checkpoint folder that all ranks write and read together.

The folder is written beside its final path and renamed when every rank is done, so the last good
checkpoint survives any failure while saving.

The format stores boxes: rectangular blocks of tensors. A run of elements of an n-dimensional tensor
consists of at most 2n-1 boxes, so any other reader of the format can load whole tensors.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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

from zero.checkpoint import checksums
from zero.checkpoint.draft import Draft, draft_folder
from zero.checkpoint.ownership import Part
from zero.diagnostics import explain

T = TypeVar("T")

#: The name of the object with the format version, `extra` and the non-tensor states of modules.
HEADER = "zero"


def write_folder(
    path: Path,
    parts: Sequence[Part],
    objects: dict[str, Any],
    group: dist.ProcessGroup | None,
    tied_names: dict[str, str],
) -> None:
    """Write a checkpoint of all ranks' `parts` and `objects`, or raise on every rank.

    tied_names: maps further names of tensors to the names under which they are written.
    """
    # If `path` is a symbolic link, its target is written and the link is kept.
    path = Path(os.path.realpath(path))
    drafts: list[Draft] = []
    rank = dist.get_rank(group)
    planner = SavePlanner(parts, objects)
    failure = f"checkpoint {path} was not saved"
    token = ""

    def open_draft() -> str:
        if rank > 0:
            return ""
        drafts.append(Draft(path))
        return drafts[0].token

    try:
        token = together(open_draft, group, failure)[0]
        storage = FileSystemWriter(draft_folder(path, token))

        def prepare() -> SavePlan:
            _check_loadable(objects)
            _check_shared(draft_folder(path, token))
            storage.set_up_storage_writer(rank == 0)
            return planner.create_local_plan()

        plans, metadata = planner.create_global_plan(together(prepare, group, failure))
        plans = storage.prepare_global_plan(plans)

        def write() -> _Written:
            results = storage.write_data(plans[rank], planner).wait()
            files = sorted({result.storage_data.relative_path for result in results})
            return results, checksums.of_files(draft_folder(path, token), files)

        written = together(write, group, failure)

        def publish() -> None:
            if rank == 0:
                _add_tied_names(metadata, written, tied_names)
                storage.finish(metadata, [results for results, _ in written])
                _publish(drafts[0], written)

        together(publish, group, failure)
    except RuntimeError as error:
        # Rank 0 may have died, or may not have removed the earlier folder, after the rename.
        if checksums.token_of(path) != token:
            raise
        raise RuntimeError(f"{path} was saved, but then: {error.__cause__ or error}") from None
    finally:
        # An interrupt must not leave the path locked.
        for draft in drafts:
            draft.close()


#: torch's descriptions of the boxes and objects that a rank wrote, and the checksums of its files.
_Written = tuple[list[Any], dict[str, int]]


def _publish(draft: Draft, written: Sequence[_Written]) -> None:
    """Write the checksums of all files, and rename the folder to its final path."""
    files = {name: crc for _, of_rank in written for name, crc in of_rank.items()}
    files |= checksums.of_files(draft.folder, [".metadata"])
    checksums.write(draft.folder, files, draft.token)
    for info in (result.storage_data for results, _ in written for result in results):
        file = draft.folder / info.relative_path
        if not file.exists() or file.stat().st_size < info.offset + info.length:
            raise FileNotFoundError(
                f"{file} was removed or changed while the checkpoint was saved: save again, "
                "and let no other program write there"
            )
    draft.publish()


def _add_tied_names(
    metadata: Metadata, written: Sequence[_Written], tied_names: dict[str, str]
) -> None:
    """Add entries for the other names of tied tensors, with the same stored bytes."""
    contents = metadata.state_dict_metadata
    for name, first in tied_names.items():
        contents[name] = contents[first]
        for results, _ in written:
            results += [
                replace(result, index=replace(result.index, fqn=name))
                for result in results
                if result.index.fqn == first
            ]


def together(act: Callable[[], T], group: dist.ProcessGroup | None, failure: str) -> list[T]:
    """Run `act` on every rank and return all results.

    If `act` fails on any rank, every rank raises an error that names the failed ranks.
    """
    outcome: tuple[Any, str | None]
    try:
        outcome = act(), None
    except Exception as error:
        outcome = None, f"{type(error).__name__}: {error}"
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(outcomes, outcome, group=group)
    except RuntimeError as error:
        raise explain(error, group, f"{failure}: a rendezvous of all ranks") from error
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]
    if errors:
        raise RuntimeError(f"{failure}: {'; '.join(errors)}")
    return [result for result, _ in outcomes]


@dataclass(frozen=True)
class Folder:
    """A checkpoint on disk: its path and metadata."""

    path: Path
    metadata: Metadata

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The whole shape and dtype of every tensor."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @cached_property
    def objects(self) -> frozenset[str]:
        """The names of all entries that are not tensors."""
        return frozenset(self.metadata.state_dict_metadata).difference(self.tensors)

    def read(self, parts: Sequence[Part], objects: Sequence[str] = ()) -> dict[str, Any]:
        """Fill the values of `parts`, cast to their dtypes; return the named objects."""
        planner = LoadPlanner(parts, objects)
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.plan_for(self.metadata))
        reader.read_data(plan, planner).wait()
        return planner.loaded


def find(path: Path) -> Folder:
    """Find the checkpoint at `path`, check the sizes of its files, and read its metadata."""
    if not (path / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint at {path}: it has no .metadata file")
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise ValueError(
            f"{path}/.metadata is damaged ({error}): use an older checkpoint"
        ) from None
    for info in (metadata.storage_data or {}).values():
        file = path / info.relative_path
        end = info.offset + info.length
        size = file.stat().st_size if file.exists() else -1
        if size < end:
            state = "missing" if size < 0 else f"truncated to {size} bytes of at least {end}"
            raise ValueError(f"{file} is {state}: use an older checkpoint")
    return Folder(path, metadata)


def fingerprint(path: Path) -> int:
    """Return a number that changes with every save to `path`; 0 if nothing is there.

    Without checksums or metadata, it depends only on the names and sizes of the files.
    """
    for name in (checksums.NAME, ".metadata"):
        if (path / name).is_file():
            return checksums.checksum(path / name)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    listed = [(file.name, file.stat().st_size) for file in files]
    return zlib.crc32(repr(listed).encode()) if listed else 0


def _check_shared(folder: Path) -> None:
    """Raise FileNotFoundError if this rank does not see the folder that rank 0 has created."""
    if not folder.exists():
        raise FileNotFoundError(
            f"rank 0 has created {folder}, which this rank does not find: save to a file system "
            "that all hosts share"
        )


def _check_loadable(objects: dict[str, Any]) -> None:
    """Raise TypeError if an object could not be loaded with `weights_only=True`."""
    for name, value in objects.items():
        pickled = io.BytesIO()
        try:
            torch.save(value, pickled)
            pickled.seek(0)
            torch.load(pickled, weights_only=True)
        except Exception as error:
            kind = "`extra` and the extra state of modules" if name == HEADER else name
            # torch's message names the class, after several lines of advice about torch.load.
            refused = re.search(r"GLOBAL (\S+)", str(error))
            received = refused[1] if refused else f"an object that raises {error!r}"
            raise TypeError(
                f"expected plain values and tensors in {kind}, got {received}, which a load would "
                "refuse: save the values that it consists of"
            ) from error


class SavePlanner(DefaultSavePlanner):
    """A plan to write this rank's `parts`, box by box, and `objects`."""

    def __init__(self, parts: Sequence[Part], objects: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
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
            wanted = list(_chunks(part))
            for item in create_read_items_for_chunk_list(part.name, saved, [c for c, _ in wanted]):
                # Two parts may contain the same elements, so parts are identified by number.
                index = MetadataIndex(str(number), item.dest_index.offset)
                items.append(replace(item, dest_index=index))
            for chunk, values in wanted:
                self._values[MetadataIndex(str(number), chunk.offsets)] = values
        nothing = torch.Size((0,))
        for name in self._names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Load an object."""
        self.loaded[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill with a box."""
        return self._values[index]


#: The offsets and sizes of a box.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
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
        yield from _boxes_of_row(shape, last, start - last * row_numel, stop - last * row_numel)
        return
    if start < first * row_numel:
        row_start = (first - 1) * row_numel
        yield from _boxes_of_row(shape, first - 1, start - row_start, row_numel)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row_numel < stop:
        yield from _boxes_of_row(shape, last, 0, stop - last * row_numel)


def _boxes_of_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _chunks(part: Part) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    """Yield the boxes of a part, each with its values in the box's shape."""
    start = 0
    wanted = boxes(part.shape, part.start, part.stop)
    if prod(part.shape) == 0:
        wanted = iter([(tuple(0 for _ in part.shape), tuple(part.shape))])
    for offsets, sizes in wanted:
        values = part.values[start : start + prod(sizes)].view(sizes)
        start += values.numel()
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), values

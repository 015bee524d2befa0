"""A torch.distributed.checkpoint folder that all ranks write and read together.

The folder is written beside its final path and renamed when every rank is done, so the last good
checkpoint survives any failure while saving.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan

from zero.checkpoint import checksums
from zero.checkpoint.draft import Draft, check_target, current, draft_folder
from zero.checkpoint.ownership import Part
from zero.checkpoint.planner import LoadPlanner, SavePlanner
from zero.diagnostics import explain

T = TypeVar("T")
#: Smaller boxes are read whole, because finding the offset of elements takes milliseconds.
DIRECT_READ_BYTES = 1 << 21


class Writer:
    """One save: `plan()`, then `write()` without communication, then `publish()`."""

    def __init__(
        self,
        path: Path,
        parts: Sequence[Part],
        objects: dict[str, Any],
        group: dist.ProcessGroup | None,
        tied_names: dict[str, str],
    ) -> None:
        # If `path` is a symbolic link, its target is written and the link is kept.
        self.path = Path(os.path.realpath(path))
        self.tied_names = tied_names
        self.group = group
        self.rank = dist.get_rank(group)
        #: Rank 0's draft, from `plan` until the save is published or has failed.
        self._draft: Draft | None = None
        self.folder: Path
        self.storage: FileSystemWriter
        self.planner = SavePlanner(parts, objects)
        self.error: Exception | None = None
        self.results: list[Any] = []
        self.ranges: checksums.Ranges = {}
        #: Identifies the save, so that the other ranks can check if it was published when rank 0
        #: died.
        self.token = ""
        self.metadata: Metadata | None = None
        self.local_plan = SavePlan([])

    def plan(self) -> None:
        """Create a new folder, and agree on the data that each rank writes to it."""

        def prepare() -> SavePlan:
            _check_loadable(self.planner.objects)
            self.storage.set_up_storage_writer(self.rank == 0)
            return self.planner.create_local_plan()

        self.token = self._together(self._open)[0]
        self.folder = draft_folder(self.path, self.token)
        self.storage = FileSystemWriter(self.folder)
        plans = self._together(prepare)
        plans, self.metadata = self.planner.create_global_plan(plans)
        plans = self.storage.prepare_global_plan(plans)
        self.local_plan = plans[self.rank]

    def _open(self) -> str:
        if self.rank > 0:
            return ""
        check_target(self.path, other=checksums.NAME, unless=".metadata")
        self._draft = Draft(self.path)
        return self._draft.token

    def close(self) -> None:
        """Unlock the path, and remove the folder unless it was published."""
        draft = self._draft
        self._draft = None
        if draft is not None:
            draft.close()

    def write(self) -> None:
        """Write this rank's file; if this fails, `publish` raises the error."""
        try:
            done = self.storage.write_data(self.local_plan, self.planner)
            self.results = done.wait()
            self.ranges = checksums.of_ranges(self.folder, (r.storage_data for r in self.results))
        except Exception as error:
            self.error = error

    def publish(self) -> None:
        """Rename the finished folder to its final path, or raise on every rank."""

        def check_written() -> tuple[list[Any], checksums.Ranges]:
            if self.error is not None:
                raise self.error
            return self.results, self.ranges

        try:
            written = self._together(check_written)
            self._together(lambda: self._finish(written) if self.rank == 0 else None)
        except RuntimeError as error:
            if checksums.token_of(self.path) != self.token:
                raise
            raise RuntimeError(
                f"{self.path} was saved, but then: {error.__cause__ or error}"
            ) from None
        finally:
            self.close()

    def _finish(self, written: Sequence[tuple[list[Any], checksums.Ranges]]) -> None:
        """Write the metadata and the checksums of all ranks' files, and rename the folder."""
        assert self.metadata is not None
        assert self._draft is not None
        self.storage.finish(
            self.metadata, [self._add_tied_names(results) for results, _ in written]
        )
        checksums.write(self.folder, (ranges for _, ranges in written), self.token)
        self._check_complete([result for results, _ in written for result in results])
        self._draft.publish(_is_checkpoint_file)

    def _check_complete(self, results: Sequence[Any]) -> None:
        """Raise if a file was removed or truncated since it was written."""
        for info in (result.storage_data for result in results):
            file = self.folder / info.relative_path
            if not file.exists() or file.stat().st_size < info.offset + info.length:
                raise FileNotFoundError(
                    f"{file} was removed or changed while the checkpoint was saved: save again, "
                    "and let no other program write there"
                )

    def _add_tied_names(self, results: list[Any]) -> list[Any]:
        """Add entries for the other names of tied tensors, with the same stored bytes."""
        assert self.metadata is not None
        contents = self.metadata.state_dict_metadata
        for name, first in self.tied_names.items():
            contents[name] = contents[first]
            results = results + [
                replace(result, index=replace(result.index, fqn=name))
                for result in results
                if result.index.fqn == first
            ]
        return results

    def _together(self, act: Callable[[], T]) -> list[T]:
        try:
            return together(act, self.group, f"checkpoint {self.path} was not saved")
        except BaseException:
            self.close()
            raise


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
    """A checkpoint on disk: its path, metadata and checksums."""

    path: Path
    metadata: Metadata
    verifier: checksums.Verifier

    @property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The whole shape and dtype of every tensor."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def objects(self) -> list[str]:
        """The names of all entries that are not tensors."""
        return [n for n in self.metadata.state_dict_metadata if n not in self.tensors]

    def are_same_bytes(self, first: str, second: str) -> bool:
        """Return True if two names refer to the same stored bytes."""
        stored: dict[str, list[Any]] = {first: [], second: []}
        for index, info in (self.metadata.storage_data or {}).items():
            if index.fqn in stored:
                stored[index.fqn].append((index.offset, info))
        return stored[first] == stored[second]

    def verify(self, parts: Sequence[Part], objects: Sequence[str] = ()) -> None:
        """Raise ValueError if stored bytes of these parts or objects are damaged."""
        wanted = []
        for item in LoadPlanner(parts, objects).plan_for(self.metadata).items:
            info = self.metadata.storage_data[item.storage_index]
            wanted.append((item.storage_index.fqn, info.relative_path, info.offset, info.length))
        self.verifier.check(wanted)

    def read(self, parts: Sequence[Part], objects: Sequence[str] = ()) -> dict[str, Any]:
        """Fill the values of `parts`; return the named objects."""
        self.verify([], objects)
        planner = LoadPlanner(parts, objects)
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = planner.plan_for(self.metadata)
        # The first backward of a process starts autograd's threads, one per device. It must run
        # before the fake tensors of `_read_direct` add fake GPUs, whose threads can abort a process
        # when it exits.
        torch.ones(1, requires_grad=True).backward()
        remaining = [item for item in plan.items if not self._read_direct(item, planner, reader)]
        plan = replace(plan, items=remaining)
        reader.read_data(reader.prepare_local_plan(plan), planner).wait()
        return planner.loaded

    def _read_direct(self, item: ReadItem, planner: LoadPlanner, reader: FileSystemReader) -> bool:
        """Read only the requested elements of a large box; return False if they are not contiguous.

        torch's reader allocates and reads the whole box.
        """
        info = self.metadata.storage_data[item.storage_index]
        if item.type != LoadItemType.TENSOR or info.length < DIRECT_READ_BYTES:
            return False
        target = planner.lookup_tensor(item.dest_index)
        target = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
        if getattr(info, "transform_descriptors", None) or target.device.type != "cpu":
            return False
        with (self.path / info.relative_path).open("rb") as file:
            with FakeTensorMode():
                # This reads the box's shape, strides and offset in the file, but no elements.
                box = torch.load(reader._slice_file(file, info), "cpu", weights_only=True)
            wanted = narrow_tensor_by_index(box, item.storage_offsets, item.lengths)
            box_offset = getattr(box.untyped_storage(), "_checkpoint_offset", None)
            has_same_form = target.dtype == wanted.dtype and target.shape == wanted.shape
            is_contiguous = wanted.is_contiguous() and target.is_contiguous()
            if box_offset is None or not (has_same_form and is_contiguous):
                return False
            file.seek(info.offset + box_offset + wanted.storage_offset() * wanted.itemsize)
            read_into(file, target)
        return True


def read_into(file: IO[bytes], tensor: Tensor) -> None:
    """Fill a contiguous CPU tensor from the current position of a file."""
    memory = memory_of(tensor)
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{file.name} ends early: use another copy")
        memory = memory[count:]
    # Autograd must notice the write as it notices any in-place operation.
    torch.autograd.graph.increment_version(tensor)


def memory_of(tensor: Tensor) -> memoryview:
    """Return a memoryview of the bytes of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def find(path: Path) -> Folder:
    """Find the checkpoint at `path`, check the sizes of its files, and read its metadata.

    If a save was interrupted between its two renames, the previous checkpoint is returned.
    """
    path = current(path)
    if not (path / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint at {path}: it has no .metadata file")
    verifier = checksums.Verifier(path)
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
    return Folder(path, metadata, verifier)


def fingerprint(path: Path) -> int:
    """Return a number that changes with every save to `path`; 0 if nothing is there."""
    for name in (checksums.NAME, ".metadata"):
        if (path / name).is_file():
            return checksums.checksum(path / name)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    listed = [(file.name, file.stat().st_size) for file in files]
    return zlib.crc32(repr(listed).encode()) if listed else 0


def _check_loadable(objects: dict[str, Any]) -> None:
    """Raise TypeError if an object could not be loaded with `weights_only=True`."""
    for name, value in objects.items():
        pickled = io.BytesIO()
        try:
            torch.save(value, pickled)
            pickled.seek(0)
            torch.load(pickled, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"expected plain values and tensors in {name}, got an object that a load would "
                f"refuse ({str(error).splitlines()[0]}): save the values that it consists of"
            ) from error


def _is_checkpoint_file(file: Path) -> bool:
    if file.name in (".metadata", checksums.NAME):
        return True
    return file.name.startswith("__") and file.suffix == ".distcp"

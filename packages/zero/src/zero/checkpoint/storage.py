"""A torch.distributed.checkpoint folder, written and read by all ranks together.

It is written beside its final path and renamed when every rank is done, so that the last good
checkpoint survives whatever happens while saving.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
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
from zero.checkpoint.draft import Draft, check_place, current, draft_folder
from zero.checkpoint.holding import Part
from zero.checkpoint.planner import LoadPlanner, SavePlanner
from zero.faults import explain

T = TypeVar("T")
# How long rank 0 waits at its end for what other ranks still write.
PATIENCE_SECONDS = 60.0
# The least of a box that is worth the milliseconds of looking where in it the elements are.
STRAIGHT_BYTES = 1 << 21


class Writer:
    """Writes one checkpoint: `plan`, `write` (no communication), `publish`."""

    def __init__(
        self,
        path: Path,
        parts: Sequence[Part],
        objects: dict[str, Any],
        group: dist.ProcessGroup | None,
        second_names: dict[str, str],
    ) -> None:
        # What a link points to is written, and the link stays.
        self.path = path = Path(os.path.realpath(path))
        self.second_names = second_names
        self.group = group
        self.rank = dist.get_rank(group)
        # Rank 0's, from `plan` until the save is published or has failed.
        self._draft: Draft | None = None
        self.folder: Path
        self.storage: FileSystemWriter
        self.planner = SavePlanner(parts, objects)
        self.error: Exception | None = None
        self.results: list[Any] = []
        self.sums: checksums.Ranges = {}
        # Names this save, so that those who survive rank 0 can tell whether it was published.
        self.token = ""
        self.metadata: Metadata | None = None
        self.local_plan = SavePlan([])

    def plan(self) -> None:
        """Agree on who writes what, in a new folder."""

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
        check_place(self.path, other=checksums.NAME, unless=".metadata")
        self._draft = Draft(self.path)
        return self._draft.token

    def close(self) -> None:
        """Unlock the path; what was not published is removed."""
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.close()

    def write(self) -> None:
        """Write this rank's file; what goes wrong is told by `publish`."""
        try:
            done = self.storage.write_data(self.local_plan, self.planner)
            self.results = done.wait()
            self.sums = checksums.of_ranges(self.folder, (r.storage_data for r in self.results))
        except Exception as error:
            self.error = error

    def publish(self) -> None:
        """Put the finished folder in its place, or raise on every rank."""
        first = self.rank == 0

        def written() -> tuple[list[Any], checksums.Ranges]:
            if self.error is not None:
                raise self.error
            return self.results, self.sums

        try:
            everyones = self._together(written)
            self._together(lambda: self._swap(everyones) if first else None)
        except RuntimeError as error:
            if checksums.token_of(self.path) != self.token:
                raise
            raise RuntimeError(
                f"{self.path} was saved, but then: {error.__cause__ or error}"
            ) from None
        finally:
            self.close()

    def leave_note(self) -> None:
        """Tell rank 0 in a file what was written, for a save that nobody waits for."""
        note = self.folder / f".written-{self.rank}"
        with contextlib.suppress(OSError):
            draft = note.with_suffix(".draft")
            draft.write_bytes(pickle.dumps((self.results, self.sums, self.error is None)))
            draft.rename(note)

    def publish_by_notes(self, world: int) -> bool:
        """Publish on rank 0 without communication; return whether all ranks had written."""
        notes = [self.folder / f".written-{rank}" for rank in range(world)]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(note.exists() for note in notes) and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            if not all(note.exists() for note in notes):
                return False
            everyones = [pickle.loads(note.read_bytes()) for note in notes]
            if all(good for _, _, good in everyones):
                self._swap([(results, sums) for results, sums, _ in everyones])
            return all(good for _, _, good in everyones)
        finally:
            self.close()

    def _swap(self, everyones: Sequence[tuple[list[Any], checksums.Ranges]]) -> None:
        assert self.metadata is not None
        for note in self.folder.glob(".written-*"):
            note.unlink()
        self.storage.finish(self.metadata, [self._name_twice(results) for results, _ in everyones])
        checksums.write(self.folder, (ranges for _, ranges in everyones), self.token)
        self._check_complete([result for results, _ in everyones for result in results])
        assert self._draft is not None
        self._draft.publish(_is_ours)

    def _check_complete(self, results: Sequence[Any]) -> None:
        """Raise if a file was removed or cut since it was written."""
        for info in (result.storage_data for result in results):
            file = self.folder / info.relative_path
            if not file.exists() or file.stat().st_size < info.offset + info.length:
                raise FileNotFoundError(
                    f"{file} was removed or changed while the checkpoint was saved: save again, "
                    "and let no other program write there"
                )

    def _name_twice(self, results: list[Any]) -> list[Any]:
        """List tied tensors under their second names too, in the same bytes."""
        assert self.metadata is not None
        contents = self.metadata.state_dict_metadata
        for second, first in self.second_names.items():
            contents[second] = contents[first]
            results = results + [
                replace(result, index=replace(result.index, fqn=second))
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
    """Run `act` on every rank; return all results, or raise on every rank and name the failed."""
    mine: tuple[Any, str | None]
    try:
        mine = act(), None
    except Exception as error:
        mine = None, f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        raise explain(error, group, f"{failure}: a meeting of all ranks") from error
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error]
    if errors:
        raise RuntimeError(f"{failure}: {'; '.join(errors)}")
    return [result for result, _ in everyone]


@dataclass(frozen=True)
class Folder:
    """A checkpoint that was found: where, its table of contents, and its checksums."""

    path: Path
    metadata: Metadata
    verifier: checksums.Verifier

    @property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Every tensor's whole shape and dtype."""
        return {
            name: (about.size, about.properties.dtype)
            for name, about in self.metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }

    @property
    def objects(self) -> list[str]:
        """The names of all else."""
        return [n for n in self.metadata.state_dict_metadata if n not in self.tensors]

    def verify(self, parts: Sequence[Part], objects: Sequence[str] = ()) -> None:
        """Raise ValueError if stored bytes that these are made of are damaged."""
        wanted = LoadPlanner(parts, objects).plan_for(self.metadata).items
        found = (
            (item.storage_index.fqn, self.metadata.storage_data[item.storage_index])
            for item in wanted
        )
        self.verifier.check((name, i.relative_path, i.offset, i.length) for name, i in found)

    def read(self, parts: Sequence[Part], objects: Sequence[str] = ()) -> dict[str, Any]:
        """Fill the values of `parts`; return the named objects."""
        self.verify([], objects)
        planner = LoadPlanner(parts, objects)
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = planner.plan_for(self.metadata)
        # Autograd's threads are made by the first backward, one for each device. The pretended
        # tensors below bring pretended GPUs, whose threads can abort a process when it ends.
        torch.ones(1, requires_grad=True).backward()
        rest = [item for item in plan.items if not self._read_straight(item, planner, reader)]
        plan = replace(plan, items=rest)
        reader.read_data(reader.prepare_local_plan(plan), planner).wait()
        return planner.loaded

    def _read_straight(
        self, item: ReadItem, planner: LoadPlanner, reader: FileSystemReader
    ) -> bool:
        """Read the elements of a large box from their place in the file, if they lie together.

        torch's reader makes the whole box and copies what is wanted.
        """
        info = self.metadata.storage_data[item.storage_index]
        if item.type != LoadItemType.TENSOR or info.length < STRAIGHT_BYTES:
            return False
        target = planner.lookup_tensor(item.dest_index)
        target = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
        if getattr(info, "transform_descriptors", None) or target.device.type != "cpu":
            return False
        with (self.path / info.relative_path).open("rb") as file:
            with FakeTensorMode():
                # Its form, and where in the file its memory is; nothing of that is read.
                box = torch.load(reader._slice_file(file, info), "cpu", weights_only=True)
            wanted = narrow_tensor_by_index(box, item.storage_offsets, item.lengths)
            at = getattr(box.untyped_storage(), "_checkpoint_offset", None)
            alike = target.dtype == wanted.dtype and target.shape == wanted.shape
            if at is None or not (alike and wanted.is_contiguous() and target.is_contiguous()):
                return False
            file.seek(info.offset + at + wanted.storage_offset() * wanted.itemsize)
            read_into(file, target)
        return True


def read_into(file: IO[bytes], tensor: Tensor) -> None:
    """Fill a contiguous CPU tensor from where the file stands."""
    memory = bytes_of(tensor)
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{file.name} ends early: use another copy")
        memory = memory[count:]
    # Autograd is to know, as of any write.
    torch.autograd.graph.increment_version(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def find(path: Path) -> Folder:
    """Find the checkpoint at `path`, check that its files are whole, read its table of contents.

    If a save was interrupted between its two renames, the previous checkpoint is the one.
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
        file, end = path / info.relative_path, info.offset + info.length
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
    for name, value in objects.items():
        pickled = io.BytesIO()
        try:
            torch.save(value, pickled)
            pickled.seek(0)
            torch.load(pickled, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{name} holds more than plain values and tensors, which a load would refuse "
                f"({str(error).splitlines()[0]}): save what it is made of"
            ) from error


def _is_ours(file: Path) -> bool:
    own = file.name in (".metadata", checksums.NAME) or file.name.startswith(".written-")
    return own or (file.name.startswith("__") and file.suffix == ".distcp")

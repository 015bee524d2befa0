"""A torch.distributed.checkpoint folder that all ranks write and read together."""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from zero.checkpoint import checksums
from zero.checkpoint.draft import Draft, build_draft_path, find_checkpoint
from zero.checkpoint.ownership import Part
from zero.checkpoint.planner import LoadPlanner, SavePlanner
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
    """Write a checkpoint of all ranks' `parts` and `objects`, or raise RuntimeError on every rank.

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
        token = run_on_ranks(open_draft, group, failure)[0]
        storage = FileSystemWriter(build_draft_path(path, token))

        def prepare() -> SavePlan:
            _check_loadable(objects)
            _check_shared(build_draft_path(path, token))
            storage.set_up_storage_writer(rank == 0)
            return planner.create_local_plan()

        plans, metadata = planner.create_global_plan(run_on_ranks(prepare, group, failure))
        plans = storage.prepare_global_plan(plans)

        def write() -> _Written:
            results = storage.write_data(plans[rank], planner).wait()
            folder = build_draft_path(path, token)
            files = sorted({result.storage_data.relative_path for result in results})
            return results, {name: checksums.compute_checksum(folder / name) for name in files}

        written = run_on_ranks(write, group, failure)

        def publish() -> None:
            if rank == 0:
                _add_tied_names(metadata, written, tied_names)
                storage.finish(metadata, [results for results, _ in written])
                _publish(drafts[0], written)

        run_on_ranks(publish, group, failure)
    except RuntimeError as error:
        # Rank 0 may have died, or may not have removed the earlier folder, after the rename.
        if checksums.read_token(path) != token:
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
    files = {name: crc for _, rank_files in written for name, crc in rank_files.items()}
    files[".metadata"] = checksums.compute_checksum(draft.folder / ".metadata")
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


def run_on_ranks(act: Callable[[], T], group: dist.ProcessGroup | None, failure: str) -> list[T]:
    """Run `act` on every rank, and return the results of all ranks in rank order.

    If `act` raises on any rank, every rank raises a RuntimeError that names the failed ranks.
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


def open_folder(path: Path) -> Folder:
    """Return the checkpoint at `path`, after a check of the sizes of its files.

    If a save was interrupted between its two renames, the previous checkpoint is returned. Raise
    FileNotFoundError if there is no checkpoint, and ValueError if a file is missing or damaged.
    """
    path = find_checkpoint(path)
    if not (path / ".metadata").exists():
        raise FileNotFoundError(
            f"expected a checkpoint, got {path} without .metadata; pass a folder of save_checkpoint"
        )
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


def hash_checkpoint(path: Path) -> int:
    """Return a number that changes with every `save_checkpoint` to `path`; 0 if nothing is there.

    For other programs' files, it depends only on the metadata, or on file names and sizes.
    """
    for name in (checksums.NAME, ".metadata"):
        if (path / name).is_file():
            return checksums.compute_checksum(path / name)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    listed = [(file.name, file.stat().st_size) for file in files]
    return zlib.crc32(repr(listed).encode()) if listed else 0


def _check_shared(folder: Path) -> None:
    """Raise FileNotFoundError if this rank does not see the folder that rank 0 has created."""
    if not folder.exists():
        raise FileNotFoundError(
            f"rank 0 created {folder}, but this rank cannot see it: save to a file system that all "
            "hosts share"
        )


def _check_loadable(objects: dict[str, Any]) -> None:
    """Raise TypeError if an object could not be loaded with `weights_only=True`."""
    for name, value in objects.items():
        pickled = io.BytesIO()
        try:
            torch.save(value, pickled)
            pickled.seek(0)
            torch.load(pickled, map_location="cpu", weights_only=True)
        except Exception as error:
            kind = "`extra` and the extra state of modules" if name == HEADER else name
            # torch's message names the class, after several lines of advice about torch.load.
            refused = re.search(r"GLOBAL (\S+)", str(error))
            received = refused[1] if refused else f"an object that raises {error!r}"
            raise TypeError(
                f"expected plain values and tensors in {kind}, got {received}, which a load would "
                "refuse: save the values that it consists of"
            ) from error

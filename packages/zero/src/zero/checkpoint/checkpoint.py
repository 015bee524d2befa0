"""Checkpoints that any stage at any number of ranks writes and any other reads, exactly.

Notable:
- the folder is an ordinary torch.distributed.checkpoint: whole tensors under the unwrapped module's
  names, written by each rank in boxes that cover its run of elements;
- it is written beside its final name and renamed when every rank is done, so that whatever happens
  while saving, the last good one stays;
- a load checks everything before it changes anything.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zero.checkpoint.holding import (
    Part,
    Slot,
    group_names,
    model_parts,
    second_names,
    slots,
    unwrapped,
)
from zero.checkpoint.storage import Folder, Writer, find, together
from zero.optimizer.optimizer import ShardedOptimizer, options_of

# 2: checksums, and second names of tied tensors.
VERSION = 2
HEADER = "zero"


class Saving:
    """A save under way: `wait()`, called by every rank, publishes it."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish: Callable[[], None] | None = publish
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the checkpoint is on disk under its name; raise what went wrong."""
        self._settle()
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        publish, self._publish = self._publish, None
        if publish is not None:
            try:
                publish()
            except Exception as error:
                self._error = error


# The latest asynchronous save to each path: a later one to the same path comes after it.
_under_way: dict[str, Saving] = {}


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    async_op: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Saving | None:
    """Write model, optimizer and `extra` (plain values and tensors) to the folder `path`.

    Every rank calls it. `async_op=True` copies the state, writes in a thread and returns a Saving,
    whose `wait()` publishes the checkpoint; a later save to the same path finishes it first. Raises
    RuntimeError on every rank, naming those that failed; what was at `path` before is then
    untouched.
    """
    place = os.path.abspath(path)
    earlier = _under_way.pop(place, None)
    if earlier is not None:
        earlier._settle()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts, objects = _state(model, optimizer, rank)
    if rank == 0:
        objects[HEADER] = {
            "version": VERSION,
            "groups": _groups(model, optimizer) if optimizer else [],
            "modules": model_parts(model)[1],
            "extra": extra or {},
        }
    mine = [
        part
        for part in parts
        if not part.replicated or zlib.crc32(part.name.encode()) % world == rank
    ]
    if async_op:
        mine = [replace(part, values=part.values.detach().cpu().clone()) for part in mine]
        objects = copy.deepcopy(objects)
    second = {f"model.{second}": f"model.{first}" for second, first in second_names(model).items()}
    writer = Writer(Path(path), mine, objects, group, second)
    writer.plan()
    if not async_op:
        writer.write()
        writer.publish()
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = pool.submit(writer.write)
    pool.shutdown(wait=False)

    def publish() -> None:
        written.result()
        writer.publish()

    saving = _under_way[place] = Saving(publish)
    return saving


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill model and optimizer from the folder `path`; return what was saved as `extra`.

    Every rank calls it, at any number of ranks and any stage. Raises RuntimeError on every rank
    before anything is changed if the checkpoint is damaged, newer, or of another model.
    """

    earlier = _under_way.pop(os.path.abspath(path), None)
    if earlier is not None:
        earlier._settle()
    failure = f"checkpoint {path} was not loaded"
    opened: list[tuple[Folder, dict[str, Any]]] = []

    def check() -> None:
        folder = find(Path(path))
        header = _read_header(folder)
        _check_model(model_parts(model)[0], second_names(model), folder.metadata)
        if optimizer is not None:
            _check_groups(header["groups"], _groups(model, optimizer))
        opened.append((folder, header))

    together(check, group, failure)
    folder, header = opened[0]

    def fill() -> None:
        parts = model_parts(model)[0]
        folder.read([replace(p, name=f"model.{p.name}") for p in parts])
        if optimizer is not None:
            _load_optimizer(folder, header["groups"], model, optimizer)

    together(fill, group, failure)
    if header["modules"]:
        unwrapped(model).load_state_dict(header["modules"], strict=False)
    return dict(header["extra"])


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> tuple[list[Part], dict[str, Any]]:
    parts = [replace(p, name=f"model.{p.name}") for p in model_parts(model)[0]]
    objects: dict[str, Any] = {}
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    if optimizer is None or inner is None:
        return parts, objects
    for slot in (slot for group in slots(model, optimizer) for slot in group):
        for key, value in inner.state.get(slot.local, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == slot.local.shape:
                name = f"optimizer.state.{slot.name}.{key}"
                flat = value.detach().reshape(-1)
                parts.append(Part(name, slot.shape, slot.start, slot.stop, flat, slot.replicated))
            elif slot.start or (not slot.stop and not _writes_empty(slot, rank)):
                # The holder of the first element writes what all holders have alike.
                continue
            elif isinstance(value, torch.Tensor):
                name, flat = f"optimizer.whole.{slot.name}.{key}", value.detach().reshape(-1)
                parts.append(Part(name, value.shape, 0, value.numel(), flat, slot.replicated))
            elif not slot.replicated or rank == 0:
                objects[f"optimizer.object.{slot.name}.{key}"] = value
    return parts, objects


def _writes_empty(slot: Slot, rank: int) -> bool:
    """Whether this rank may write the state of a parameter without elements."""
    return not slot.shape.numel() and (slot.replicated or rank == 0)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = group_names(model, optimizer)
    return [
        {"names": group, "options": options_of(options)}
        for group, options in zip(names, optimizer.param_groups, strict=True)
    ]


def _read_header(folder: Folder) -> dict[str, Any]:
    path = folder.path
    if HEADER not in folder.metadata.state_dict_metadata:
        raise ValueError(f"{path} was not written by zero.save_checkpoint")
    header: dict[str, Any] = folder.read([], [HEADER])[HEADER]
    if header["version"] > VERSION:
        raise ValueError(
            f"{path} has format {header['version']}, newer than {VERSION}, the newest that this "
            "version of zero reads: upgrade it"
        )
    if header["version"] >= 2 and not folder.verifier.present:
        raise ValueError(f"{path} has lost its checksums: use an older checkpoint")
    return header


def _check_model(parts: list[Part], tied: dict[str, str], metadata: Metadata) -> None:
    saved = {
        name.removeprefix("model."): about
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }
    for second, first in tied.items():
        if {first, second} <= saved.keys() and _stored(first, metadata) != _stored(
            second, metadata
        ):
            raise ValueError(
                f"{second} and {first} are one tensor in the model and two in the checkpoint: load "
                "into the model that was saved"
            )
        saved.pop(second, None)
    wanted = {part.name: part for part in parts}
    for name in [*wanted.keys() - saved.keys(), *saved.keys() - wanted.keys()]:
        where = "the model, not in the checkpoint" if name in wanted else "the checkpoint only"
        raise ValueError(f"{name} is in {where}: load into the model that was saved")
    for name, part in wanted.items():
        about = saved[name]
        assert isinstance(about, TensorStorageMetadata)
        theirs = tuple(about.size), about.properties.dtype
        ours = tuple(part.shape), part.values.dtype
        if ours != theirs:
            raise ValueError(
                f"{name} is {theirs} in the checkpoint, {ours} in the model: load into the model "
                "that was saved"
            )


def _stored(name: str, metadata: Metadata) -> list[Any]:
    """Where the bytes of a tensor are."""
    found = (metadata.storage_data or {}).items()
    return [(index.offset, info) for index, info in found if index.fqn == f"model.{name}"]


def _check_groups(saved: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    if len(saved) != len(ours):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, not {len(ours)}")
    for index, (a, b) in enumerate(zip(saved, ours, strict=True)):
        different = set(a["names"]) ^ set(b["names"])
        if different:
            raise ValueError(
                f"{min(different)} is in parameter group {index} of only one of checkpoint and "
                "optimizer: make the same groups as when saving"
            )


def _load_optimizer(
    folder: Folder,
    groups: list[dict[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    saved: dict[str, list[tuple[str, str]]] = {}
    for name in folder.metadata.state_dict_metadata:
        if name.startswith("optimizer."):
            kind, _, rest = name.removeprefix("optimizer.").partition(".")
            parameter, _, key = rest.rpartition(".")
            saved.setdefault(parameter, []).append((kind, key))
    state: dict[int, dict[str, Any]] = {}
    parts: list[Part] = []
    objects: dict[str, list[tuple[int, str]]] = {}
    held = slots(model, optimizer)
    for index, slot in enumerate(slot for group in held for slot in group):
        state[index] = {}
        for kind, key in saved.get(slot.name, []):
            name = f"optimizer.{kind}.{slot.name}.{key}"
            if kind == "object":
                objects.setdefault(name, []).append((index, key))
            else:
                part = _room(name, kind, slot, folder.metadata)
                state[index][key] = part.values.view(
                    slot.local.shape if kind == "state" else part.shape
                )
                parts.append(part)
    loaded = folder.read(parts, list(objects))
    for name, wanted in objects.items():
        for index, key in wanted:
            state[index][key] = loaded[name]
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    numbers = iter(range(len(state)))
    inner.load_state_dict(
        {
            # No entry for what was never stepped: an optimizer takes an empty one for a broken one.
            "state": {index: values for index, values in state.items() if values},
            "param_groups": [
                {**group["options"], "params": [next(numbers) for _ in members]}
                for group, members in zip(groups, held, strict=True)
            ],
        }
    )
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.state = inner.state
    for group, ours in zip(groups, optimizer.param_groups, strict=True):
        ours.update(group["options"])


def _room(name: str, kind: str, slot: Slot, metadata: Metadata) -> Part:
    about = metadata.state_dict_metadata[name]
    assert isinstance(about, TensorStorageMetadata)
    dtype, device = about.properties.dtype, slot.local.device
    if kind == "state":
        values = torch.empty(slot.stop - slot.start, dtype=dtype, device=device)
        return Part(name, slot.shape, slot.start, slot.stop, values)
    size = about.size
    values = torch.empty(size.numel(), dtype=dtype)
    return Part(name, size, 0, size.numel(), values)

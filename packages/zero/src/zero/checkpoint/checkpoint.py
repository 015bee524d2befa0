"""Checkpoints that any stage saves and any other stage loads exactly, on any number of ranks.

The folder is an ordinary torch.distributed.checkpoint with whole tensors, under `model.` and the
unwrapped module's names. Each rank writes the boxes (rectangular blocks) that cover its elements.
The folder is written beside its final path and renamed when every rank is done. If a rank fails
while saving, the last good checkpoint therefore survives.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.checkpoint import checksums
from zero.checkpoint.contents import VERSION, read_contents
from zero.checkpoint.draft import find_checkpoint
from zero.checkpoint.loading import Loading
from zero.checkpoint.ownership import (
    Part,
    Slot,
    find_group_names,
    find_model_parts,
    find_slots,
    find_tied_names,
)
from zero.checkpoint.storage import HEADER, hash_checkpoint, open_folder, run_on_ranks, write_folder
from zero.checkpoint.weights import check_format, find_weights
from zero.fsdp.fsdp import find_fsdps
from zero.fsdp.wrapping import get_original_name
from zero.optimizer.optimizer_trial import check_state
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_dict import get_options
from zero.process_groups import Communicator


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write model, optimizer and rank 0's `extra` to the folder `path`.

    Every rank must call this function. If a rank fails, every rank raises a RuntimeError that names
    the failed ranks. The folder is then unchanged unless the error reports that it was saved.

    extra: numbers, strings, tensors and containers of them, as `torch.load(weights_only=True)`
        accepts them.
    group: the process group over which model and optimizer are sharded. By default, it is their
        group, and all ranks if neither is sharded.
    """
    group = group or _find_group(model, optimizer)
    rank = dist.get_rank(group)
    parts: list[Part] = []
    objects: dict[str, Any] = {}

    def collect() -> None:
        _check_group(model, optimizer, group)
        all_parts, state_objects = _collect_state(model, optimizer, rank)
        parts.extend(part for part in all_parts if rank == 0 or not part.is_replicated)
        objects.update(state_objects)
        if rank == 0:
            objects.update(_collect_header_objects(model, optimizer, extra))

    # Only the owner of a parameter may have state that cannot be saved.
    run_on_ranks(collect, group, f"checkpoint {path} was not saved")
    tied = {f"model.{name}": f"model.{first}" for name, first in find_tied_names(model).items()}
    write_folder(Path(path), parts, objects, group, tied)


def _find_communicators(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[Communicator]:
    communicators = [fsdp.communicator for fsdp in find_fsdps(model)]
    if isinstance(optimizer, ShardedOptimizer):
        communicators.append(optimizer.communicator)
    return communicators


def _find_group(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dist.ProcessGroup | None:
    """Return the group over which the model or its optimizer is sharded; None if neither is."""
    communicators = _find_communicators(model, optimizer)
    return communicators[0].mesh.get_group() if communicators else None


def _check_group(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError if a model or its optimizer is sharded over other ranks than `group`."""
    # A mesh may list its ranks in another order than its group.
    ranks = sorted(dist.get_process_group_ranks(group))
    for communicator in _find_communicators(model, optimizer):
        sharded_over = sorted(communicator.mesh.mesh.tolist())
        if sharded_over != ranks:
            raise ValueError(
                f"expected the group over which the model or its optimizer is sharded, of ranks "
                f"{sharded_over}, got ranks {ranks}: pass it as group="
            )


def _collect_header_objects(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> dict[str, Any]:
    """Return rank 0's objects: group options, module states that are not parts, and `extra`."""
    objects: dict[str, Any] = {}
    groups = optimizer.param_groups if optimizer else []
    names = find_group_names(model, optimizer) if optimizer else []
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        # torch's reader expects these names.
        for key, value in {"params": members, **get_options(group)}.items():
            _check_key(key, f"options of parameter group {index}")
            objects[f"optimizer.param_groups.{index}.{key}"] = value
    objects[HEADER] = {
        "version": VERSION,
        "modules": {get_original_name(name): v for name, v in find_model_parts(model)[1].items()},
        "extra": extra or {},
    }
    return objects


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    prefix: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill model and optimizer from `path`; return the saved `extra` or an empty dictionary.

    `path` is a checkpoint of `save_checkpoint`, from any stage and number of ranks, or another
    torch.distributed.checkpoint folder. It may also be a safetensors file, a folder of such files,
    or their index. Every rank must call this function. Each of n ranks verifies the checksums of
    1/n of the files, and reads its elements. Floating-point values are cast to the model's dtype.
    Integers are cast only to dtypes that can represent all values of the stored dtype. If the
    checkpoint is damaged, has another format version, or belongs to another model, every rank
    raises RuntimeError before anything is changed. If another job replaces the checkpoint while it
    is being loaded, every rank raises RuntimeError, and the model may have parts of both. For
    folders of other programs, return all entries that are not tensors and belong neither to the
    model nor to an optimizer.

    strict: False skips tensors and optimizer state that only the model or only the checkpoint has,
        with a warning.
    prefix: the prefix of the model's names in other programs' checkpoints. By default, the only
        prefix that fits is used. Raise RuntimeError if several prefixes fit.
    group: see `save_checkpoint`.
    """
    group = group or _find_group(model, optimizer)
    failure = f"checkpoint {path} was not loaded"
    opened: list[Loading] = []

    def check() -> int:
        folder = find_checkpoint(Path(path))
        before = hash_checkpoint(folder)
        checksums.verify(folder, dist.get_rank(group), dist.get_world_size(group))
        opened.append(_open(folder, model, optimizer, strict, prefix))
        return before

    fingerprints = run_on_ranks(check, group, failure)
    if len(set(fingerprints)) > 1:
        cause = "another job replaced the folder, or the hosts do not share it"
        raise RuntimeError(f"{failure}: the ranks read different checkpoints: {cause}; load again")
    loading = opened[0]

    def fill() -> None:
        loading.fill()
        if hash_checkpoint(find_checkpoint(Path(path))) != fingerprints[0]:
            raise RuntimeError(
                "another job replaced the checkpoint while it was being loaded, so the model may "
                "have parts of both: load again"
            )

    run_on_ranks(fill, group, failure)
    for problem in loading.left_out:
        warnings.warn(problem, stacklevel=2)
    return loading.contents.extra


def _open(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    prefix: str | None,
) -> Loading:
    """Return a Loading of the checkpoint at `path`, matched with the model and the optimizer."""
    check_format(path)
    weights = None if (path / ".metadata").exists() else find_weights(path)
    parts, _ = find_model_parts(model)
    names = {part.name for part in parts} | find_tied_names(model).keys()
    contents = read_contents(weights or open_folder(path), names, prefix)
    return Loading(contents, model, optimizer, strict)


def _collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> tuple[list[Part], dict[str, Any]]:
    """Return this rank's parts of the model and the optimizer, and its objects."""
    model_parts, _ = find_model_parts(model)
    parts = [replace(part, name=f"model.{part.name}") for part in model_parts]
    objects: dict[str, Any] = {}
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    if optimizer is None or inner is None:
        return parts, objects
    check_state(inner)
    for group in find_slots(model, optimizer):
        for slot in group:
            state = inner.state.get(slot.parameter, {})
            _collect_slot(slot, state, rank, parts, objects)
    return parts, objects


def _collect_slot(
    slot: Slot, state: dict[str, Any], rank: int, parts: list[Part], objects: dict[str, Any]
) -> None:
    """Add the state of one parameter to `parts` and `objects`."""
    run = slot.run
    if run is None:
        return
    # Some values, such as a step count, are equal on all ranks that have a part of the parameter.
    # The rank with the parameter's first element writes them. Rank 0 writes them if the parameter
    # has no elements, and all values of a replicated parameter.
    writes_if_empty = slot.is_replicated or rank == 0
    is_first = run.start == 0 and (run.stop > 0 or (not slot.shape.numel() and writes_if_empty))
    for key, value in state.items():
        _check_key(key, f"state of {slot.name}")
        name = f"optimizer.state.{slot.name}.{key}"
        if not isinstance(value, torch.Tensor):
            if is_first and (not slot.is_replicated or rank == 0):
                objects[name] = value
            continue
        flat = value.detach().reshape(-1)
        if value.shape == run.shape:
            parts.append(Part(name, slot.shape, run.start, run.stop, flat, slot.is_replicated))
        elif is_first:
            parts.append(Part(name, value.shape, 0, value.numel(), flat, slot.is_replicated))


def _check_key(key: Any, kind: str) -> None:
    """Raise ValueError if a load could not find the end of the name before this key."""
    if not isinstance(key, str) or "." in key:
        raise ValueError(
            f"expected names without dots for the optimizer's {kind}, got {key!r}, which a load "
            "could not separate from the parameter's name or the group's number: rename it"
        )

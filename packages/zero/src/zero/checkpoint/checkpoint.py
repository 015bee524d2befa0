"""Checkpoints that any stage saves and any other stage loads exactly, on any number of ranks.

The folder is an ordinary torch.distributed.checkpoint with whole tensors under the unwrapped
module's names. Each rank writes boxes that cover its elements. The folder is written beside its
final path and renamed when every rank is done, so the last good checkpoint survives any failure.
Loading checks everything before it changes anything, and each rank reads only its elements. Weights
of other programs can be loaded too.
"""

from __future__ import annotations

import atexit
import copy
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.checkpoint.contents import HEADER, VERSION, read_contents
from zero.checkpoint.draft import PathLock, current
from zero.checkpoint.loading import Loading
from zero.checkpoint.other_formats import check_format
from zero.checkpoint.ownership import (
    Part,
    Slot,
    group_names,
    model_parts,
    slots,
    tied_names,
)
from zero.checkpoint.storage import Writer, find, fingerprint, together
from zero.checkpoint.weights import find_weights
from zero.optimizer.optimizer_kinds import check_state
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_dict import options_of


class Saving:
    """A save in progress; every rank must call `wait()` to publish it.

    Earlier saves are published first, in order. If `wait()` is not called, the next save to the
    same path publishes this one; at program exit it is discarded with a message.
    """

    def __init__(self, path: str, publish: Callable[[], None], discard: Callable[[], None]) -> None:
        self.path = path
        self._publish: Callable[[], None] | None = publish
        self._discard = discard
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the checkpoint is at its final path; raise if the save failed."""
        if self in _pending_saves:
            _publish_first(_pending_saves.index(self))
            _pending_saves.remove(self)
            self._publish_once()
        if self._error is not None:
            raise self._error

    def _publish_once(self) -> None:
        publish = self._publish
        self._publish = None
        if publish is not None:
            try:
                publish()
            except Exception as error:
                self._error = error


#: Asynchronous saves not yet published, in the order in which all ranks started them.
_pending_saves: list[Saving] = []


def _publish_first(count: int) -> None:
    """Publish the first `count` pending saves; warn about each save that failed."""
    for _ in range(count):
        saving = _pending_saves.pop(0)
        saving._publish_once()
        if saving._error is not None:
            warnings.warn(f"{saving._error}", RuntimeWarning, stacklevel=3)


def _publish_until(path: str) -> None:
    """Publish all pending saves up to and including the last one whose target is `path`."""
    count = 0
    for index, saving in enumerate(_pending_saves):
        if saving.path == path:
            count = index + 1
    _publish_first(count)


@atexit.register
def _report_unpublished() -> None:
    """Report the saves that were never published; publishing them would need all ranks."""
    for saving in _pending_saves:
        print(f"{saving.path} was not saved: call wait() before the end", file=sys.stderr)
        saving._discard()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    async_op: bool = False,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Saving | None:
    """Write model, optimizer and `extra` (plain values and tensors) to the folder `path`.

    Every rank must call it. If a rank fails, every rank raises a RuntimeError that names the failed
    ranks, and the folder is unchanged.

    async_op: copy the state, write in a thread, and return a Saving, whose `wait()` publishes the
        checkpoint; a later save to the same path publishes it first.
    keep: the number of checkpoints to keep in a series, whose names differ only in the last number,
        such as `step-100`; older checkpoints of the series are removed.
    """
    final = Path(os.path.abspath(path))
    real = os.path.realpath(path)
    _check_keep(keep, final)
    _publish_until(real)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    all_parts, objects = _collect_state(model, optimizer, rank)
    if rank == 0:
        objects |= _header_objects(model, optimizer, extra)
    parts = [part for part in all_parts if part.is_written_by(rank, world)]
    if async_op:
        parts = [replace(p, values=_copy_to_cpu(p.values), target=None) for p in parts]
        objects = copy.deepcopy(objects)
    tied = {f"model.{name}": f"model.{first}" for name, first in tied_names(model).items()}
    writer = Writer(Path(path), parts, objects, group, tied)
    try:
        writer.plan()
        if not async_op:
            writer.write()
    except BaseException:
        # An interrupt must not leave the path locked.
        writer.close()
        raise

    def publish() -> None:
        writer.publish()
        if rank == 0 and keep is not None:
            _remove_older(final, keep)

    if not async_op:
        publish()
        return None

    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = pool.submit(writer.write)
    pool.shutdown(wait=False)

    def publish_when_written() -> None:
        written.result()
        publish()

    saving = Saving(real, publish_when_written, writer.close)
    _pending_saves.append(saving)
    return saving


def _check_keep(keep: int | None, path: Path) -> None:
    if keep is not None and (keep < 1 or not re.search(r"\d", path.name)):
        raise ValueError(
            f"expected keep >= 1 and a name with a number, got keep={keep} and {path}: pass a path "
            "such as run/step-100"
        )


def _header_objects(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the objects of rank 0: group options, non-tensor module states, and `extra`."""
    objects: dict[str, Any] = {}
    groups = _groups(model, optimizer) if optimizer else []
    for index, group in enumerate(groups):
        # torch's reader expects these names.
        for key, value in group.items():
            objects[f"optimizer.param_groups.{index}.{key}"] = value
    objects[HEADER] = {
        "version": VERSION,
        "groups": len(groups),
        "modules": model_parts(model)[1],
        "extra": extra or {},
    }
    return objects


def _copy_to_cpu(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory."""
    values = values.detach()
    return values.clone() if values.device.type == "cpu" else values.cpu()


def _remove_older(path: Path, keep: int) -> None:
    """Remove all but the newest checkpoints of a series; `path` is the newest."""
    before, after = re.split(r"\d+(?!.*\d)", path.name)
    series = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    others = []
    for other in path.parent.iterdir():
        match = series.fullmatch(other.name)
        if match is None or other.is_symlink() or os.path.samefile(other, path):
            continue
        if (other / ".metadata").exists():
            # Some file systems store whole seconds; within one second, the larger number is newer.
            age = (other / ".metadata").stat().st_mtime_ns, int(match[1])
            others.append((age, other))
    others.sort(reverse=True)
    for _, other in others[keep - 1 :]:
        lock = PathLock(other)
        try:
            lock.acquire()
        except (RuntimeError, FileNotFoundError):
            # Another job is saving to it, or has removed it.
            continue
        try:
            # Rename first, so that a partly removed checkpoint is never found under its name.
            removed = other.with_name(f".{other.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            other.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        finally:
            lock.release()


# State that is made in inference mode could not be stepped.
@torch.inference_mode(False)
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
    """Fill model and optimizer from `path`; return the `extra` that was saved.

    `path` is a checkpoint of `save_checkpoint`, from any stage and number of ranks; another
    torch.distributed.checkpoint folder; or a safetensors or torch file of weights, or a folder of
    such files. Every rank must call it, and reads only its elements. Values are cast to the model's
    dtype. If the checkpoint is damaged, has another format version, or belongs to another model,
    every rank raises RuntimeError before anything is changed.

    strict: False skips tensors that only the model or only the checkpoint has, with a warning.
    prefix: the prefix of the model's names in other programs' checkpoints. By default, the prefix
        that fits most names is used; if another one may be meant, the load is refused.
    """
    _publish_until(os.path.realpath(path))
    failure = f"checkpoint {path} was not loaded"
    opened: list[Loading] = []

    def check() -> int:
        folder = current(Path(path))
        before = fingerprint(folder)
        try:
            opened.append(_open(folder, model, optimizer, strict, prefix))
        except Exception as error:
            if fingerprint(current(Path(path))) != before:
                raise RuntimeError(
                    "another job replaced the checkpoint while it was being checked: load again"
                ) from error
            raise
        return before

    fingerprints = together(check, group, failure)
    if len(set(fingerprints)) > 1:
        raise RuntimeError(f"{failure}: ranks found different checkpoints there; load again")
    loading = opened[0]

    def fill() -> None:
        loading.fill()
        if fingerprint(current(Path(path))) != fingerprints[0]:
            raise RuntimeError(
                "another job replaced the checkpoint while it was being loaded, so the model may "
                "have parts of both: load again"
            )

    together(fill, group, failure)
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
    """Match the checkpoint with the model and the optimizer, and verify the stored bytes."""
    check_format(path)
    weights = None if (path / ".metadata").exists() else find_weights(path)
    names = {part.name: part.name for part in model_parts(model)[0]} | tied_names(model)
    contents = read_contents(weights or find(path), names, prefix)
    loading = Loading(contents, model, optimizer, strict)
    loading.verify()
    return loading


def _collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> tuple[list[Part], dict[str, Any]]:
    """Return this rank's parts of the model and the optimizer, and its objects."""
    parts = [replace(part, name=f"model.{part.name}") for part in model_parts(model)[0]]
    objects: dict[str, Any] = {}
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    if optimizer is None or inner is None:
        return parts, objects
    check_state(inner)
    for group in slots(model, optimizer):
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
    # The rank with the parameter's first element writes them.
    has_first = run.stop > 0 or _writes_empty_parameter(slot, rank)
    is_first = not slot.is_copy and run.start == 0 and has_first
    for key, value in state.items():
        if not isinstance(key, str) or "." in key:
            raise ValueError(
                f"expected names without dots for the optimizer's state of {slot.name}, got "
                f"{key!r}, which a load could not separate from the parameter's name: rename it"
            )
        name = f"optimizer.state.{slot.name}.{key}"
        if not isinstance(value, torch.Tensor):
            if is_first and (not slot.is_replicated or rank == 0):
                objects[name] = value
            continue
        flat = value.detach().reshape(-1)
        if value.shape == run.shape:
            parts.append(
                Part(name, slot.shape, run.start, run.stop, flat, slot.is_replicated, slot.is_copy)
            )
        elif is_first:
            parts.append(Part(name, value.shape, 0, value.numel(), flat, slot.is_replicated))


def _writes_empty_parameter(slot: Slot, rank: int) -> bool:
    """Return True if this rank may write the state of a parameter without elements."""
    return not slot.shape.numel() and (slot.is_replicated or rank == 0)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = group_names(model, optimizer)
    return [
        {"params": group, **options_of(options)}
        for group, options in zip(names, optimizer.param_groups, strict=True)
    ]

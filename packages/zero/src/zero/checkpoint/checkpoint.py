"""Checkpoints that any stage at any number of ranks writes and any other reads, exactly.

Notable:
- the folder is an ordinary torch.distributed.checkpoint: whole tensors under the unwrapped module's
  names, written by each rank in boxes that cover its run of elements;
- it is written beside its final name and renamed when every rank is done, so that whatever happens
  while saving, the last good one stays;
- a load checks everything before it changes anything;
- weights of others are read as well, each rank its own elements only.
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
from zero.checkpoint.holding import (
    Part,
    Slot,
    group_names,
    model_parts,
    second_names,
    slots,
)
from zero.checkpoint.loading import Loading
from zero.checkpoint.storage import Writer, find, fingerprint, together
from zero.checkpoint.weights import find_weights
from zero.optimizer.optimizer import ShardedOptimizer
from zero.optimizer.state import options_of


class Saving:
    """A save under way: `wait()`, called by every rank, publishes it.

    Saves that were begun before it are finished first, in their order, whoever is waited for. What
    nobody waits for is published when the program ends, if all ranks have written by then.
    """

    def __init__(self, path: str, publish: Callable[[], None], alone: Callable[[], bool]) -> None:
        self.path = path
        self._publish: Callable[[], None] | None = publish
        self._alone = alone
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the checkpoint is on disk under its name; raise what went wrong."""
        if self in _under_way:
            _settle(_under_way.index(self))
            _under_way.remove(self)
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


# Asynchronous saves that were not published yet, in the order in which all ranks began them.
_under_way: list[Saving] = []


def _settle(count: int) -> None:
    """Publish the first of the saves under way."""
    for _ in range(count):
        saving = _under_way.pop(0)
        saving._settle()
        if saving._error is not None:
            warnings.warn(f"{saving._error}", RuntimeWarning, stacklevel=3)


def _settle_until(path: str) -> None:
    """Publish what was begun for `path`, and all before it."""
    places = [i for i, saving in enumerate(_under_way) if saving.path == path]
    _settle(places[-1] + 1 if places else 0)


@atexit.register
def _publish_the_rest() -> None:
    """At the end ranks may be in different places, so nothing is communicated."""
    for saving in _under_way:
        try:
            good = saving._alone()
        except Exception:
            good = False
        if not good:
            print(f"{saving.path} was not saved: nobody waited for it", file=sys.stderr)


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

    Every rank calls it. `async_op=True` copies the state, writes in a thread and returns a Saving,
    whose `wait()` publishes the checkpoint; a later save to the same path finishes it first.
    `keep`: of checkpoints whose names differ from this one's in their last number only, such as
    `step-100`, the newest so many stay. Raises RuntimeError on every rank, naming those that
    failed; what was at `path` before is then untouched.
    """
    place, real = os.path.abspath(path), os.path.realpath(path)
    if keep is not None and (keep < 1 or not re.search(r"\d", Path(place).name)):
        raise ValueError(
            f"keep={keep} with the path {path}: keep at least 1, of names with a number, such as "
            "run/step-100"
        )
    _settle_until(real)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts, objects = _state(model, optimizer, rank)
    if rank == 0:
        groups = _groups(model, optimizer) if optimizer else []
        for number, each in enumerate(groups):
            # Where torch's own reader looks for them.
            for key, value in each.items():
                objects[f"optimizer.param_groups.{number}.{key}"] = value
        objects[HEADER] = {
            "version": VERSION,
            "groups": len(groups),
            "modules": model_parts(model)[1],
            "extra": extra or {},
        }
    mine = [part for part in parts if part.written_by(rank, world)]
    if async_op:
        mine = [replace(p, values=_copied(p.values), holder=None) for p in mine]
        objects = copy.deepcopy(objects)
    second = {f"model.{second}": f"model.{first}" for second, first in second_names(model).items()}
    writer = Writer(Path(path), mine, objects, group, second)
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
            _remove_older(Path(place), keep)

    if not async_op:
        publish()
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write() -> None:
        writer.write()
        writer.leave_note()

    written = pool.submit(write)
    pool.shutdown(wait=False)

    def publish_when_written() -> None:
        written.result()
        publish()

    saving = Saving(real, publish_when_written, lambda: rank > 0 or writer.publish_by_notes(world))
    _under_way.append(saving)
    return saving


def _copied(values: torch.Tensor) -> torch.Tensor:
    """On the CPU, in memory of its own."""
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
            # Some file systems count whole seconds; of one second, the larger number is newer.
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
            # Renamed first: a half removed checkpoint must not be found under its name.
            removed = other.with_name(f".{other.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            other.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        finally:
            lock.release()


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
    """Fill model and optimizer from `path`; return what was saved as `extra`.

    `path` is what `save_checkpoint` wrote, at any number of ranks and any stage; another folder of
    torch.distributed.checkpoint; or Hugging Face's safetensors or torch's files of weights, in a
    folder or alone. Of others' weights each rank reads its own elements, in the model's dtype.

    Every rank calls it. Raises RuntimeError on every rank before anything is changed if the
    checkpoint is damaged, newer, or of another model. `strict=False` warns of tensors that only one
    of model and checkpoint has, and leaves them. `prefix`: what stands before the model's names in
    others' checkpoints; found by itself where only one fits.
    """
    _settle_until(os.path.realpath(path))
    failure = f"checkpoint {path} was not loaded"
    opened: list[Loading] = []

    def check() -> int:
        place = current(Path(path))
        before = fingerprint(place)
        try:
            opened.append(_open(place, model, optimizer, strict, prefix))
        except Exception as error:
            if fingerprint(current(Path(path))) != before:
                raise RuntimeError(
                    "another job replaced the checkpoint while it was being checked: load again"
                ) from error
            raise
        return before

    found = together(check, group, failure)
    if len(set(found)) > 1:
        raise RuntimeError(f"{failure}: ranks found different checkpoints there; load again")
    loading = opened[0]

    def fill() -> None:
        loading.fill()
        if fingerprint(current(Path(path))) != found[0]:
            raise RuntimeError(
                "another job replaced the checkpoint while it was being loaded, so the model may "
                "hold parts of both: load again"
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
    """Match what is at `path` with the model and the optimizer, and check the stored bytes."""
    weights = None if (path / ".metadata").exists() else find_weights(path)
    names = [*(part.name for part in model_parts(model)[0]), *second_names(model)]
    contents = read_contents(weights or find(path), names, prefix)
    loading = Loading(contents, model, optimizer, strict)
    loading.verify()
    return loading


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> tuple[list[Part], dict[str, Any]]:
    parts = [replace(p, name=f"model.{p.name}") for p in model_parts(model)[0]]
    objects: dict[str, Any] = {}
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    if optimizer is None or inner is None:
        return parts, objects
    for slot in (slot for group in slots(model, optimizer) for slot in group):
        run = slot.run
        if run is None:
            continue
        # Of what all holders have alike, the holder of the first element writes.
        first = not slot.copy and not run.start and (run.stop > 0 or _writes_empty(slot, rank))
        for key, value in inner.state.get(slot.local, {}).items():
            name = f"optimizer.state.{slot.name}.{key}"
            flat = value.detach().reshape(-1) if isinstance(value, torch.Tensor) else None
            if flat is not None and value.shape == run.shape:
                place = slot.whole, run.start, run.stop
                parts.append(Part(name, *place, flat, slot.replicated, slot.copy))
            elif flat is not None and first:
                parts.append(Part(name, value.shape, 0, value.numel(), flat, slot.replicated))
            elif first and (not slot.replicated or rank == 0):
                objects[name] = value
    return parts, objects


def _writes_empty(slot: Slot, rank: int) -> bool:
    """Whether this rank may write the state of a parameter without elements."""
    return not slot.whole.numel() and (slot.replicated or rank == 0)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = group_names(model, optimizer)
    return [
        {"params": group, **options_of(options)}
        for group, options in zip(names, optimizer.param_groups, strict=True)
    ]

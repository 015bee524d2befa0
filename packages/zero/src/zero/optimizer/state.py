"""A sharded optimizer's state as dictionaries in torch's format, whole or as rows of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from zero.partition import Piece
from zero.rows import Run, in_order, state_rows, whole_state
from zero.wire import Wire


class Sharded(Protocol):
    """What a sharded optimizer tells of itself."""

    inner: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    wire: Wire

    def show_state(self, some: bool) -> None:
        """Let `state` be what the inner optimizer keeps; `some`: what any rank's does."""

    def shards(self) -> list[tuple[nn.Parameter, Piece, nn.Parameter, Any]]:
        """Parameter, which elements of it this rank holds, and the inner optimizer's view."""


def state_rows_of(optimizer: Sharded) -> dict[str, Any]:
    """What the unsharded optimizer's `state_dict()` would be, with rows of its tensors."""
    return _collected(optimizer, state_rows)


def full_state(optimizer: Sharded) -> dict[str, Any]:
    """What the unsharded optimizer's `state_dict()` would be, on the CPU."""
    return _collected(
        optimizer, lambda held, parameter, wire: whole_state(held, parameter.shape, wire)
    )


def load_state(optimizer: Sharded, given: dict[str, Any]) -> None:
    """Take either kind of dictionary."""
    if len(given["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(given['param_groups'])} parameter groups, this optimizer has "
            f"{len(optimizer.param_groups)}: make the same groups as when saving"
        )
    runs = _runs(optimizer)
    state, groups, place = {}, [], {}
    for index, shard in enumerate(p for g in optimizer.inner.param_groups for p in g["params"]):
        place[shard] = index
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for parameter, entry in zip(parameters, in_order(given), strict=False):
        for run, shard in runs.get(parameter, ()) if entry else ():
            state[place[shard]] = {k: run.of(parameter.shape, k, v) for k, v in entry.items()}
    numbers = iter(range(len(place)))
    for theirs, inner in zip(given["param_groups"], optimizer.inner.param_groups, strict=True):
        groups.append({**options_of(theirs), "params": [next(numbers) for _ in inner["params"]]})
    optimizer.inner.load_state_dict({"state": state, "param_groups": groups})
    optimizer.show_state(bool(given["state"]))
    for group, outer in zip(groups, optimizer.param_groups, strict=True):
        outer.update(options_of(group))


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _collected(optimizer: Sharded, collect: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    runs, inner = _runs(optimizer), optimizer.inner.state
    state, groups, number = {}, [], 0
    for group in optimizer.param_groups:
        numbers = range(number, number := number + len(group["params"]))
        groups.append({**group, "params": list(numbers)})
        for index, parameter in zip(numbers, group["params"], strict=True):
            held = [(run, inner[s]) for run, s in runs.get(parameter, ()) if s in inner]
            found = collect(held, parameter, optimizer.wire)
            if found:
                state[index] = found
    return {"state": state, "param_groups": groups}


def _runs(optimizer: Sharded) -> dict[nn.Parameter, list[tuple[Run, nn.Parameter]]]:
    """What this rank holds of each parameter, and the inner optimizer's view of it."""
    runs: dict[nn.Parameter, list[tuple[Run, nn.Parameter]]] = {}
    for parameter, piece, shard, _ in optimizer.shards():
        run = Run(piece.start, piece.stop, shard.shape)
        runs.setdefault(parameter, []).append((run, shard))
    return runs

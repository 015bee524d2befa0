"""A sharded optimizer's state as dictionaries: one rank's own, and the whole in torch's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero.optimizer.elementwise import Split
from zero.partition import Piece
from zero.wire import Wire

SHARD = "shard"


class Sharded(Protocol):
    """What a sharded optimizer tells of itself."""

    inner: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    splits: list[Split]
    state: Any
    wire: Wire

    def shards(self) -> list[tuple[nn.Parameter, Piece, nn.Parameter, Any]]:
        """Parameter, which elements of it this rank holds, and the inner optimizer's view."""


def local_state(optimizer: Sharded) -> dict[str, Any]:
    """This rank's state: a list of (start, stop, state) for each parameter's number."""
    state: dict[int, list[Any]] = {}
    for number, piece, shard in _numbered(optimizer):
        if shard in optimizer.inner.state:
            entry = (piece.start, piece.stop, optimizer.inner.state[shard])
            state.setdefault(number, []).append(entry)
    shard_of = {"rank": optimizer.wire.rank, "world": optimizer.wire.world}
    return {"state": state, "param_groups": _packed_groups(optimizer), SHARD: shard_of}


def full_state(optimizer: Sharded) -> dict[str, Any]:
    """What the unsharded optimizer's `state_dict()` would be, on CPU; every rank calls it."""
    mine = [
        (number, piece, {k: _to_cpu(v) for k, v in optimizer.inner.state[shard].items()})
        for number, piece, shard in _numbered(optimizer)
        if shard in optimizer.inner.state
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    splits = [
        split
        for split, group in zip(optimizer.splits, optimizer.param_groups, strict=True)
        for _ in group["params"]
    ]
    state: dict[int, dict[str, Any]] = {}
    for number, piece, values in (entry for rank in optimizer.wire.objects(mine) for entry in rank):
        whole = state.setdefault(number, {})
        shape = parameters[number].shape
        for key, value in values.items():
            if isinstance(value, Tensor) and splits[number] == "elements" and value.dim():
                if key not in whole:
                    whole[key] = value.new_empty(shape)
                whole[key].view(-1)[piece.start : piece.stop] = value
            else:
                whole[key] = value
    return {"state": dict(sorted(state.items())), "param_groups": _packed_groups(optimizer)}


def load_state(optimizer: Sharded, given: dict[str, Any]) -> None:
    """Take either kind of dictionary."""
    if len(given["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(given['param_groups'])} parameter groups, this optimizer has "
            f"{len(optimizer.param_groups)}: make the same groups as when saving"
        )
    held = given.get(SHARD)
    if held is not None and (held["rank"], held["world"]) != (
        optimizer.wire.rank,
        optimizer.wire.world,
    ):
        raise ValueError(
            f"this is the state of rank {held['rank']} of {held['world']}, not of rank "
            f"{optimizer.wire.rank} of {optimizer.wire.world}: save full_state_dict(), or use "
            "save_checkpoint and load_checkpoint"
        )
    state, place = {}, {}
    for index, shard in enumerate(p for g in optimizer.inner.param_groups for p in g["params"]):
        place[shard] = index
    for number, piece, shard in _numbered(optimizer):
        found = given["state"].get(number, [] if held else {})
        if held is not None:
            for start, stop, values in found:
                if (start, stop) == (piece.start, piece.stop):
                    state[place[shard]] = values
        elif found:
            state[place[shard]] = {k: _cut(v, piece, shard) for k, v in found.items()}
    groups = []
    numbers = iter(range(len(place)))
    for theirs, inner in zip(given["param_groups"], optimizer.inner.param_groups, strict=True):
        options = {k: v for k, v in theirs.items() if k not in ("params", "param_names")}
        groups.append({**options, "params": [next(numbers) for _ in inner["params"]]})
    optimizer.inner.load_state_dict({"state": state, "param_groups": groups})
    optimizer.state = optimizer.inner.state
    for group, outer in zip(groups, optimizer.param_groups, strict=True):
        outer.update({k: v for k, v in group.items() if k != "params"})


def _numbered(optimizer: Sharded) -> Iterator[tuple[int, Piece, nn.Parameter]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = {parameter: i for i, parameter in enumerate(parameters)}
    for parameter, piece, shard, _ in optimizer.shards():
        yield number[parameter], piece, shard


def _packed_groups(optimizer: Sharded) -> list[dict[str, Any]]:
    packed, number = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        options = {k: v for k, v in group.items() if k != "params"}
        packed.append({**options, "params": list(range(number, number + count))})
        number += count
    return packed


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _cut(value: Any, piece: Piece, shard: nn.Parameter) -> Any:
    whole = isinstance(value, torch.Tensor) and value.dim() > 0 and shard.shape != value.shape
    if not whole or value.numel() < piece.stop:
        return value.clone() if isinstance(value, Tensor) else value
    return value.reshape(-1)[piece.start : piece.stop].clone().view(shard.shape)

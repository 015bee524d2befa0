"""State dicts of a sharded optimizer in torch's format, with DTensors."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from zero.dtensors import Run, full_entries, state_rows
from zero.optimizer.optimizer_trial import check_state
from zero.partition import Piece
from zero.process_groups import Communicator


class Sharded(Protocol):
    """The parts of a ShardedOptimizer that its state dicts are made from."""

    inner: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    communicator: Communicator

    def expose_inner_state(self, is_present: bool) -> None:
        """Let `state` be nonempty if any rank has state."""

    def shards(self) -> list[tuple[nn.Parameter, Piece, nn.Parameter, Any]]:
        """Return each parameter, this rank's elements of it, and the inner optimizer's view."""


# Tensors that are made in inference mode could not be stepped.
@torch.inference_mode(False)
@torch.no_grad()
def load_state_dict(optimizer: Sharded, state_dict: dict[str, Any]) -> None:
    """Load a state dict with DTensors."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            f"expected a state of groups of {sizes} parameters, got groups of {saved_sizes}: make "
            "the same groups as when saving"
        )
    shards = [shard for group in optimizer.inner.param_groups for shard in group["params"]]
    index_of = {shard: index for index, shard in enumerate(shards)}
    runs = _runs(optimizer)
    state = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, entry in zip(parameters, full_entries(state_dict), strict=False):
        if not entry:
            continue
        for run, shard in runs.get(parameter, []):
            state[index_of[shard]] = {
                key: run.select(parameter.shape, key, value) for key, value in entry.items()
            }
    groups = []
    start = 0
    for loaded, inner in zip(state_dict["param_groups"], optimizer.inner.param_groups, strict=True):
        stop = start + len(inner["params"])
        groups.append({**options_of(loaded), "params": list(range(start, stop))})
        start = stop
    optimizer.inner.load_state_dict({"state": state, "param_groups": groups})
    optimizer.expose_inner_state(bool(state_dict["state"]))
    for group, outer in zip(groups, optimizer.param_groups, strict=True):
        outer.update(options_of(group))


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options without its parameters."""
    return {key: v for key, v in group.items() if key not in ("params", "param_names")}


def dtensor_state_dict(optimizer: Sharded) -> dict[str, Any]:
    """Return the unsharded optimizer's `state_dict()`, with DTensors for its tensors."""
    runs = _runs(optimizer)
    check_state(optimizer.inner)
    inner_state = optimizer.inner.state
    state = {}
    groups = []
    index = 0
    for group in optimizer.param_groups:
        indices = []
        for parameter in group["params"]:
            local_state = [
                (run, inner_state[shard])
                for run, shard in runs.get(parameter, [])
                if shard in inner_state
            ]
            collected = state_rows(local_state, parameter, optimizer.communicator)
            if collected:
                state[index] = collected
            indices.append(index)
            index += 1
        groups.append({**group, "params": indices})
    return {"state": state, "param_groups": groups}


def _runs(optimizer: Sharded) -> dict[nn.Parameter, list[tuple[Run, nn.Parameter]]]:
    """Return this rank's runs of each parameter, with the inner optimizer's views of them."""
    runs: dict[nn.Parameter, list[tuple[Run, nn.Parameter]]] = {}
    for parameter, piece, shard, _ in optimizer.shards():
        run = Run(piece.start, piece.stop, shard.shape)
        runs.setdefault(parameter, []).append((run, shard))
    return runs

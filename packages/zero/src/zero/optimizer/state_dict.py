"""State dicts of a sharded optimizer in torch's format, with DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from zero.dtensors import Run, gather_state_rows, iter_full_entries
from zero.optimizer.optimizer_trial import check_state
from zero.partition import Piece
from zero.process_groups import Communicator

Groups = list[dict[str, Any]]
#: See `FlatParameters.shards`.
Shards = Sequence[tuple[nn.Parameter, Piece, nn.Parameter, Any]]


def make_dtensor_state_dict(
    groups: Groups, shards: Shards, inner: torch.optim.Optimizer, communicator: Communicator
) -> dict[str, Any]:
    """Return the state dict that an unsharded optimizer of `groups` would have.

    State of a parameter's shape is a DTensor. Every rank must call this function.

    inner: the optimizer that steps `shards`.
    """
    check_state(inner)
    runs = _group_runs_by_parameter(shards)
    state = {}
    numbered = number_parameters(groups, groups)
    for group, entry in zip(groups, numbered, strict=True):
        for parameter, number in zip(group["params"], entry["params"], strict=True):
            local_state = [
                (run, inner.state[shard])
                for run, shard in runs.get(parameter, [])
                if shard in inner.state
            ]
            collected = gather_state_rows(local_state, parameter, communicator)
            if collected:
                state[number] = collected
    return {"state": state, "param_groups": numbered}


@torch.no_grad()
def load_state_dict(
    groups: Groups, shards: Shards, inner: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Load the state dict of an optimizer of `groups` into the optimizer that steps `shards`.

    The options are also written to `groups`. Every rank must call this function. Raise ValueError
    if the number of groups, or the number of parameters of any group, differs.
    """
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            f"expected a state of groups of {sizes} parameters, got groups of {saved_sizes}: make "
            "the same groups as when saving"
        )
    stepped = [shard for group in inner.param_groups for shard in group["params"]]
    number_of = {shard: number for number, shard in enumerate(stepped)}
    runs = _group_runs_by_parameter(shards)
    state = {}
    parameters = [parameter for group in groups for parameter in group["params"]]
    for parameter, entry in zip(parameters, iter_full_entries(state_dict), strict=True):
        for run, shard in runs.get(parameter, []) if entry else ():
            state[number_of[shard]] = {
                key: run.select(parameter.shape, key, value) for key, value in entry.items()
            }
    # Copy the options, because another optimizer may use the same tensor of a learning rate.
    options = deepcopy([get_options(group) for group in state_dict["param_groups"]])
    inner.load_state_dict(
        {"state": state, "param_groups": number_parameters(options, inner.param_groups)}
    )
    for group, loaded in zip(groups, options, strict=True):
        group.update(loaded)


def get_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options without its parameters."""
    return {key: v for key, v in group.items() if key not in ("params", "param_names")}


def number_parameters(options: Iterable[dict[str, Any]], groups: Groups) -> Groups:
    """Return the options of `groups` with the numbers of their parameters, as in a state dict."""
    numbered = []
    start = 0
    for entry, group in zip(options, groups, strict=True):
        stop = start + len(group["params"])
        numbered.append({**entry, "params": list(range(start, stop))})
        start = stop
    return numbered


def _group_runs_by_parameter(shards: Shards) -> dict[nn.Parameter, list[tuple[Run, nn.Parameter]]]:
    """Return this rank's runs of each parameter, with the inner optimizer's views of them."""
    runs: dict[nn.Parameter, list[tuple[Run, nn.Parameter]]] = {}
    for parameter, piece, shard, _ in shards:
        run = Run(piece.start, piece.stop, shard.shape)
        runs.setdefault(parameter, []).append((run, shard))
    return runs

"""Whole tensors out of the runs of elements that ranks hold, as DTensors of rows.

Notable: between steps a shard is a run of elements, which no DTensor describes; in a state
dictionary it is rows of the whole (`Shard(0)`), which torch's own tools gather, save and load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from zero.wire import Wire


@dataclass(frozen=True)
class Run:
    """Elements `start` to `stop` of a parameter, held in a tensor of this shape."""

    start: int
    stop: int
    shape: torch.Size

    def of(self, whole: torch.Size, key: str, value: Any) -> Any:
        """This run of a whole parameter's state; what has another shape is alike for all runs."""
        if not isinstance(value, Tensor):
            return value
        # Never the given tensor: two runs of a parameter would count steps in one.
        if value.shape != whole or value.shape == self.shape or key == "step":
            return value.clone()
        return value.reshape(-1)[self.start : self.stop].clone().view(self.shape)


def rows(whole: Tensor, wire: Wire) -> DTensor:
    """This rank's rows of `whole`, which every rank has."""
    mesh = wire.mesh
    if not whole.dim():
        return DTensor.from_local(whole.clone(), mesh, [Replicate()] * mesh.ndim)
    chunks = whole.chunk(wire.world)
    mine = chunks[wire.rank] if wire.rank < len(chunks) else whole[:0]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(
        mine.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def whole_of(value: Any) -> Any:
    """A DTensor gathered; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(
    held: Sequence[tuple[Run, dict[str, Any]]], shape: torch.Size, wire: Wire
) -> dict[str, Any]:
    """An optimizer's state for one parameter, on the CPU, from what ranks hold; all call it."""
    mine = [
        (run, key, _to_cpu(value), isinstance(value, Tensor) and value.shape == run.shape)
        for run, state in held
        for key, value in state.items()
    ]
    whole: dict[str, Any] = {}
    for run, key, value, is_run in (entry for rank in wire.objects(mine) for entry in rank):
        if not is_run:
            whole.setdefault(key, value)
        elif run.shape == shape:
            whole[key] = value
        else:
            if key not in whole:
                whole[key] = value.new_empty(shape)
            whole[key].view(-1)[run.start : run.stop] = value.reshape(-1)
    return whole


def state_rows(
    held: Sequence[tuple[Run, dict[str, Any]]], parameter: Tensor, wire: Wire
) -> dict[str, Any]:
    """The same with what is shaped as the whole `parameter` in rows, on its device."""
    return {
        key: rows(value.to(parameter.device), wire)
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
        else value
        for key, value in whole_state(held, parameter.shape, wire).items()
    }


def in_order(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A state dictionary's entries with DTensors gathered, in the parameters' order."""
    for group in given["param_groups"]:
        for key in group["params"]:
            yield {k: whole_of(v) for k, v in given["state"].get(key, {}).items()}


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value

"""Conversions between runs of elements, whole tensors and DTensors sharded by rows.

Between steps, a shard is a run of elements, which a DTensor cannot describe. In a state dict, a
shard is a range of rows of the whole tensor (`Shard(0)`), which torch's tools can gather, save and
load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero.process_groups import Communicator

if TYPE_CHECKING:
    # Importing this module takes as long as importing torch, and most programs do not need it.
    from torch.distributed.tensor import DTensor

#: Entries of torch's optimizer state that are one number per parameter. They have the same shape as
#: a 0-dimensional parameter, but are not its elements.
_NUMBERS = {"step", "mu_product", "mu", "eta"}


def has_elements(key: str, shape: torch.Size, parameter_shape: torch.Size) -> bool:
    """Return True if a state entry has one element per element of its parameter."""
    return shape == parameter_shape and (len(shape) > 0 or key not in _NUMBERS)


@dataclass(frozen=True)
class Run:
    """Elements `start` to `stop` of a parameter, stored in a tensor of shape `shape`."""

    start: int
    stop: int
    shape: torch.Size

    def select(self, whole_shape: torch.Size, key: str, value: Any) -> Any:
        """Return a copy of this run's part of a state entry of a parameter of shape `whole_shape`.

        A tensor of another shape, such as a step count, is copied whole. A value that is not a
        tensor is returned unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        # If two runs of a parameter shared a tensor, it would be updated twice per step.
        if has_elements(key, value.shape, whole_shape) and value.shape != self.shape:
            return value.reshape(-1)[self.start : self.stop].clone().view(self.shape)
        return value.clone()


def shard_rows(whole: Tensor, communicator: Communicator) -> DTensor:
    """Return `whole`, which every rank has, as a DTensor that is sharded by rows.

    The DTensor is replicated if `whole` has no dimensions.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    placements = [Shard(0) if whole.dim() else Replicate()]
    # Without the clone, the rows could be a view that keeps the memory of `whole` alive.
    rows = distribute_tensor(whole, communicator.mesh, placements, src_data_rank=None).clone()
    assert isinstance(rows, DTensor)
    return rows


def gather_value(value: Any) -> Any:
    """Return a DTensor as a whole tensor, gathered from all ranks, and other values unchanged."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _gather_whole_state(
    local_state: Sequence[tuple[Run, dict[str, Any]]], shape: torch.Size, communicator: Communicator
) -> dict[str, Any]:
    """Return the whole optimizer state of one parameter, gathered from all ranks to the CPU."""
    entries = []
    for run, state in local_state:
        for key, value in state.items():
            is_run = isinstance(value, Tensor) and value.shape == run.shape
            local = value.detach().cpu() if isinstance(value, Tensor) else value
            entries.append((run, key, local, is_run))
    whole: dict[str, Any] = {}
    for rank_entries in communicator.gather_objects(entries):
        for run, key, value, is_run in rank_entries:
            if not is_run:
                whole.setdefault(key, value)
            elif run.shape == shape:
                whole[key] = value
            else:
                if key not in whole:
                    whole[key] = value.new_empty(shape)
                whole[key].view(-1)[run.start : run.stop] = value.reshape(-1)
    return whole


def gather_state_rows(
    local_state: Sequence[tuple[Run, dict[str, Any]]], parameter: Tensor, communicator: Communicator
) -> dict[str, Any]:
    """Return the whole state of one parameter. Tensors of its shape become DTensors (`shard_rows`).

    Every rank must call this function with the state of its runs.
    """
    state = _gather_whole_state(local_state, parameter.shape, communicator)
    for key, value in state.items():
        if isinstance(value, Tensor) and has_elements(key, value.shape, parameter.shape):
            state[key] = shard_rows(value.to(parameter.device), communicator)
    return state


def iter_full_entries(state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter in order, with DTensors gathered from all ranks."""
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            entry = state_dict["state"].get(key, {})
            yield {name: gather_value(value) for name, value in entry.items()}

"""What this rank holds of a training state: named tensors, each a run of elements of a whole one.

Every stage is described the same way, so a checkpoint written by one is read by any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zero.fsdp.fsdp import FSDP
from zero.fsdp.optimizers import adopt
from zero.fsdp.wrap import clean
from zero.optimizer.optimizer import ShardedOptimizer
from zero.rows import Run
from zero.wire import Wire


@dataclass(frozen=True)
class Part:
    """Flat elements `start` to `stop` of the tensor called `name`, whose whole shape is `shape`.

    `replicated` parts are alike on every rank; a `copy` is a shard that a rank of another row of a
    mesh writes. `buffer` parts may differ between ranks, as BatchNorm's do, so that all of them are
    saved from rank 0.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    values: Tensor
    replicated: bool = False
    copy: bool = False
    # What `values` are elements of; where it is not contiguous they are copies.
    holder: Tensor | None = None
    buffer: bool = False

    def written_by(self, rank: int, world: int) -> bool:
        """Return True if this rank writes it: of what all ranks have, each writes some."""
        if self.buffer:
            return rank == 0
        return zlib.crc32(self.name.encode()) % world == rank if self.replicated else not self.copy


@dataclass(frozen=True)
class Slot:
    """A parameter as an optimizer knows it: it keeps `run` of the whole's state for `local`.

    `run` is None where another rank keeps it.
    """

    name: str
    whole: torch.Size
    run: Run | None
    local: nn.Parameter
    replicated: bool
    copy: bool = False


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose names a checkpoint uses: without wrappers, which hold `.module` alone."""
    model = _compiled_from(model)
    while list(model._modules) == ["module"] and not model._parameters and not model._buffers:
        model = _compiled_from(model.get_submodule("module"))
    return model


def second_names(model: nn.Module) -> dict[str, str]:
    """For each further name of a parameter that has several (tied): its first."""
    first: dict[nn.Parameter, str] = {}
    second = {}
    for name, parameter in _named_parameters(model, tied=True):
        if parameter in first:
            second[name] = first[parameter]
        first.setdefault(parameter, name)
    return second


def _named_parameters(
    model: nn.Module, *, tied: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=not tied):
        yield clean(name), parameter


def _compiled_from(model: nn.Module) -> nn.Module:
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def model_parts(model: nn.Module) -> tuple[list[Part], dict[str, Any]]:
    """This rank's parameters and buffers, and the module's states that are not tensors."""
    inner = unwrapped(model)
    parts, sharded = [], _sharded_names(model)
    for slot in _parameter_slots(model):
        assert slot.run is not None
        local, run = slot.local.detach(), slot.run
        values = local.reshape(-1)
        place = slot.name, slot.whole, run.start, run.stop
        parts.append(Part(*place, values, slot.replicated, slot.copy, local))
    parameters = sharded | {name for name, _ in _named_parameters(model, tied=True)}
    others = {}
    wrapper = _compiled_from(model)
    raw = wrapper.state_dictionaries.as_they_are() if isinstance(wrapper, FSDP) else nullcontext()
    with raw:
        state = inner.state_dict()
    for compiled_name, value in state.items():
        name = clean(compiled_name)
        if name in parameters:
            continue
        if isinstance(value, Tensor):
            flat = value.detach().reshape(-1)
            parts.append(Part(name, value.shape, 0, value.numel(), flat, True, False, value, True))
        else:
            others[name] = value
    return parts, others


def slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Slot]]:
    """The optimizer's parameters, group by group, in the order in which it holds them."""
    by_local = {slot.local: slot for slot in _parameter_slots(model)}
    if isinstance(optimizer, ShardedOptimizer):
        names = {parameter: slot.name for parameter, slot in by_local.items()}
        split: dict[nn.Parameter, Slot] = {}
        for parameter, piece, shard, _ in optimizer.shards():
            run = Run(piece.start, piece.stop, shard.shape)
            name, copy = _name_of(parameter, names), is_copy(optimizer.wire)
            split[shard] = Slot(name, parameter.shape, run, shard, False, copy)
        return [[split[p] for p in group["params"]] for group in optimizer.inner.param_groups]
    on_shards = adopt(optimizer)
    if on_shards:
        by_local = {p: replace(slot, run=on_shards.run(p)) for p, slot in by_local.items()}
    return [
        [_name_of(parameter, by_local) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters of each group, the same on every rank."""
    names = {slot.local: slot.name for slot in _parameter_slots(model)}
    return [[_name_of(p, names) for p in group["params"]] for group in optimizer.param_groups]


def _parameter_slots(model: nn.Module) -> Iterator[Slot]:
    seen = set()
    model = _compiled_from(model)
    if isinstance(model, FSDP):
        for unit in model.units:
            for p in unit.parameters:
                seen.add(p.local)
                run = Run(p.start, p.stop, p.local.shape)
                yield Slot(p.name, p.shape, run, p.local, False, is_copy(model.wire))
    for name, parameter in _named_parameters(model):
        if parameter not in seen:
            run = Run(0, parameter.numel(), parameter.shape)
            yield Slot(name, parameter.shape, run, parameter, True)


def is_copy(wire: Wire) -> bool:
    """Whether another row of the mesh holds the same shards, and comes first."""
    return wire.replicas is not None and wire.replicas.rank > 0


def _sharded_names(model: nn.Module) -> set[str]:
    model = _compiled_from(model)
    if not isinstance(model, FSDP):
        return set()
    return {parameter.name for unit in model.units for parameter in unit.parameters}


def _name_of(parameter: nn.Parameter, names: dict[nn.Parameter, Any]) -> Any:
    if parameter not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
            "model: pass the model that it was made from"
        )
    return names[parameter]

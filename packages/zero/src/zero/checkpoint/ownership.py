"""The part of a training state that this rank stores: runs of elements of named tensors.

All stages use the same description, so a checkpoint of one stage can be read by any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zero.dtensors import Run
from zero.fsdp.fsdp import find_fsdps
from zero.fsdp.optimizer_hooks import find_optimizer_hooks
from zero.fsdp.shard import ShardedParameter, as_plain_shard
from zero.fsdp.wrapping import get_original_name
from zero.optimizer.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Part:
    """Flat elements `start` to `stop` of the tensor called `name`, whose whole shape is `shape`."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    values: Tensor
    #: True if every rank has these elements. The ranks' values may differ, so rank 0 writes them.
    is_replicated: bool = False
    #: The tensor whose elements are `values`; if the tensor is not contiguous, `values` is a copy.
    target: Tensor | None = None


@dataclass(frozen=True)
class Slot:
    """A parameter of an optimizer, and the elements whose state this rank has."""

    name: str
    shape: torch.Size
    #: The elements; None if another rank has the state.
    run: Run | None
    #: The tensor that the optimizer steps.
    parameter: nn.Parameter
    is_replicated: bool


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module without wrappers such as FSDP and DDP; checkpoints use its names."""
    model = _unwrap_compiled(model)
    while list(model._modules) == ["module"] and not model._parameters and not model._buffers:
        model = _unwrap_compiled(model.get_submodule("module"))
    return model


def find_tied_names(model: nn.Module) -> dict[str, str]:
    """Return a dictionary that maps the second and later names of tied parameters to the first."""
    first_names: dict[nn.Parameter, str] = {}
    first_of = {}
    for name, parameter in _iter_parameters(model, with_tied=True):
        if parameter in first_names:
            first_of[name] = first_names[parameter]
        else:
            first_names[parameter] = name
    return first_of


def _iter_parameters(
    model: nn.Module, *, with_tied: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    module = unwrap(model)
    for name, parameter in module.named_parameters(remove_duplicate=not with_tied):
        yield get_original_name(name), parameter


def _unwrap_compiled(model: nn.Module) -> nn.Module:
    original = model._modules.get("_orig_mod")
    return model if original is None else original


def find_model_parts(model: nn.Module) -> tuple[list[Part], dict[str, Any]]:
    """Return this rank's parts of parameters and buffers, and the other states of modules.

    The states are those of `get_extra_state()`, and values that are not tensors, by their names in
    `unwrap(model).state_dict()`.
    """
    parts = []
    for slot in _iter_slots(model):
        assert slot.run is not None
        values = as_plain_shard(slot.parameter)
        parts.append(
            Part(
                slot.name,
                slot.shape,
                slot.run.start,
                slot.run.stop,
                values.reshape(-1),
                is_replicated=slot.is_replicated,
                target=values,
            )
        )
    parameter_names = {name for name, _ in _iter_parameters(model, with_tied=True)}
    with ExitStack() as stack:
        for fsdp in find_fsdps(model):
            stack.enter_context(fsdp.state_dict_hooks.keep_shards())
        state = unwrap(model).state_dict()
    states = {}
    for wrapped_name, value in state.items():
        name = get_original_name(wrapped_name)
        if name in parameter_names:
            continue
        # A module may create the tensor of its extra state, so it must receive the loaded one.
        is_extra = name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
        if isinstance(value, Tensor) and not is_extra:
            flat = value.detach().reshape(-1)
            part = Part(name, value.shape, 0, value.numel(), flat, is_replicated=True, target=value)
            parts.append(part)
        else:
            states[wrapped_name] = value
    return parts, states


def find_slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Slot]]:
    """Return the slots of each group in order. Slots of a ShardedOptimizer describe its shards."""
    slot_of = {slot.parameter: slot for slot in _iter_slots(model)}
    if isinstance(optimizer, ShardedOptimizer):
        names = {parameter: slot.name for parameter, slot in slot_of.items()}
        shard_slots: dict[nn.Parameter, Slot] = {}
        for parameter, piece, shard, _ in optimizer.flat.shards:
            run = Run(piece.start, piece.stop, shard.shape)
            name = _look_up(parameter, names)
            shard_slots[shard] = Slot(name, parameter.shape, run, shard, False)
        return [[shard_slots[p] for p in group["params"]] for group in optimizer.inner.param_groups]
    hooks = find_optimizer_hooks(optimizer)
    if hooks:
        for parameter, slot in slot_of.items():
            slot_of[parameter] = replace(slot, run=hooks.find_run(parameter))
    return [
        [_look_up(parameter, slot_of) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def find_group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the parameter names of each group. All ranks return the same names."""
    names = {slot.parameter: slot.name for slot in _iter_slots(model)}
    return [[_look_up(p, names) for p in group["params"]] for group in optimizer.param_groups]


def _iter_slots(model: nn.Module) -> Iterator[Slot]:
    sharded: dict[nn.Parameter, ShardedParameter] = {}
    for fsdp in find_fsdps(model):
        for p in (p for unit in fsdp.units for p in unit.parameters):
            # After `FSDPModule.unshard` the module has the full parameter.
            sharded |= {p.shard: p, p.full: p}
    for name, parameter in _iter_parameters(model):
        if parameter in sharded:
            p = sharded[parameter]
            run = Run(p.start, p.stop, p.shard.shape)
            yield Slot(name, p.shape, run, p.shard, False)
        else:
            run = Run(0, parameter.numel(), parameter.shape)
            yield Slot(name, parameter.shape, run, parameter, True)


def _look_up(parameter: nn.Parameter, table: dict[nn.Parameter, Any]) -> Any:
    if parameter not in table:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the "
            "model: pass the model that the optimizer was constructed for"
        )
    return table[parameter]

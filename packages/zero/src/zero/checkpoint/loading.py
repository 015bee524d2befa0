"""Loading of a checkpoint into a model and an optimizer, after everything has been checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero.checkpoint.contents import Contents
from zero.checkpoint.ownership import (
    Part,
    Slot,
    find_group_names,
    find_model_parts,
    find_slots,
    find_tied_names,
    unwrap,
)
from zero.checkpoint.storage import Folder
from zero.dtensors import has_elements
from zero.fsdp.fsdp import find_fsdps
from zero.fsdp.wrapping import get_original_name
from zero.optimizer.optimizer_kinds import ELEMENTWISE
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_dict import get_options, number_parameters
from zero.process_groups import as_bytes, check_separate_elements

_MISSING_STATE = (
    "the model, not in the checkpoint (of another program, only tensors are loaded as states of "
    "modules)"
)


class Loading:
    """One load of a checkpoint.

    The constructor matches and checks names and shapes; `fill()` reads the data.
    """

    def __init__(
        self,
        contents: Contents,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        strict: bool,
    ) -> None:
        self.contents = contents
        self.model = model
        self.optimizer = optimizer
        self.strict = strict
        #: Descriptions of the tensors that `strict=False` leaves out.
        self.left_out: list[str] = []
        self.tied = find_tied_names(model)
        parts, states = find_model_parts(model)
        #: The states of modules that are neither parameters nor buffers, by the model's names.
        self.module_states = self._match_module_states(states)
        self.parts = self._match_model(parts)
        #: The stored options of each parameter group.
        self.options: list[dict[str, Any]] = []
        #: Each parameter of the optimizer, in order, with the (key, name in the checkpoint) pairs
        #: of its state.
        self.states: list[tuple[Slot, list[tuple[str, str]]]] = []
        if optimizer is not None:
            self._match_optimizer(model, optimizer)

    def fill(self) -> None:
        """Read the data into the model and the optimizer."""
        stored = [replace(part, name=self.contents.model[part.name]) for part in self.parts]
        self.contents.source.read(stored)
        for part in self.parts:
            assert part.target is not None
            if not part.target.is_contiguous():
                # The values were read into a copy of the target.
                part.target.copy_(part.values.view(part.target.shape))
        for fsdp in find_fsdps(self.model):
            for sharded in (p for unit in fsdp.units for p in unit.parameters):
                sharded.unit.mark_changed(sharded)
        if self.optimizer is not None:
            self._fill_optimizer(self.optimizer)
        if self.module_states:
            unwrap(self.model).load_state_dict(self.module_states, strict=False)

    def _match_module_states(self, names: Collection[str]) -> dict[str, Any]:
        """Return the stored states of modules by their names in the model's state dict."""
        stored = self.contents.modules
        original_of = {name: get_original_name(name) for name in names}
        originals = set(original_of.values())
        for name in originals & self.contents.model.keys():
            stored[name] = self.contents.read_whole(self.contents.model.pop(name))
        self._check_missing(sorted(originals - stored.keys()), _MISSING_STATE)
        self._check_missing(sorted(stored.keys() - originals), "the checkpoint only")
        return {name: stored[first] for name, first in original_of.items() if first in stored}

    def _match_model(self, parts: list[Part]) -> list[Part]:
        """Return the model's parts that are in the checkpoint."""
        saved = self.contents.model
        part_of = {part.name: part for part in parts}
        for name, first in self.tied.items():
            if name in saved and first not in saved:
                # Other programs may store a tied tensor under only one of its names.
                saved[first] = saved[name]
            elif name in saved and first in part_of:
                self._check_tied(part_of[first], name)
        only_model = sorted(part_of.keys() - saved.keys())
        only_saved = sorted(saved.keys() - part_of.keys() - self.tied.keys())
        self._check_missing(only_model, "the model, not in the checkpoint")
        matched = [part for part in parts if part.name in saved]
        self._check_without_scales(matched, only_saved)
        self._check_missing(only_saved, "the checkpoint only")
        for part in matched:
            self._check_part(part)
        return matched

    def _check_without_scales(self, parts: list[Part], only_saved: list[str]) -> None:
        """Raise ValueError if float8 weights would be loaded without the scales stored beside them.

        The values of such weights are wrong without the scales, so `strict` does not matter.
        """
        for part in parts:
            dtype = self.contents.get_shape_and_dtype(part.name)[1]
            if not dtype.is_floating_point or dtype.itemsize > 1 or dtype == part.values.dtype:
                continue
            module = part.name[: part.name.rfind(".") + 1]
            for name in only_saved:
                if name.startswith(module) and "scale" in name.removeprefix(module):
                    raise ValueError(
                        f"expected weights that need no scales, got {part.name} in {dtype} with "
                        f"scales in {name}: convert the weights to {part.values.dtype} first, for "
                        "example with the program that quantized them"
                    )

    def _check_missing(self, names: list[str], description: str) -> None:
        """Raise ValueError if there are names; with `strict=False`, record them instead."""
        if not names:
            return
        if self.strict:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ValueError(
                f"{names[0]}{more} is in {description}: load into the model that was saved, or "
                "pass strict=False"
            )
        self.left_out.append(f"{', '.join(names)}: in {description}")

    def _check_part(self, part: Part) -> None:
        """Raise ValueError if a stored tensor cannot be loaded into the model's tensor."""
        saved_shape, saved_dtype = self.contents.get_shape_and_dtype(part.name)
        current_dtype = part.values.dtype
        if saved_shape != part.shape or not _can_load(saved_dtype, current_dtype):
            raise ValueError(
                f"{part.name} is {tuple(saved_shape), saved_dtype} in the checkpoint, "
                f"{tuple(part.shape), current_dtype} in the model: load into the model that "
                "was saved"
            )
        if part.values.is_meta:
            raise ValueError(
                f"{part.name} is on the meta device: allocate it first, with "
                "model.to_empty(device=...) or FSDP(model, device=...)"
            )
        assert part.target is not None
        check_separate_elements(part.name, part.target)

    def _check_tied(self, part: Part, second: str) -> None:
        """Raise ValueError if a tied tensor's two names have different values in the checkpoint."""
        values = []
        for name in (part.name, second):
            shape, dtype = self.contents.get_shape_and_dtype(name)
            if shape == part.shape:
                # Each rank compares its own elements.
                read = torch.empty(part.stop - part.start, dtype=dtype)
                stored = replace(part, name=self.contents.model[name], values=read)
                self.contents.source.read([stored])
                values.append(as_bytes(read))
        # Compare bytes, because NaN is not equal to itself.
        if len(values) < 2 or not torch.equal(*values):
            raise ValueError(
                f"{second} and {part.name} are one tensor in the model and two in the checkpoint: "
                "load into the model that was saved"
            )

    def _match_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._check_one_optimizer()
        if not self.contents.options:
            if self.strict:
                raise ValueError("the checkpoint has no optimizer: load the model alone")
            self.left_out.append("the checkpoint has no optimizer, so its state is unchanged")
            self.optimizer = None
            return
        names_of_groups = find_group_names(model, optimizer)
        names = [name for group in names_of_groups for name in group]

        def find_name(stored: str | int) -> str:
            # Other programs may store a tied tensor under any of its names.
            if isinstance(stored, str):
                return self.tied.get(stored, stored)
            return names[stored] if stored < len(names) else f"parameter {stored}"

        options = {find_name(stored): group for stored, group in self.contents.options.items()}
        self.options = _collect_group_options(options, names_of_groups)
        states = {find_name(stored): entries for stored, entries in self.contents.states.items()}
        for group_slots in find_slots(model, optimizer):
            self.states += [(slot, states.get(slot.name, [])) for slot in group_slots]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        if type(inner) in ELEMENTWISE:
            self._check_state_shapes()

    def _check_state_shapes(self) -> None:
        """Raise ValueError if state has neither one element nor the shape of its parameter."""
        stored: Mapping[str, Any] = self.contents.source.tensors
        for slot, entries in self.states:
            for key, name in entries:
                shape = stored[name][0] if name in stored else torch.Size()
                if shape.numel() != 1 and shape != slot.shape:
                    raise ValueError(
                        f"{name} ({key}) has shape {tuple(shape)} in the checkpoint, and "
                        f"{slot.name} has {tuple(slot.shape)}: pass the parameters to the "
                        "optimizer in the order in which they were saved"
                    )

    def _check_one_optimizer(self) -> None:
        """Raise ValueError if the checkpoint has several optimizers, or state of other models.

        With `strict=False`, leave out state of parameters that the model does not have.
        """
        contents = self.contents
        if len(contents.optimizers) > 1:
            prefixes = ", ".join(repr(prefix) for prefix in contents.optimizers)
            raise ValueError(
                f"the checkpoint has {len(contents.optimizers)} optimizers, under {prefixes}: load "
                "the model alone, and each optimizer with torch.distributed.checkpoint"
            )
        foreign = contents.foreign_states
        if foreign and self.strict:
            more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
            raise ValueError(
                f"expected state of the model's parameters only, got {foreign[0]}{more}: load into "
                "the model that was saved, or pass strict=False"
            )
        if foreign:
            self.left_out.append(f"{', '.join(foreign)}: state of parameters not in the model")

    def _fill_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        source = self.contents.source
        assert isinstance(source, Folder)
        # An entry is (parameter number, key, part) or (parameter number, key, stored name).
        tensors: list[tuple[int, str, Part]] = []
        objects: list[tuple[int, str, str]] = []
        for index, (slot, entries) in enumerate(self.states):
            for key, name in entries if slot.run else ():
                if name in source.tensors:
                    part = _allocate_state(name, source.tensors[name], slot, key)
                    tensors.append((index, key, part))
                else:
                    objects.append((index, key, name))
        loaded = source.read([part for _, _, part in tensors], [name for _, _, name in objects])
        state: dict[int, dict[str, Any]] = {}
        for index, key, part in tensors:
            shape = part.shape if part.target is None else part.target.shape
            state.setdefault(index, {})[key] = part.values.view(shape)
        for index, key, name in objects:
            state.setdefault(index, {})[key] = loaded[name]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        all_options = [
            {**get_options(group), **saved_options}
            for group, saved_options in zip(inner.param_groups, self.options, strict=True)
        ]
        groups = number_parameters(all_options, inner.param_groups)
        # Parameters that were never stepped have no entry: an empty entry makes optimizers fail.
        inner.load_state_dict({"state": dict(sorted(state.items())), "param_groups": groups})
        self._restore_dtypes(inner, [(index, key, state[index][key]) for index, key, _ in tensors])
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.expose_inner_state()
        for saved_options, group in zip(self.options, optimizer.param_groups, strict=True):
            group.update(saved_options)

    def _restore_dtypes(
        self, optimizer: torch.optim.Optimizer, loaded: list[tuple[int, str, torch.Tensor]]
    ) -> None:
        """Restore state that was stored in another dtype than its parameter.

        `Optimizer.load_state_dict` casts all state but step counts to the dtype of its parameter. A
        float32 average of a bfloat16 parameter, for example, would be rounded.

        loaded: each state tensor with its parameter's number and its key.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, key, value in loaded:
            name = self.states[index][0].name
            if name in self.contents.model:
                _, parameter_dtype = self.contents.get_shape_and_dtype(name)
                state = optimizer.state[parameters[index]]
                if value.dtype not in (parameter_dtype, state[key].dtype):
                    state[key] = value.to(state[key].device)


def _allocate_state(name: str, stored: Any, slot: Slot, key: str) -> Part:
    """Return the part of a state tensor that this rank reads, with memory for its values."""
    shape, dtype = stored
    run = slot.run
    if run is not None and has_elements(key, shape, slot.shape):
        values = torch.empty(run.stop - run.start, dtype=dtype, device=slot.parameter.device)
        return Part(name, shape, run.start, run.stop, values, target=values.view(run.shape))
    values = torch.empty(shape.numel(), dtype=dtype)
    return Part(name, shape, 0, shape.numel(), values)


def _can_load(saved: torch.dtype, current: torch.dtype) -> bool:
    """Return True for equal dtypes, two floating-point dtypes, and integers that stay exact.

    Training may continue in another dtype, and other programs may store narrower integers.
    """
    if saved == current or (saved.is_floating_point and current.is_floating_point):
        return True
    dtypes = (saved, current)
    if current == torch.bool or any(d.is_floating_point or d.is_complex for d in dtypes):
        return False
    if saved == torch.bool:
        return True
    old, new = torch.iinfo(saved), torch.iinfo(current)
    return new.min <= old.min and old.max <= new.max


def _collect_group_options(
    options: dict[str, dict[str, Any]], names_of_groups: list[list[str]]
) -> list[dict[str, Any]]:
    """Return the stored options of each parameter group of the optimizer.

    Raise ValueError if only the checkpoint or only the optimizer has a parameter, or if parameters
    of one group have different options in the checkpoint.

    options: the stored options of each parameter.
    """
    different = options.keys() ^ {name for group in names_of_groups for name in group}
    if different:
        raise ValueError(
            f"{min(different)} is in a parameter group of only one of checkpoint and optimizer: "
            "pass the same parameters as when saving"
        )
    for first, *others in filter(None, names_of_groups):
        for name in others:
            if options[name] != options[first]:
                raise ValueError(
                    f"{first} and {name} are in one parameter group of the optimizer and have "
                    f"different options in the checkpoint ({options[first]}, {options[name]}): "
                    "make the same groups as when saving"
                )
    # A learning rate may be a tensor, which two groups must not share.
    return [deepcopy(options[group[0]]) if group else {} for group in names_of_groups]

"""Loading of a checkpoint into a model and an optimizer, after everything has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero.checkpoint.contents import Contents
from zero.checkpoint.ownership import (
    Part,
    Slot,
    group_names,
    mark_changed,
    model_parts,
    slots,
    tied_names,
    unwrapped,
)
from zero.checkpoint.storage import Folder
from zero.dtensors import has_elements
from zero.optimizer.optimizer_kinds import ELEMENTWISE
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_dict import number_parameters, options_of
from zero.process_groups import check_separate_elements


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
        self.tied = tied_names(model)
        self.parts = self._match_model(model_parts(model)[0])
        self.groups: list[dict[str, Any]] = []
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
        mark_changed(self.model)
        if self.optimizer is not None:
            self._fill_optimizer(self.optimizer)
        if self.contents.modules:
            unwrapped(self.model).load_state_dict(self.contents.modules, strict=False)

    def _match_model(self, parts: list[Part]) -> list[Part]:
        """Return the model's parts that are in the checkpoint.

        Raise ValueError if the checkpoint belongs to another model.
        """
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
        self._check_missing(only_saved, "the checkpoint only")
        matched = [part for part in parts if part.name in saved]
        for part in matched:
            self._check_part(part)
        return matched

    def _check_missing(self, names: list[str], description: str) -> None:
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
        saved_shape, saved_dtype = self.contents.shape_and_dtype(part.name)
        # Floating-point values are cast to the model's dtype, because training may continue in
        # another dtype. Other programs may store integers and booleans in narrower or wider dtypes.
        current_dtype = part.values.dtype
        is_cast = saved_dtype.is_floating_point and current_dtype.is_floating_point
        if not self.contents.is_native:
            is_cast = torch.can_cast(saved_dtype, current_dtype)
        has_dtype = saved_dtype == current_dtype or is_cast
        if saved_shape != part.shape or not has_dtype:
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
        source = self.contents.source
        stored = [self.contents.model[name] for name in (part.name, second)]
        if isinstance(source, Folder) and source.are_same_bytes(*stored):
            return
        values = []
        for name, shown in zip(stored, (part.name, second), strict=True):
            shape, dtype = self.contents.shape_and_dtype(shown)
            if shape != part.shape:
                break
            # Each rank compares its own elements.
            values.append(torch.empty(part.stop - part.start, dtype=dtype))
            source.read([replace(part, name=name, values=values[-1], target=None)])
        if len(values) < 2 or not torch.equal(*values):
            raise ValueError(
                f"{second} and {part.name} are one tensor in the model and two in the checkpoint: "
                "load into the model that was saved"
            )

    def _match_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names_of_groups = group_names(model, optimizer)
        names = [name for group in names_of_groups for name in group]
        self._check_one_optimizer()
        saved = self.contents.groups
        if not saved and self.strict:
            raise ValueError("the checkpoint has no optimizer: load the model alone")
        if not saved and not self.contents.states:
            self.left_out.append("the checkpoint has no optimizer, so its state is unchanged")
            self.optimizer = None
            return
        states: dict[str, list[tuple[str, str]]] = {}
        for stored, entries in self.contents.states.items():
            name = names[stored] if isinstance(stored, int) else stored
            # Other programs may store the state of a tied tensor under any of its names.
            states.setdefault(self.tied.get(name, name), entries)
        if saved is not None:
            self.groups = self._match_groups(saved, names_of_groups)
        for group_slots in slots(model, optimizer):
            self.states += [(slot, states.get(slot.name, [])) for slot in group_slots]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        if type(inner) in ELEMENTWISE:
            self._check_state_shapes()

    def _match_groups(
        self, saved: list[dict[str, Any]], names_of_groups: list[list[str]]
    ) -> list[dict[str, Any]]:
        """Return the stored groups; raise ValueError if the optimizer's groups are different."""
        if not self.contents.is_native:
            saved = _merge_groups(saved, names_of_groups)
        # Parameters that are stored by number are in the optimizer's order.
        numbered = iter([name for group in names_of_groups for name in group])
        saved_names = []
        for group in saved:
            members = []
            for member in group["names"]:
                is_name = isinstance(member, str)
                members.append(self.tied.get(member, member) if is_name else next(numbered, ""))
            saved_names.append(members)
        _check_groups(saved_names, names_of_groups)
        return saved

    def _check_state_shapes(self) -> None:
        """Raise ValueError if state has several elements, and not its parameter's shape."""
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
            raise ValueError(
                f"{foreign[0]} and {len(foreign) - 1} more are the state of parameters that the "
                "model does not have: load into the model that was saved, or pass strict=False"
            )
        if foreign:
            self.left_out.append(f"{', '.join(foreign)}: state of parameters not in the model")

    def _state_parts(self) -> tuple[list[tuple[int, str, Part]], list[tuple[int, str, str]]]:
        """Return the optimizer state to read: tensors, and then objects.

        Each is (parameter number, key, part), or (parameter number, key, stored name).
        """
        tensors = []
        objects = []
        stored = self.contents.source.tensors
        for index, (slot, entries) in enumerate(self.states):
            if slot.run is None:
                continue
            for key, name in entries:
                if name in stored:
                    part = _allocate_state(name, stored[name], slot, key)
                    tensors.append((index, key, part))
                else:
                    objects.append((index, key, name))
        return tensors, objects

    def _fill_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        source = self.contents.source
        assert isinstance(source, Folder)
        tensors, objects = self._state_parts()
        loaded = source.read([part for _, _, part in tensors], [name for _, _, name in objects])
        state: dict[int, dict[str, Any]] = {}
        for index, key, part in tensors:
            shape = part.shape if part.target is None else part.target.shape
            state.setdefault(index, {})[key] = part.values.view(shape)
        for index, key, name in objects:
            state.setdefault(index, {})[key] = loaded[name]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        options = [group["options"] for group in self.groups] or [{}] * len(inner.param_groups)
        all_options = [
            {**options_of(group), **saved_options}
            for group, saved_options in zip(inner.param_groups, options, strict=True)
        ]
        groups = number_parameters(all_options, inner.param_groups)
        # Parameters that were never stepped have no entry: an empty entry makes optimizers fail.
        inner.load_state_dict({"state": dict(sorted(state.items())), "param_groups": groups})
        self._restore_dtypes(inner, [(index, key, state[index][key]) for index, key, _ in tensors])
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.expose_inner_state()
        for saved_options, group in zip(options, optimizer.param_groups, strict=True):
            group.update(saved_options)

    def _restore_dtypes(
        self, optimizer: torch.optim.Optimizer, loaded: list[tuple[int, str, torch.Tensor]]
    ) -> None:
        """Restore state that was stored in another dtype than its parameter.

        `Optimizer.load_state_dict` casts all state to the dtype of its parameter. A float32 average
        of a bfloat16 parameter, for example, would be rounded.

        loaded: each state tensor with its parameter's number and its key.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, key, value in loaded:
            name = self.states[index][0].name
            if name in self.contents.model:
                _, parameter_dtype = self.contents.shape_and_dtype(name)
                state = optimizer.state[parameters[index]]
                if value.dtype not in (parameter_dtype, state[key].dtype):
                    state[key] = value.to(state[key].device)


def _allocate_state(name: str, stored: Any, slot: Slot, key: str) -> Part:
    """Return the part of a state tensor that this rank reads, with newly allocated memory."""
    shape, dtype = stored
    run = slot.run
    if run is not None and has_elements(key, shape, slot.shape):
        values = torch.empty(run.stop - run.start, dtype=dtype, device=slot.parameter.device)
        return Part(name, shape, run.start, run.stop, values, target=values.view(run.shape))
    values = torch.empty(shape.numel(), dtype=dtype)
    return Part(name, shape, 0, shape.numel(), values)


def _merge_groups(
    saved: list[dict[str, Any]], names_of_groups: list[list[str]]
) -> list[dict[str, Any]]:
    """Merge options that are stored per parameter into the optimizer's groups.

    Return other groups unchanged. Raise ValueError if options within a group differ.
    """
    options_of_name = {g["names"][0]: g["options"] for g in saved if len(g["names"]) == 1}
    names = [name for group in names_of_groups for name in group]
    if len(options_of_name) < len(saved) or not all(name in options_of_name for name in names):
        return saved
    for first, *others in names_of_groups:
        for name in others:
            if options_of_name[name] != options_of_name[first]:
                raise ValueError(
                    f"{first} and {name} are in one parameter group of the optimizer and have "
                    f"different options in the checkpoint ({options_of_name[first]}, "
                    f"{options_of_name[name]}): make the same groups as when saving"
                )
    return [
        {"names": group, "options": options_of_name[group[0]]} for group in names_of_groups if group
    ]


def _check_groups(saved: list[list[str]], current: list[list[str]]) -> None:
    """Raise ValueError if a group has other parameters in the checkpoint than in the optimizer."""
    if len(saved) != len(current):
        raise ValueError(
            f"expected {len(current)} parameter groups as in the optimizer, got {len(saved)} in "
            "the checkpoint: make the same groups as when saving"
        )
    for index, (saved_names, current_names) in enumerate(zip(saved, current, strict=True)):
        different = set(saved_names) ^ set(current_names)
        if different:
            raise ValueError(
                f"{min(different)} is in parameter group {index} of only one of checkpoint and "
                "optimizer: make the same groups as when saving"
            )

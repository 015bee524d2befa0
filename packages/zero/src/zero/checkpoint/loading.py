"""Fills a model and an optimizer from what a checkpoint holds, after checking all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero.checkpoint.contents import Contents
from zero.checkpoint.holding import (
    Part,
    Slot,
    group_names,
    model_parts,
    second_names,
    slots,
    unwrapped,
)
from zero.checkpoint.storage import Folder
from zero.optimizer.elementwise import ELEMENTWISE
from zero.optimizer.optimizer import ShardedOptimizer
from zero.optimizer.state import options_of


class Loading:
    """One load: what goes where is found out, and checked, when it is made; `fill()` does it."""

    def __init__(
        self,
        contents: Contents,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        strict: bool,
    ) -> None:
        self.contents, self.model, self.optimizer = contents, model, optimizer
        self.strict = strict
        # What strict=False passes over, in words.
        self.left_out: list[str] = []
        self.tied = second_names(model)
        self.parts = self._match(model_parts(model)[0], self.tied)
        self.groups: list[dict[str, Any]] = []
        # For each parameter of the optimizer: (key, name in the checkpoint).
        self.states: list[list[tuple[str, str]]] = []
        self.slots: list[list[Slot]] = []
        if optimizer is not None:
            self._match_optimizer(model, optimizer)

    def verify(self) -> None:
        """Raise ValueError if anything that `fill` would read is damaged."""
        source = self.contents.source
        # Nothing is read yet, so no memory is needed.
        flat = [
            replace(p, name=self.contents.model[p.name], values=_nowhere(p)) for p in self.parts
        ]
        if not isinstance(source, Folder):
            return source.verify(flat)
        tensors, objects = self._state_parts("meta")
        source.verify([*flat, *(part for _, _, part in tensors)], [name for _, _, name in objects])

    def fill(self) -> None:
        """Read it all."""
        alike, source = [], self.contents.source
        for part in self.parts:
            stored = replace(part, name=self.contents.model[part.name])
            _, dtype = self.contents.about(part.name)
            holder = part.holder
            assert holder is not None
            if dtype == holder.dtype and holder.is_contiguous():
                alike.append(stored)
                continue
            # One at a time, in the dtype that it has there.
            values = torch.empty(part.stop - part.start, dtype=dtype)
            source.read([replace(stored, values=values)])
            holder.copy_(values.view(holder.shape))
        source.read(alike)
        if self.optimizer is not None:
            self._fill_optimizer(self.optimizer)
        if self.contents.modules:
            unwrapped(self.model).load_state_dict(self.contents.modules, strict=False)

    def _match(self, parts: list[Part], tied: dict[str, str]) -> list[Part]:
        """The model's parts that the checkpoint has; raise if it is of another model."""
        saved = self.contents.model
        wanted = {part.name: part for part in parts}
        for second, first in tied.items():
            if second in saved and first not in saved:
                # Others keep a tied tensor under one of its names.
                saved[first] = saved[second]
            elif second in saved and first in wanted:
                self._check_same(wanted[first], second)
        only_model = sorted(wanted.keys() - saved.keys())
        only_saved = sorted(saved.keys() - wanted.keys() - tied.keys())
        for names, where in (
            (only_model, "the model, not in the checkpoint"),
            (only_saved, "the checkpoint only"),
        ):
            if not names:
                continue
            more = f" and {len(names) - 1} more" if names[1:] else ""
            if self.strict:
                raise ValueError(
                    f"{names[0]}{more} is in {where}: load into the model that was saved, or pass "
                    "strict=False"
                )
            self.left_out.append(f"{', '.join(names)}: in {where}")
        found = [part for part in parts if part.name in saved]
        for part in found:
            shape, dtype = self.contents.about(part.name)
            ours, theirs = (tuple(part.shape), part.values.dtype), (tuple(shape), dtype)
            # Others' weights are often in half precision, and are taken in the model's dtype.
            if ours[0] != theirs[0] or (self.contents.own and ours != theirs):
                raise ValueError(
                    f"{part.name} is {theirs} in the checkpoint, {ours} in the model: load into "
                    "the model that was saved"
                )
            if part.values.is_meta:
                raise ValueError(
                    f"{part.name} is on the meta device: give it memory first, by "
                    "model.to_empty(device=...) or FSDP(model, device=...)"
                )
        return found

    def _check_same(self, part: Part, second: str) -> None:
        """Raise if a tied tensor's two names are of different values in the checkpoint."""
        source = self.contents.source
        stored = [self.contents.model[name] for name in (part.name, second)]
        if isinstance(source, Folder):
            found = (source.metadata.storage_data or {}).items()
            a, b = ([(i.offset, info) for i, info in found if i.fqn == name] for name in stored)
            if a == b:
                return
        values = []
        for name, shown in zip(stored, (part.name, second), strict=True):
            shape, dtype = self.contents.about(shown)
            if shape != part.shape:
                break
            # This rank's elements only; the other ranks compare theirs.
            values.append(torch.empty(part.stop - part.start, dtype=dtype))
            source.read([replace(part, name=name, values=values[-1], holder=None)])
        if len(values) < 2 or not torch.equal(*values):
            raise ValueError(
                f"{second} and {part.name} are one tensor in the model and two in the checkpoint: "
                "load into the model that was saved"
            )

    def _match_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ours = group_names(model, optimizer)
        self._check_one_optimizer()
        saved = self.contents.groups
        if saved is None and self.strict:
            raise ValueError("the checkpoint holds no optimizer: load the model alone")
        flat = [name for group in ours for name in group]
        states: dict[str, list[tuple[str, str]]] = {}
        for stored, entries in self.contents.states.items():
            name = flat[stored] if isinstance(stored, int) else stored
            # Others may keep the state of a tied tensor under any of its names.
            states.setdefault(self.tied.get(name, name), entries)
        if saved is not None:
            numbers = iter(flat)
            if not self.contents.own:
                saved = _by_our_groups(saved, ours)
            named = [
                [self.tied.get(n, n) if isinstance(n, str) else next(numbers, "") for n in each]
                for each in (group["names"] for group in saved)
            ]
            _check_groups(named, ours)
            self.groups = saved
        self.slots = slots(model, optimizer)
        self.states = [states.get(slot.name, []) for group in self.slots for slot in group]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        if type(inner) in ELEMENTWISE:
            self._check_shapes()

    def _check_shapes(self) -> None:
        """Raise if an element-wise optimizer's state is not shaped as its parameter."""
        held = [slot for group in self.slots for slot in group]
        stored = self.contents.source.tensors
        for slot, entries in zip(held, self.states, strict=True):
            for key, name in entries:
                found: Any = stored.get(name)
                if found is not None and found[0].numel() != 1 and found[0] != slot.whole:
                    raise ValueError(
                        f"{name} ({key}) has shape {tuple(found[0])} in the checkpoint, and "
                        f"{slot.name} has {tuple(slot.whole)}: give the optimizer its parameters "
                        "in the order in which they were saved"
                    )

    def _check_one_optimizer(self) -> None:
        """Raise if it is not certain which stored state belongs to which parameter."""
        contents = self.contents
        if len(contents.optimizers) > 1:
            raise ValueError(
                f"the checkpoint holds {len(contents.optimizers)} optimizers, under "
                f"{', '.join(map(repr, contents.optimizers))}: load the model alone, and each "
                "optimizer with torch.distributed.checkpoint"
            )
        foreign = contents.foreign_states
        if foreign and self.strict:
            raise ValueError(
                f"{foreign[0]} and {len(foreign) - 1} more are the state of parameters that the "
                "model does not have: load into the model that was saved, or pass strict=False"
            )
        if foreign:
            self.left_out.append(f"{', '.join(foreign)}: state of parameters not in the model")

    def _state_parts(
        self, device: str | None = None
    ) -> tuple[list[tuple[int, str, Part]], list[tuple[int, str, str]]]:
        """The optimizer's tensors to read: (parameter's number, key, part); and the objects."""
        tensors, objects = [], []
        held = [slot for group in self.slots for slot in group]
        stored = self.contents.source.tensors
        for index, (slot, entries) in enumerate(zip(held, self.states, strict=True)):
            for key, name in entries if slot.run else ():
                if name in stored:
                    tensors.append((index, key, self._room(name, stored[name], slot, key, device)))
                else:
                    objects.append((index, key, name))
        return tensors, objects

    def _room(self, name: str, found: Any, slot: Slot, key: str, device: str | None) -> Part:
        (size, dtype), run = found, slot.run
        if run is not None and size == slot.whole and key != "step":
            place = device or slot.local.device
            values = torch.empty(run.stop - run.start, dtype=dtype, device=place)
            shaped = values.view(run.shape)
            return Part(name, size, run.start, run.stop, values, holder=shaped)
        values = torch.empty(size.numel(), dtype=dtype, device=device)
        return Part(name, size, 0, size.numel(), values)

    def _fill_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        source = self.contents.source
        assert isinstance(source, Folder)
        tensors, objects = self._state_parts()
        loaded = source.read([part for _, _, part in tensors], [name for _, _, name in objects])
        state: dict[int, dict[str, Any]] = {}
        for index, key, part in tensors:
            shape = part.shape if part.holder is None else part.holder.shape
            state.setdefault(index, {})[key] = part.values.view(shape)
        for index, key, name in objects:
            state.setdefault(index, {})[key] = loaded[name]
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        options = [group["options"] for group in self.groups] or [{}] * len(self.slots)
        numbers = iter(range(len(self.states)))
        inner.load_state_dict(
            {
                # No entry for what was never stepped: an empty one is taken for a broken one.
                "state": dict(sorted(state.items())),
                "param_groups": [
                    {**options_of(group), **chosen, "params": [next(numbers) for _ in members]}
                    for group, chosen, members in zip(
                        inner.param_groups, options, self.slots, strict=True
                    )
                ],
            }
        )
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.show_state(bool(self.contents.states))
        for chosen, group in zip(options, optimizer.param_groups, strict=True):
            group.update(chosen)


def _by_our_groups(saved: list[dict[str, Any]], ours: list[list[str]]) -> list[dict[str, Any]]:
    """Return options that are stored for each parameter alone as groups."""
    alone = {group["names"][0]: group["options"] for group in saved if len(group["names"]) == 1}
    if len(alone) < len(saved) or not all(name in alone for names in ours for name in names):
        return saved
    for first, *others in ours:
        for name in others:
            if alone[name] != alone[first]:
                raise ValueError(
                    f"{first} and {name} are in one parameter group of the optimizer and have "
                    f"different options in the checkpoint ({alone[first]}, {alone[name]}): make "
                    "the same groups as when saving"
                )
    return [{"names": names, "options": alone[names[0]]} for names in ours if names]


def _nowhere(part: Part) -> Tensor:
    return torch.empty(part.stop - part.start, dtype=part.values.dtype, device="meta")


def _check_groups(saved: list[list[str]], ours: list[list[str]]) -> None:
    if len(saved) != len(ours):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, not {len(ours)}")
    for index, (a, b) in enumerate(zip(saved, ours, strict=True)):
        different = set(a) ^ set(b)
        if different:
            raise ValueError(
                f"{min(different)} is in parameter group {index} of only one of checkpoint and "
                "optimizer: make the same groups as when saving"
            )

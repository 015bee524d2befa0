"""Which parameters stage 3 shards together: those under one module of a given class.

Notable:
- a parameter of two modules (tied) belongs to the first, and both gather it;
- modules on the meta device get their memory one sharded module at a time, so that a model which
  fits only in shards can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from math import nan
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from zero.fsdp.unit import Unit

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def make_units(
    root: nn.Module,
    classes: tuple[type[nn.Module], ...],
    materialize: Materialize | None,
    make: Callable[[list[Any]], Unit],
    ignored: set[nn.Parameter],
) -> tuple[list[Unit], dict[nn.Module, list[Unit]]]:
    """Shard what lies under modules of `classes`, each parameter in the innermost such module.

    Returns the units, and for each module those that it needs whole while it runs.
    """
    places: Places = {}
    names: dict[nn.Parameter, str] = {}
    user: dict[nn.Module, nn.Module] = {}
    groups: dict[nn.Module, list[nn.Parameter]] = {}
    for prefix, owner in root.named_modules():
        enclosing = _enclosing(root, prefix, classes)
        user[owner] = owner if enclosing is None else enclosing
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            places.setdefault(parameter, []).append((owner, attribute))
            if enclosing is not None and parameter not in names and parameter not in ignored:
                names[parameter] = clean(f"{prefix}.{attribute}" if prefix else attribute)
                groups.setdefault(enclosing, []).append(parameter)
    units: list[Unit] = []
    units_of: dict[nn.Module, list[Unit]] = {}
    for parameters in groups.values():
        if materialize is not None:
            materialize([*dict.fromkeys(places[p][0][0] for p in parameters)], places)
        kinds: dict[tuple[torch.dtype, bool], list[Any]] = {}
        for old in parameters:
            module, attribute = places[old][0]
            parameter = module._parameters[attribute]
            assert parameter is not None
            kind = parameter.dtype, parameter.requires_grad
            kinds.setdefault(kind, []).append((names[old], parameter, tuple(places[old])))
        for named in kinds.values():
            unit = make(named)
            users = {user[module] for _, _, all_places in named for module, _ in all_places}
            unit.read_in_backward = any(map(reads_weight_in_backward, users))
            units.append(unit)
            for module in users:
                units_of.setdefault(module, []).append(unit)
    if not units:
        found = ", ".join(sorted({type(m).__name__ for m in root.modules()}))
        wanted = ", ".join(c.__name__ for c in classes)
        raise ValueError(
            f"no parameters to shard under modules of class {wanted}; the model has {found}: "
            "pass its layers' classes as shard=(...)"
        )
    if materialize is not None:
        materialize([*root.modules()], places)
    return units, units_of


# As torch defines it: a program may have replaced the method since.
EMBEDDING_FORWARD = nn.Embedding.forward


def reads_weight_in_backward(module: nn.Module, own_hooks: Collection[int] = ()) -> bool:
    """Return False only if it is certain that the module's backward does not read its weight.

    That is so of `nn.Embedding.forward`. A subclass, a parametrization, a hook that is not among
    `own_hooks`, or a forward that was assigned to the module may compute anything from the weight.
    """
    forward: Any = EMBEDDING_FORWARD
    is_plain = (
        isinstance(module, nn.Embedding)
        and type(module).forward is forward
        and forward.__module__ == "torch.nn.modules.sparse"
        and "forward" not in vars(module)
        and [*module._parameters] == ["weight"]
        and not module._modules
    )
    hooks = {*module._forward_pre_hooks, *module._forward_hooks}.difference(own_hooks)
    return not is_plain or bool(hooks or _global_forward_pre_hooks or _global_forward_hooks)


@dataclass(frozen=True)
class Materialize:
    """Gives memory and initial values to what is still on the meta device."""

    device: torch.device
    initialize: Callable[[nn.Module], None] | None

    def __call__(self, owners: list[nn.Module], places: Places) -> None:
        """Do so for the own tensors of `owners`."""
        for owner in owners:
            own = {**owner._parameters, **owner._buffers}
            meta = [name for name, tensor in own.items() if tensor is not None and tensor.is_meta]
            for name in meta:
                old = own[name]
                assert old is not None
                new = torch.empty_like(old, device=self.device)
                if new.is_floating_point():
                    # What neither `initialize` nor a checkpoint fills must not pass for a value.
                    new.fill_(nan)
                if isinstance(old, nn.Parameter):
                    parameter = nn.Parameter(new, old.requires_grad)
                    for module, attribute in places[old]:
                        module._parameters[attribute] = parameter
                else:
                    owner._buffers[name] = new
            if meta:
                (self.initialize or _reset_parameters)(owner)


def bytes_by_class(root: nn.Module, parameters: list[nn.Parameter]) -> dict[str, int]:
    """Return the bytes of `parameters` by the name of their module's class, the most first."""
    left = set(parameters)
    found: dict[str, int] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter in left:
                left.discard(parameter)
                name = type(module).__name__
                found[name] = found.get(name, 0) + parameter.numel() * parameter.itemsize
    return dict(sorted(found.items(), key=lambda entry: entry[1], reverse=True))


Read = Callable[[nn.Parameter], nn.Parameter]


def watch(module: nn.Module, read: Read) -> None:
    """Let `read` say what whoever asks `module` for a parameter gets."""
    if WATCHED not in module.__dict__:
        cls: Any = type(module)
        module.__class__ = _watched(cls)
    module.__dict__[WATCHED] = read


WATCHED = "_zero_read"


@cache
def _watched(cls: Any) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, nn.Parameter):
            return self.__dict__[WATCHED](value)
        return value

    return type(cls.__name__, (cls,), {"__getattr__": read, "__module__": cls.__module__})


def clean(name: str) -> str:
    """The name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(): pass "
            "FSDP(..., initialize=...), a function that fills a module's own tensors"
        )
    reset()


def _enclosing(
    root: nn.Module, path: str, classes: tuple[type[nn.Module], ...]
) -> nn.Module | None:
    """The innermost module on `path` whose class is sharded; its compiled form if it has one."""
    found = root if isinstance(root, classes) else None
    module = root
    for name in path.split(".") if path else []:
        outer, module = module, module._modules[name]  # type: ignore[assignment]
        if isinstance(module, classes):
            found = outer if name == "_orig_mod" else module
    return found

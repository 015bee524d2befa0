"""Selection of the parameters that stage 3 shards together as one unit.

A tied parameter, which several modules have, belongs to the first module's unit, and all these
modules gather it. Modules on the meta device are allocated one after the other, and a unit is
sharded as soon as its last module has been allocated. Therefore a model can be created even if it
fits into memory only in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import nan
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from zero.fsdp.shard import Owner
from zero.fsdp.unit import Unit

MakeUnit = Callable[[list[Any]], Unit]
#: The argument `shard` of `FSDP`.
ShardPolicy = (
    Sequence[type[nn.Module] | str]
    | type[nn.Module]
    | Callable[[str, nn.Module], bool]
    | Literal["blocks"]
)
#: The modules that have each parameter.
Owners = dict[nn.Parameter, list[Owner]]


@dataclass
class _Plan:
    """The parameters that each sharded module gathers."""

    owners: Owners = field(default_factory=dict)
    #: The first name of each sharded parameter.
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    #: Maps each module to the innermost sharded module that contains it, possibly the module
    #: itself, and that gathers its parameters.
    user: dict[nn.Module, nn.Module] = field(default_factory=dict)
    #: The parameters in each sharded module that no sharded module within it has.
    groups: dict[nn.Module, list[nn.Parameter]] = field(default_factory=dict)


def make_units(
    root: nn.Module,
    policy: ShardPolicy,
    materialize: Callable[[nn.Module, Owners], None] | None,
    make_unit: MakeUnit,
    ignored: set[nn.Parameter],
) -> tuple[list[Unit], dict[nn.Module, list[Unit]]]:
    """Shard each parameter as part of the innermost module around it that `policy` selects.

    Return the units, and the units that each module needs unsharded while it runs.
    """
    # Attention reads `out_proj.weight` without calling `out_proj`, so it is not a unit.
    attentions = [m for m in root.modules() if isinstance(m, nn.MultiheadAttention)]
    selected = select_modules(root, policy).difference(a.out_proj for a in attentions)
    plan = _plan_units(root, selected, ignored)
    units: list[Unit] = []
    units_of: dict[nn.Module, list[Unit]] = {}
    # Modules are initialized in the order of the model, as without sharding, so that they draw the
    # same random numbers. A unit is sharded as soon as its last module is initialized.
    complete_groups = _group_by_last_module(root, plan)
    for module in root.modules():
        if materialize is not None:
            materialize(module, plan.owners)
        for parameters in complete_groups.get(module, ()):
            for named in _split_by_kind(parameters, plan):
                unit = make_unit(named)
                users = {plan.user[module] for _, _, owners in named for module, _ in owners}
                unit.is_read_in_backward = any(can_read_weight_in_backward(user) for user in users)
                units.append(unit)
                for user in users:
                    units_of.setdefault(user, []).append(unit)
    return units, units_of


def _group_by_last_module(
    root: nn.Module, plan: _Plan
) -> dict[nn.Module, list[list[nn.Parameter]]]:
    """Return the groups of parameters, keyed by the last module that has one of the parameters.

    A tied parameter counts only for its first module.
    """
    position = {module: index for index, module in enumerate(root.modules())}
    groups: dict[nn.Module, list[list[nn.Parameter]]] = {}
    for parameters in plan.groups.values():
        modules = [plan.owners[parameter][0][0] for parameter in parameters]
        last = max(modules, key=lambda module: position[module])
        groups.setdefault(last, []).append(parameters)
    return groups


def select_modules(root: nn.Module, policy: ShardPolicy) -> set[nn.Module]:
    """Return the modules that are sharded as units: the root, and the modules of `policy`.

    Raise ValueError if the policy names an unknown module, or if none of its classes matches.
    """
    if policy == "blocks":
        return {root, *_find_blocks(root)}
    named = {get_original_name(name): module for name, module in root.named_modules()}
    # A class is callable, but it is not a predicate.
    if callable(policy) and not isinstance(policy, type):
        return {root, *(module for name, module in named.items() if policy(name, module))}
    entries: Any = (policy,) if isinstance(policy, type | str) else policy
    selected: set[nn.Module] = set()
    for entry in entries:
        matching = [
            module
            for name, module in named.items()
            if name == entry or (isinstance(entry, type) and isinstance(module, entry))
        ]
        if not matching and not isinstance(entry, type):
            raise ValueError(
                "expected classes of modules, names in dict(model.named_modules()), a predicate or "
                f'"blocks" as shard=, got {entry!r}'
            )
        selected.update(matching)
    if not selected:
        present = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        raise ValueError(
            f"expected classes of modules in shard=, got {policy}, which a model of {present} does "
            'not have: pass the classes of its layers, or shard="blocks"'
        )
    return {root, *selected}


def _find_blocks(root: nn.Module) -> set[nn.Module]:
    """Return the modules in the outermost ModuleList, ModuleDict and Sequential containers."""
    blocks: set[nn.Module] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in module.children():
            # A list or dictionary of modules has no forward pass that could be hooked.
            if is_container and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                blocks.add(child)
            else:
                pending.append(child)
    return blocks


def _plan_units(root: nn.Module, selected: set[nn.Module], ignored: set[nn.Parameter]) -> _Plan:
    plan = _Plan()
    for prefix, module in root.named_modules():
        parent, _, name = prefix.rpartition(".")
        enclosing = plan.user[root.get_submodule(parent)] if prefix else root
        if module in selected:
            # The hooks of a compiled module are those of its wrapper.
            enclosing = root.get_submodule(parent) if name == "_orig_mod" else module
        plan.user[module] = enclosing
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            plan.owners.setdefault(parameter, []).append((module, attribute))
            if parameter not in plan.names and parameter not in ignored:
                name = f"{prefix}.{attribute}" if prefix else attribute
                plan.names[parameter] = get_original_name(name)
                plan.groups.setdefault(enclosing, []).append(parameter)
    return plan


def _split_by_kind(parameters: list[nn.Parameter], plan: _Plan) -> list[list[Any]]:
    """Return (name, parameter, owners) grouped by dtype and by `requires_grad`."""
    kinds: dict[tuple[torch.dtype, bool], list[Any]] = {}
    for planned in parameters:
        module, attribute = plan.owners[planned][0]
        # `materialize` has replaced parameters on the meta device.
        parameter = module._parameters[attribute]
        assert parameter is not None
        named = plan.names[planned], parameter, tuple(plan.owners[planned])
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(named)
    return list(kinds.values())


#: The original method of torch, because a program may replace it later.
EMBEDDING_FORWARD = nn.Embedding.forward


def can_read_weight_in_backward(module: nn.Module, fsdp_hooks: Collection[int] = ()) -> bool:
    """Return False only if it is certain that the module's backward pass does not read its weight.

    This is certain for `nn.Embedding.forward`. It is not certain for a subclass, a parametrization,
    a hook whose id is not in `fsdp_hooks`, or a `forward` assigned to the module. These may
    compute anything from the weight.
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
    hooks = {*module._forward_pre_hooks, *module._forward_hooks}.difference(fsdp_hooks)
    return not is_plain or bool(hooks or _global_forward_pre_hooks or _global_forward_hooks)


def materialize_module(
    device: torch.device,
    initialize: Callable[[nn.Module], None] | None,
    module: nn.Module,
    owners: Owners,
) -> None:
    """Replace a module's meta tensors, but not its submodules', with initialized tensors."""
    tensors = {**module._parameters, **module._buffers}
    meta = {name: t for name, t in tensors.items() if t is not None and t.is_meta}
    for name, old in meta.items():
        new = torch.empty_like(old, device=device)
        if new.is_floating_point():
            # NaN exposes tensors that neither the initialization nor a checkpoint fills.
            new.fill_(nan)
        if isinstance(old, nn.Parameter):
            parameter = nn.Parameter(new, old.requires_grad)
            parameter.__dict__.update(vars(old))
            for owner, attribute in owners[old]:
                owner._parameters[attribute] = parameter
        else:
            module._buffers[name] = new
    if initialize is None:
        _reset_parameters(module, bool(meta))
    elif meta:
        initialize(module)


ReadHook = Callable[[nn.Parameter], nn.Parameter]

READ_HOOK = "_zero_read_hook"


def intercept_reads(module: nn.Module, read_hook: ReadHook) -> None:
    """Make `module.<name>` return `read_hook(parameter)` for each of its parameters."""
    if READ_HOOK not in module.__dict__:
        cls: Any = type(module)
        module.__class__ = _make_intercepting_subclass(cls)
    module.__dict__[READ_HOOK] = read_hook


@cache
def _make_intercepting_subclass(cls: Any) -> type[nn.Module]:
    def __getattr__(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        # A slice of a container has the container's class, but no hook.
        read_hook = self.__dict__.get(READ_HOOK)
        return read_hook(value) if read_hook and isinstance(value, nn.Parameter) else value

    attributes = {"__getattr__": __getattr__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), attributes)


def get_original_name(name: str) -> str:
    """Return a parameter's name without the components that torch.compile inserts."""
    return name.replace("_orig_mod.", "")


def _reset_parameters(module: nn.Module, has_tensors: bool) -> None:
    """Call `reset_parameters` if the module had, or a submodule has, tensors on the meta device.

    Raise ValueError if a module with such tensors has no such method, or if the method changes
    submodules on the meta device.
    """
    reset = getattr(module, "reset_parameters", None)
    inner = [p for child in module.children() for p in child.parameters() if p.is_meta]
    if reset is None and has_tensors:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(): pass "
            "FSDP(..., initialize=...), a function that fills a module's tensors"
        )
    if reset is not None and (has_tensors or inner):
        versions = [parameter._version for parameter in inner]
        reset()
        # The submodules are allocated later, by their own `reset_parameters`.
        if versions != [parameter._version for parameter in inner]:
            raise ValueError(
                f"{type(module).__name__}.reset_parameters() also initializes submodules, which "
                "are still on the meta device: pass FSDP(..., initialize=...), or allocate the "
                "model before FSDP(module)"
            )

"""The parameters of an optimizer at stage 3: this rank's elements of each full parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.weak import WeakTensorKeyDictionary

from zero.gradients.reductions import PartialGradient
from zero.gradients.shard import ElementRange, ShardGradient, call_on_shards, make_shard_gradient
from zero.partition import alias

#: A module and the name of one of its parameters.
Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a unit: its elements `start` to `stop` are this rank's shard."""

    #: The `Unit` that has the parameter; without a type, because `unit.py` imports this file.
    unit: Any
    #: The name in the unwrapped module.
    name: str
    shape: torch.Size
    start: int
    stop: int
    #: The shard, which optimizers see.
    shard: nn.Parameter
    #: The full parameter, which modules see in the forward pass and which autograd differentiates.
    full: nn.Parameter
    #: The modules that have the parameter; more than one if it is tied.
    owners: tuple[Owner, ...]

    def __post_init__(self) -> None:
        _parameter_of_shard[self.shard] = ref(self)

    @property
    def elements(self) -> ElementRange:
        """The elements of this rank's shard."""
        return ElementRange(self.start, self.stop, self.shape)

    def is_registered(self, module: nn.Module, name: str) -> bool:
        """Return True if the module has the shard or the full parameter under this name."""
        registered = module._parameters.get(name)
        return registered is self.shard or registered is self.full

    def check_registered(self) -> None:
        """Raise RuntimeError if a module has a different tensor instead of this parameter."""
        for module, name in self.owners:
            if not self.is_registered(module, name):
                raise make_unknown_parameter_error(self.name, module._parameters.get(name))


def make_unknown_parameter_error(name: str, registered: Tensor | None) -> RuntimeError:
    """Return the error for a parameter that the caller has added, replaced or deleted."""
    received = "none" if registered is None else f"another {type(registered).__name__}"
    return RuntimeError(
        f"expected {name} to be FSDP's parameter, got {received}, which FSDP neither gathers nor "
        "averages: change parameters in place, and add, replace, resize or prune them before "
        "FSDP(module)"
    )


def make_shards(
    unit: Any,
    parameters_with_owners: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]],
    shard_start: int,
    shard_stop: int,
) -> list[ShardedParameter]:
    """Create the shards and the full parameters as views of `unit.shard` and `unit.full`.

    This rank's shard has the elements `shard_start` to `shard_stop` of the flattened parameters.
    """
    pieces = {p.index: p for p in unit.partition.list_pieces(shard_start, shard_stop)}
    parameters = []
    for index, (name, parameter, owners) in enumerate(parameters_with_owners):
        full_values = alias(unit.full, unit.partition.offsets[index], parameter.shape)
        full = nn.Parameter(full_values, parameter.requires_grad)
        start = stop = shard_offset = 0
        if index in pieces:
            start = pieces[index].start
            stop = pieces[index].stop
            shard_offset = pieces[index].offset - shard_start
        values = unit.shard[shard_offset : shard_offset + stop - start]
        shard = Shard(as_column(values, parameter.dim()), parameter.requires_grad)
        # Programs group parameters by attributes that models set, such as `_no_weight_decay`. Both
        # tensors share one `__dict__`, so modules and optimizers read the same attributes.
        full.__dict__ = shard.__dict__ = dict(vars(parameter))
        parameters.append(
            ShardedParameter(unit, name, parameter.shape, start, stop, shard, full, owners)
        )
    return parameters


def check_all_registered(
    module: nn.Module, parameters: Iterable[ShardedParameter], ignored: Iterable[nn.Parameter]
) -> None:
    """Raise RuntimeError if the caller has replaced, added or deleted parameters of `module`."""
    known = set(ignored)
    for parameter in parameters:
        parameter.check_registered()
        known.add(parameter.full)
    for module_name, inner in module.named_modules():
        for name, registered in inner._parameters.items():
            if registered is not None and type(registered) is not Shard and registered not in known:
                raise make_unknown_parameter_error(f"{module_name}.{name}".lstrip("."), registered)


#: Maps each shard to a weak reference to its ShardedParameter, so that code that only has an
#: optimizer's parameters finds it.
_parameter_of_shard = WeakTensorKeyDictionary()

#: The parameters that shards have replaced. Only optimizers and unsharded modules still use them.
replaced_parameters = WeakTensorKeyDictionary()


def mark_replaced(parameter: nn.Parameter) -> None:
    """Record that a shard has replaced a parameter, and reject backward passes that reach it."""
    replaced_parameters[parameter] = True
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_refuse_gradient)


def _refuse_gradient(parameter: Tensor) -> None:
    raise RuntimeError(
        f"a forward pass has read a parameter of shape {tuple(parameter.shape)} that a shard of "
        "FSDP has replaced, for example from a list of parameters: read it as an attribute of its "
        "module, or store the list as nn.ParameterList"
    )


def find_sharded(tensor: Tensor) -> ShardedParameter | None:
    """Return the ShardedParameter of a shard, or None for any other tensor."""
    parameter: ShardedParameter | None = _parameter_of_shard.get(tensor, lambda: None)()
    return parameter


#: The descriptor of torch's own attribute, which `Shard.grad` wraps.
GRAD: Any = Tensor.grad


class Shard(nn.Parameter):
    """The elements of a parameter that this rank stores.

    Except while an optimizer steps full tensors, a plain gradient of the shard's shape becomes a
    ShardGradient when it is assigned. Other shapes and other shards' gradients raise RuntimeError.

    Functions of torch follow Note [Operations on a sharded gradient]. The norm of a shard, for
    example, is the norm of the whole parameter.
    """

    def full_tensor(self) -> Tensor:
        """Return the whole parameter; every rank must call this method."""
        gradient: ShardGradient = _as_gradient(self)
        return gradient.full_tensor()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on this rank's elements or over all ranks, or raise."""
        return call_on_shards(func, args, kwargs or {}, _as_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    __reduce_ex__ = PartialGradient.__reduce_ex__

    @property
    def grad(self) -> Tensor | None:
        """The averaged gradient of this rank's elements; after `no_sync()`, a placeholder."""
        gradient = GRAD.__get__(self)
        if type(gradient) is Tensor:
            # Autograd and C++ code bypass the setter below.
            self.grad = gradient
            gradient = GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        parameter = find_sharded(self)
        if parameter and not parameter.unit.holds_full_tensors and isinstance(gradient, Tensor):
            elements = parameter.elements
            is_other = isinstance(gradient, ShardGradient) and gradient.elements != elements
            if is_other or gradient.shape != self.shape:
                raise RuntimeError(
                    f"expected elements {elements.start} to {elements.stop} of the gradient of "
                    f"{parameter.name}, in shape {tuple(self.shape)}, got shape "
                    f"{tuple(gradient.shape)} or the elements of another shard: assign elements of "
                    "p.grad.full_tensor(), called by every rank"
                )
            if type(gradient) is Tensor:
                gradient = make_shard_gradient(gradient, parameter.unit.communicator, elements)
        GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)


def _as_gradient(value: Any) -> Any:
    """Return a shard as a ShardGradient with the same memory.

    Return other values, and shards that temporarily hold full tensors, unchanged.
    """
    parameter = find_sharded(value) if type(value) is Shard else None
    if parameter is None or parameter.unit.holds_full_tensors:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return make_shard_gradient(value, parameter.unit.communicator, parameter.elements)


def as_plain_shard(shard: Tensor) -> Tensor:
    """Return a shard's elements as a plain tensor with the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return shard.detach().as_subclass(Tensor)


# torch's optimizers use their fast implementations only for these classes of parameters.
if Shard not in _foreach_supported_types:
    _foreach_supported_types.append(Shard)


def as_column(values: Tensor, dim: int) -> Tensor:
    """Return flat values as a view of shape (n, 1, ..., 1) with `dim` dimensions, at least one.

    Optimizer rules such as `p.dim() >= 2` therefore still recognize matrices.
    """
    return values.view(values.numel(), *[1] * (dim - 1)) if dim > 1 else values

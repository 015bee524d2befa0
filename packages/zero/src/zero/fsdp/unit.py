"""A unit of stage 3: parameters that are gathered, used and freed together.

Note [Lifetime of a unit]
The parameters of a unit are in one of three states:

| state      | memory of the full parameters | transitions                                     |
|------------|-------------------------------|-------------------------------------------------|
| SHARDED    | none                          | `unshard()` -> UNSHARDING                       |
| UNSHARDING | an all-gather fills it        | `wait_for_unshard()` -> UNSHARDED               |
| UNSHARDED  | equal to all ranks' shards    | `reshard()` -> SHARDED, unless the unit is used |
|            |                               | `unshard()` -> UNSHARDING, if a shard changed   |

`reduce_grads()` starts to average the gradients and frees the local ones;
`wait_for_reduce_grads()` adds the average to the shards' `.grad`. The reduction starts with the
last gradient of a unit, while its module is still in backward, so it is not a fourth state: an
UNSHARDED unit may be reducing.

A unit is used while a module that has its parameters is in forward (`_num_users`), or while
`keep_unsharded` is set. `keep_unsharded` is set while a module that does not own the parameters may
read them, in forward or backward, and during a double backward.

Note [One storage for full parameters]
The full parameters always have the same storage, which is resized to zero and refilled. The tensors
that autograd saved in forward are therefore valid again in backward, and nothing is copied after an
all-gather. The full parameters do not share the storage's version counter (`partition.alias`), so
that a refill is not an in-place change to autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.weak import WeakTensorKeyDictionary

from zero.cpu_offload import to_device, to_host
from zero.gloo_collectives import Work
from zero.gradients import (
    AveragedGradient,
    ElementRange,
    ShardGradient,
    shard_function,
    shard_gradient,
)
from zero.partition import alias, by_element
from zero.process_groups import Communicator

#: A module and the name of one of its parameters.
Owner = tuple[nn.Module, str]


class UnitState(Enum):
    """The state of a unit's parameters: Note [Lifetime of a unit]."""

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a unit: its elements `start` to `stop` are this rank's shard."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    #: The shard, which optimizers see.
    shard: nn.Parameter
    #: The full parameter, which modules see in forward and which autograd differentiates.
    full: nn.Parameter
    #: The modules that have the parameter; more than one if it is tied.
    owners: tuple[Owner, ...]

    @property
    def elements(self) -> ElementRange:
        """The elements of this rank's shard."""
        return ElementRange(self.start, self.stop, self.shape)

    def check_registered(self) -> None:
        """Raise if a module has another tensor in the place of this parameter."""
        for module, name in self.owners:
            registered = module._parameters.get(name)
            if registered is not self.shard and registered is not self.full:
                raise RuntimeError(
                    f"expected {self.name} to be FSDP's parameter, got another "
                    f"{type(registered).__name__}, which the forward would not use: change "
                    "parameters in place or within summon_full_params(), and replace or prune "
                    "them before FSDP(module)"
                )


#: Maps each shard to its unit and its index in the unit, so that code that only has an optimizer's
#: parameters finds the unit.
_unit_of_shard = WeakTensorKeyDictionary()


def find_unit(parameter: Tensor) -> tuple[Unit, ShardedParameter] | None:
    """Return the unit of a shard, or None for any other parameter."""
    unit_ref, index = _unit_of_shard.get(parameter, (lambda: None, 0))
    unit = unit_ref()
    return (unit, unit.parameters[index]) if unit else None


#: The descriptor of torch's own attribute, which `Shard.grad` wraps.
GRAD: Any = Tensor.grad


class Shard(nn.Parameter):
    """The elements of a parameter that this rank stores.

    A plain gradient of the shard's shape becomes a ShardGradient when it is assigned, except while
    the parameter holds full tensors.

    Functions of torch follow Note [Operations on a sharded gradient], so that the norm of a
    parameter, for example, is that of all its elements.
    """

    def full_tensor(self) -> Tensor:
        """Return the whole parameter on every rank; every rank must call it."""
        gradient: ShardGradient = _as_gradient(self)
        return gradient.full_tensor()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on this rank's elements or over all ranks, or raise."""
        return shard_function(func, args, kwargs or {}, _as_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    @property
    def grad(self) -> Tensor | None:
        """The averaged gradient of this rank's elements."""
        gradient = GRAD.__get__(self)
        if type(gradient) is Tensor:
            # Autograd and C++ code bypass the setter below.
            self.grad = gradient
            gradient = GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        location = find_unit(self)
        if location and not location[0].holds_full_tensors and isinstance(gradient, Tensor):
            unit, parameter = location
            elements = parameter.elements
            if type(gradient) is Tensor and gradient.shape == self.shape:
                gradient = shard_gradient(gradient, unit.communicator, elements)
            elif isinstance(gradient, ShardGradient) and gradient.elements != elements:
                raise RuntimeError(
                    f"the gradient assigned to {parameter.name} has other elements than this "
                    "rank's shard: assign elements of p.grad.full_tensor(), called by every rank"
                )
            elif gradient.shape != self.shape:
                raise RuntimeError(
                    f"expected a gradient of shape {tuple(self.shape)} for this rank's shard of "
                    f"{parameter.name}, got shape {tuple(gradient.shape)}: assign elements "
                    f"{elements.start} to {elements.stop} of the whole gradient"
                )
        GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)


def _as_gradient(value: Any) -> Any:
    """Wrap a shard in a ShardGradient that shares its memory; return any other value unchanged."""
    location = find_unit(value) if type(value) is Shard else None
    if location is None or location[0].holds_full_tensors:
        return value
    unit, parameter = location
    with torch._C.DisableTorchFunctionSubclass():
        return shard_gradient(value, unit.communicator, parameter.elements)


def plain_shard(shard: Tensor) -> Tensor:
    """Return a shard's elements as a plain tensor with the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return shard.detach().as_subclass(Tensor)


# torch's optimizers use their fast implementations for these classes of parameters only.
if Shard not in _foreach_supported_types:
    _foreach_supported_types.append(Shard)


class Unit:
    """Parameters of one dtype that are gathered, used and freed together.

    See Note [Lifetime of a unit] and Note [One storage for full parameters].
    """

    def __init__(
        self,
        communicator: Communicator,
        compute_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
        cpu_offload: bool,
        named: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]],
    ) -> None:
        self.communicator = communicator
        #: True if shards, and so an optimizer's state for them, are in CPU memory.
        self.cpu_offload = cpu_offload
        first = named[0][1]
        dtype = compute_dtype if compute_dtype and first.dtype.is_floating_point else first.dtype
        #: False if no backward reads the parameters, as that of an embedding does not.
        self.is_read_in_backward = True
        self.gradient_dtype = gradient_dtype or dtype
        world = communicator.world
        self._partition = by_element([p.numel() for _, p, _ in named], world, 1 << 62)
        values = first.new_zeros(self._partition.numel)
        for (_, parameter, _), offset in zip(named, self._partition.offsets, strict=True):
            values[offset : offset + parameter.numel()] = parameter.detach().reshape(-1)
        communicator.broadcast_first(values)
        low = high = 0
        if self._partition.spans:
            low, high = self._partition.spans[0].shard(communicator.rank, world)
        #: This rank's shards of all parameters, end to end.
        self.shard = to_host(values[low:high]) if cpu_offload else values[low:high].clone()
        #: The full parameters, end to end; without memory while the unit is SHARDED.
        self.full = torch.empty_like(values, dtype=dtype)
        self._full_nbytes = self.full.untyped_storage().nbytes()
        self.parameters = self._make_parameters(named, low, high)
        #: Classes of optimizers that the caller has declared element-wise.
        self.elementwise_optimizers: tuple[type[torch.optim.Optimizer], ...] = ()
        #: True while an optimizer steps that needs full tensors in its parameters' `.data`.
        self.holds_full_tensors = False
        self.state = UnitState.SHARDED
        #: The version of `shard` that was gathered; an optimizer's step makes it stale.
        self._gathered_version = -1
        #: The full parameters' versions when they were gathered, and the number of checks since.
        self._full_versions: list[int] = []
        self._num_checks = 0
        self._unshard_work: Work | None = None
        self._unshard_input: Tensor | None = None
        #: False while gradients are accumulated locally.
        self.sync_gradients = True
        #: False keeps the parameters unsharded from forward until backward.
        self.reshard_after_forward = True
        self._num_users = 0
        self._is_unsharded_by_caller = False
        #: True while a module that does not own the parameters may read them, and during a double
        #: backward: Note [Lifetime of a unit].
        self.keep_unsharded = False
        #: The reduction in progress: its work, output and input.
        self._reduction: tuple[Work, Tensor, Tensor] | None = None
        #: True for each parameter that this rank's backward has reached.
        self.is_used = [False] * len(self.parameters)
        #: Averages of parameters that this rank has not used, until it is known whether another
        #: rank used them.
        self._unclaimed_averages: dict[int, Tensor] = {}
        #: The `.grad` of parameters with a gradient from `no_sync()` that is not averaged yet.
        self._placeholders: dict[int, AveragedGradient] = {}
        #: Gradients accumulated under `no_sync()`, already cast to `gradient_dtype`, if it differs
        #: from the dtype of the computed gradients.
        self._accumulated: dict[int, Tensor] = {}
        self.full.untyped_storage().resize_(0)
        self.set_sharded_parameters()
        self._register()

    def _make_parameters(
        self,
        named: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]],
        low: int,
        high: int,
    ) -> list[ShardedParameter]:
        """Create the shards and the full parameters as views of `shard` and `full`."""
        pieces = {piece.index: piece for piece in self._partition.pieces(low, high)}
        parameters = []
        for index, (name, parameter, owners) in enumerate(named):
            offset = self._partition.offsets[index]
            full = nn.Parameter(alias(self.full, offset, parameter.shape), parameter.requires_grad)
            start = stop = shard_offset = 0
            if index in pieces:
                start = pieces[index].start
                stop = pieces[index].stop
                shard_offset = pieces[index].offset - low
            values = self.shard[shard_offset : shard_offset + stop - start]
            shard = Shard(as_column(values, parameter.dim()), parameter.requires_grad)
            parameters.append(
                ShardedParameter(name, parameter.shape, start, stop, shard, full, owners)
            )
        return parameters

    @property
    def label(self) -> str:
        """The name of the unit in collectives: equal on all ranks, and different from others'."""
        name = self.parameters[0].name
        return f"{name} and {len(self.parameters) - 1} more" if self.parameters[1:] else name

    def add_prefix(self, prefix: str) -> None:
        """Rename the parameters as the outer module that takes over the unit names them."""
        self.parameters = [replace(p, name=prefix + p.name) for p in self.parameters]

    def shard_range(self, parameter: ShardedParameter, rank: int) -> tuple[int, int]:
        """Return the elements of a parameter in a rank's shard."""
        index = self.parameters.index(parameter)
        for piece in self._partition.shard_pieces(rank):
            if piece.index == index:
                return piece.start, piece.stop
        return 0, 0

    def _register(self) -> None:
        for index, parameter in enumerate(self.parameters):
            _unit_of_shard[parameter.shard] = ref(self), index

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Return a copy with separate memory and without gradients, as torch copies parameters."""
        if self._unshard_work is not None or self._reduction is not None:
            raise RuntimeError("FSDP cannot be copied while it runs: copy it between steps")
        self.adopt_shard_changes()
        copied: Unit = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        copied.communicator = copy.deepcopy(self.communicator, memo)
        copied.shard = to_host(self.shard) if self.cpu_offload else self.shard.clone()
        copied.full = self.full.new_empty(self.full.shape)
        copied.full.untyped_storage().resize_(0)
        copied.state = UnitState.SHARDED
        copied._gathered_version = -1
        copied._num_users = 0
        copied._full_versions = []
        copied.is_used = [False] * len(self.parameters)
        copied._unclaimed_averages = {}
        copied._placeholders = {}
        copied._accumulated = {}
        copied.parameters = []
        start = 0
        for old, offset in zip(self.parameters, self._partition.offsets, strict=True):
            values = copied.shard[start : start + old.stop - old.start]
            start += values.numel()
            shard = Shard(as_column(values, len(old.shape)), old.shard.requires_grad)
            full = nn.Parameter(alias(copied.full, offset, old.shape), old.full.requires_grad)
            memo[id(old.shard)] = shard
            memo[id(old.full)] = full
            copied.parameters.append(replace(old, shard=shard, full=full))
        copied._register()
        return copied

    def copy_owners(self, memo: dict[int, Any]) -> None:
        """Point `owners` at the copied modules.

        Call this after all units have been copied with the same `memo`.
        """
        for index, old in enumerate(self.parameters):
            owners = tuple((copy.deepcopy(module, memo), name) for module, name in old.owners)
            self.parameters[index] = replace(old, owners=owners)

    def adopt_shard_changes(self) -> None:
        """Apply the caller's changes to the shards.

        Copy `requires_grad` to the full parameters, and a replaced `.data` into the unit's memory.
        """
        start = 0
        for parameter in self.parameters:
            shard = parameter.shard
            full = parameter.full
            if shard.requires_grad != full.requires_grad:
                full.requires_grad_(shard.requires_grad)
                full.grad = None
            values = self.shard[start : start + parameter.stop - parameter.start]
            stored = as_column(values, len(parameter.shape))
            start += stored.numel()
            data = plain_shard(shard)
            if data.data_ptr() == stored.data_ptr() or not stored.numel():
                continue
            if (data.shape, data.dtype, data.device) != (stored.shape, stored.dtype, stored.device):
                raise RuntimeError(
                    f"expected the shard of {parameter.name} to stay {tuple(stored.shape)} "
                    f"{stored.dtype} on {stored.device}, got {tuple(data.shape)} {data.dtype} on "
                    f"{data.device}: change dtype and device of the module before FSDP(module)"
                )
            stored.copy_(data)
            shard.data = stored

    def num_trainable(self) -> int:
        """Return the number of parameters that a backward may reach."""
        return sum(parameter.full.requires_grad for parameter in self.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """The bytes that full parameters occupy now."""
        return self.full.untyped_storage().nbytes()

    def unshard(self) -> None:
        """Start to gather the full parameters, unless they are valid or being gathered."""
        if self.state is UnitState.UNSHARDING:
            return
        is_valid = self._gathered_version == self.shard._version
        if self.state is UnitState.UNSHARDED and is_valid:
            return
        self._gathered_version = self.shard._version
        self.full.untyped_storage().resize_(self._full_nbytes)
        self._unshard_input = self._shard_on_device(self.full)
        self._unshard_work = self.communicator.all_gather(
            self.full, self._unshard_input, self.label
        )
        self.state = UnitState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait until the full parameters are valid; start to gather them if necessary."""
        self.unshard()
        work = self._unshard_work
        if work is None:
            return
        # Work that fails must not be waited for again.
        self._unshard_work = None
        self.state = UnitState.SHARDED
        work.wait()
        self._unshard_input = None
        self.state = UnitState.UNSHARDED
        self._full_versions = [parameter.full._version for parameter in self.parameters]

    def _shard_on_device(self, like: Tensor) -> Tensor:
        return to_device(self.shard, like) if self.cpu_offload else self.shard.to(like.dtype)

    def reshard(self) -> None:
        """Free the full parameters, unless the unit is used."""
        if self.state is UnitState.UNSHARDING:
            self.wait_for_unshard()
        is_in_use = self._num_users > 0 or self.keep_unsharded
        if self.state is UnitState.UNSHARDED and not is_in_use:
            self._check_versions()
            self.full.untyped_storage().resize_(0)
            self.state = UnitState.SHARDED

    def release_and_reshard(self) -> None:
        """Clear `keep_unsharded` and free the full parameters unless a module still uses them.

        They must be gathered again, because a change of a shard through `.data` would not be
        detected.
        """
        self.keep_unsharded = False
        self.reshard()

    def check_unchanged(self) -> None:
        """Raise if a forward has written to the full parameters, because that would be lost."""
        self._check_versions()
        self._num_checks += 1
        # A write through `.data` changes the values and not the version. Each rank compares its own
        # elements at checks 1, 2, 4, 8, ..., so that the average cost per step becomes negligible.
        is_due = self._num_checks & (self._num_checks - 1) == 0
        is_valid = self._gathered_version == self.shard._version
        if not (is_due and self.state is UnitState.UNSHARDED and is_valid):
            return
        start = self.communicator.rank * self.shard.numel()
        gathered = self.full[start : start + self.shard.numel()]
        expected = self._shard_on_device(self.full)
        # Compared as bytes, because NaN is not equal to itself.
        if not gathered.is_meta and not torch.equal(
            gathered.view(torch.uint8), expected.view(torch.uint8)
        ):
            raise RuntimeError(self._describe_write(self.label))

    def _check_versions(self) -> None:
        for parameter, version in zip(self.parameters, self._full_versions, strict=False):
            if parameter.full._version != version:
                # Raised once only: cleaning up after the error frees the unit too.
                self._full_versions = []
                raise RuntimeError(self._describe_write(parameter.name))

    def _describe_write(self, name: str) -> str:
        return (
            f"rank {self.communicator.rank}: forward or backward wrote to {name}, which is whole "
            "only while its layer runs, so the written values would be lost: change parameters "
            "between steps"
        )

    def reset_after_error(self) -> None:
        """Discard the gradients and the full parameters of a backward that was interrupted."""
        self._full_versions = []
        self._reduction = None
        self._num_users = 0
        self._is_unsharded_by_caller = False
        self.keep_unsharded = False
        self._unclaimed_averages.clear()
        self._accumulated.clear()
        self.is_used = [False] * len(self.parameters)
        for parameter in self.parameters:
            parameter.full.grad = None
        self.set_sharded_parameters()
        self.reshard()

    def set_unsharded_parameters(self) -> None:
        """Register the full parameters as the modules' parameters, and add one user."""
        for parameter in self.parameters:
            parameter.check_registered()
        self._num_users += 1
        for parameter in self.parameters:
            for module, name in parameter.owners:
                module._parameters[name] = parameter.full

    def set_unsharded_by_caller(self, is_unsharded: bool) -> None:
        """Register full parameters until the caller reshards them or their module has run."""
        if is_unsharded and not self._is_unsharded_by_caller:
            self.set_unsharded_parameters()
        elif self._is_unsharded_by_caller and not is_unsharded:
            self.set_sharded_parameters()
        self._is_unsharded_by_caller = is_unsharded

    def set_sharded_parameters(self) -> None:
        """Remove one user.

        After the last one, register this rank's shards as the modules' parameters.
        """
        self._num_users = max(0, self._num_users - 1)
        if not self._num_users:
            for parameter in self.parameters:
                for module, name in parameter.owners:
                    module._parameters[name] = parameter.shard

    def has_unreduced_gradients(self) -> bool:
        """Return True if any full parameter has a gradient that is not averaged yet."""
        return bool(self._accumulated) or any(p.full.grad is not None for p in self.parameters)

    def reduce_grads(self) -> None:
        """Start to sum the gradients over ranks, and free the local gradients."""
        self.wait_for_reduce_grads()
        for index, parameter in enumerate(self.parameters):
            if parameter.full.grad is not None or index in self._accumulated:
                self.is_used[index] = True
        buffer = self._pop_gradients()
        if self.communicator.sums_in_place:
            output = buffer.view(self.communicator.world, -1)[self.communicator.rank]
        else:
            output = buffer.new_empty(self.shard.shape)
        work = self.communicator.reduce_scatter(output, buffer, self.label)
        self._reduction = work, output, buffer

    def _pop_gradients(self) -> Tensor:
        """Return the local gradients end to end, and free them."""
        first = self.parameters[0].full
        if len(self.parameters) == 1 and first.grad is not None and not self._accumulated:
            # A single gradient without padding needs no copy.
            gradient = first.grad.reshape(-1).to(self.gradient_dtype)
            if gradient.numel() == self.full.numel():
                first.grad = None
                return gradient
        buffer = self.full.new_empty(self.full.numel(), dtype=self.gradient_dtype)
        end = 0
        for index, parameter in enumerate(self.parameters):
            offset = self._partition.offsets[index]
            end = offset + prod(parameter.shape)
            target = buffer[offset:end]
            if parameter.full.grad is None:
                target.zero_()
            else:
                target.copy_(parameter.full.grad.reshape(-1))
                parameter.full.grad = None
            if index in self._accumulated:
                target += self._accumulated.pop(index).reshape(-1)
        buffer[end:].zero_()
        return buffer

    def wait_for_reduce_grads(self) -> None:
        """Wait for the reduction in progress, and add the average to the shards' `.grad`."""
        if self._reduction is None:
            return
        work, output, _ = self._reduction
        self._reduction = None
        work.wait()
        average = output.to(self.shard.dtype)
        average /= self.communicator.num_gradients
        if self.cpu_offload:
            average = to_host(average)
        elif average is output and self.communicator.sums_in_place:
            # A view would keep the gradients of all ranks' elements alive.
            average = average.clone()
        start = 0
        for index, parameter in enumerate(self.parameters):
            part = average[start : start + parameter.stop - parameter.start]
            start += part.numel()
            if self.is_used[index]:
                self._accumulate_grad(index, part)
            else:
                self._unclaimed_averages[index] = part

    def assign_unclaimed_averages(self, used_anywhere: Sequence[bool]) -> None:
        """Assign gradients to parameters that other ranks have used, and none to unused ones."""
        for index, part in self._unclaimed_averages.items():
            if used_anywhere[index]:
                self._accumulate_grad(index, part)
        self._unclaimed_averages.clear()
        self.is_used = [False] * len(self.parameters)

    def mark_unreduced_gradients(self) -> None:
        """Replace each `.grad` that is not averaged yet by a placeholder that raises if read."""
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.full.grad
            if gradient is None:
                continue
            if gradient.dtype != self.gradient_dtype:
                gradient = gradient.to(self.gradient_dtype)
                accumulated = self._accumulated.get(index)
                if accumulated is not None:
                    gradient = accumulated.add_(gradient)
                self._accumulated[index] = gradient
                parameter.full.grad = None
            if index not in self._placeholders:
                shard = parameter.shard
                # The key is the average of earlier backwards, which `_accumulate_grad` restores.
                placeholder = AveragedGradient(shard, self, shard.grad)
                placeholder.unreduced = plain_shard(shard)
                self._placeholders[index] = placeholder
                shard.grad = placeholder

    def discard_cleared_gradients(self) -> None:
        """Discard unreduced gradients whose `.grad` the caller has cleared."""
        for index, placeholder in list(self._placeholders.items()):
            if self.parameters[index].shard.grad is not placeholder:
                self.parameters[index].full.grad = None
                self._accumulated.pop(index, None)
                del self._placeholders[index]

    def fetch_runs(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """Raise, because the gradient of a placeholder has not been averaged."""
        raise AssertionError("a gradient that is not averaged yet has no elements")

    def _accumulate_grad(self, index: int, part: Tensor) -> None:
        """Add an average to a shard's `.grad`, and run the hooks that autograd would run."""
        parameter = self.parameters[index]
        shard = parameter.shard
        placeholder = self._placeholders.pop(index, None)
        if placeholder is not None and shard.grad is placeholder:
            shard.grad = placeholder.key
        if not shard.requires_grad:
            return
        part = shard_gradient(part.view(shard.shape), self.communicator, parameter.elements)
        # Autograd accumulates into the full parameter only, so hooks of the shard run here.
        for hook in list((shard._backward_hooks or {}).values()):
            changed = hook(part)
            if changed is not None:
                part = changed
        if shard.grad is None:
            shard.grad = part
        else:
            shard.grad += part
        for hook in list((shard._post_accumulate_grad_hooks or {}).values()):
            hook(shard)

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return the full parameters in the shards' dtype; every rank must call it."""
        self.adopt_shard_changes()
        flat = self.full.new_empty(self.full.shape, dtype=self.shard.dtype)
        self.communicator.all_gather(flat, self._shard_on_device(flat)).wait()
        return {
            parameter.name: flat[offset : offset + prod(parameter.shape)].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self._partition.offsets, strict=True)
        }


def as_column(values: Tensor, dim: int) -> Tensor:
    """Return a view of shape (n, 1, ..., 1) with `dim` dimensions.

    Optimizer rules such as `p.dim() >= 2` therefore still recognize matrices.
    """
    return values.view(values.numel(), *[1] * (dim - 1)) if dim > 1 else values

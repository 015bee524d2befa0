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
last gradient of a unit, while the backward pass of its module runs, so it is not a fourth state: an
UNSHARDED unit may be reducing.

If a gather fails, the unit is SHARDED and keeps the memory until the next `reshard()` after a
successful gather: messages of the failed gather may still arrive in this memory.

A unit is used while a module with its parameters runs its forward pass, and after the caller has
unsharded it (`_num_users` counts both).

Note [One storage for full parameters]
The full parameters always have the same storage, which is resized to zero and refilled. The tensors
that autograd saved in the forward pass are therefore valid again in the backward pass, and nothing
is copied after an all-gather. The full parameters do not share the storage's version counter
(`partition.alias`), so autograd does not regard a refill as an in-place change.

While the storage is empty, the versions of the full parameters are raised by `FREED`. A backward
pass that would read a freed parameter therefore raises autograd's error of an in-place change
instead of accessing memory that does not exist. Such a backward pass starts from a tensor that a
module has stored, for example in an attribute, instead of returning it: no hook gathers the unit
for this tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import prod

import torch
from torch import Tensor, nn
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import increment_version

from zero.fsdp.shard import Owner, ShardedParameter, as_column, as_plain_shard, make_shards
from zero.fsdp.unit_gradients import UnitGradients
from zero.gloo_collectives import Work
from zero.parameter_checks import has_same_elements
from zero.partition import partition_by_element
from zero.process_groups import Communicator

#: Added to the versions of freed parameters; more than the number of steps of any program.
FREED = 1 << 30


class UnitState(Enum):
    """The state of a unit's parameters: Note [Lifetime of a unit]."""

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


class Unit:
    """Parameters of one dtype that are gathered, used and freed together."""

    def __init__(
        self,
        communicator: Communicator,
        compute_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
        parameters_with_owners: Sequence[tuple[str, nn.Parameter, tuple[Owner, ...]]],
    ) -> None:
        self.communicator = communicator
        first = parameters_with_owners[0][1]
        dtype = first.dtype
        gradient_dtype = gradient_dtype if dtype.is_floating_point else None
        if compute_dtype and dtype.is_floating_point:
            dtype = compute_dtype
        #: True if a backward pass may read the parameters, as for any module but `nn.Embedding`.
        self.is_read_in_backward = True
        world = communicator.world
        self.partition = partition_by_element(
            [p.numel() for _, p, _ in parameters_with_owners], world, 1 << 62
        )
        values = first.new_zeros(self.partition.numel)
        for (_, parameter, _), offset in zip(
            parameters_with_owners, self.partition.offsets, strict=True
        ):
            values[offset : offset + parameter.numel()] = parameter.detach().reshape(-1)
        communicator.broadcast(values, 0).wait()
        shard_start = shard_stop = 0
        if self.partition.spans:
            span = self.partition.spans[0]
            shard_start, shard_stop = span.compute_shard(communicator.rank, world)
        #: This rank's shards of all parameters, flattened and concatenated.
        self.shard = values[shard_start:shard_stop].clone()
        #: The full parameters, flattened and concatenated; the storage is empty while SHARDED.
        self.full = torch.empty_like(values, dtype=dtype)
        self._full_nbytes = self.full.untyped_storage().nbytes()
        self.parameters = make_shards(self, parameters_with_owners, shard_start, shard_stop)
        #: Classes of optimizers that the caller has declared element-wise.
        self.elementwise_optimizers: tuple[type[torch.optim.Optimizer], ...] = ()
        #: True during a step of an optimizer that needs full tensors in its parameters' `.data`.
        self.holds_full_tensors = False
        self.state = UnitState.SHARDED
        #: The version of `shard` that was gathered; an optimizer's step makes it stale.
        self._gathered_version = -1
        #: The full parameters' versions when they were gathered.
        self._full_versions: dict[nn.Parameter, int] = {}
        #: The number of calls of `check_unchanged`.
        self._num_checks = 0
        #: True if the versions include FREED: Note [One storage for full parameters].
        self._is_marked_freed = False
        self._unshard_work: Work | None = None
        self._unshard_input: Tensor | None = None
        #: False keeps the parameters unsharded from the forward pass until the backward pass.
        self.reshard_after_forward = True
        self._num_users = 0
        self._is_unsharded_by_caller = False
        self.gradients = UnitGradients(self, gradient_dtype or dtype)
        self.full.untyped_storage().resize_(0)
        self._register(are_full=False)

    @property
    def label(self) -> str:
        """The name of the unit in collectives: equal on all ranks and unique within a model."""
        name = self.parameters[0].name
        return f"{name} and {len(self.parameters) - 1} more" if self.parameters[1:] else name

    def adopt_shard_changes(self) -> None:
        """Apply the caller's changes to the shards.

        Copy `requires_grad` to the full parameters, and copy any `.data` that the caller has
        replaced into the memory of the unit.
        """
        self.check_not_stepping()
        for parameter in self.parameters:
            shard = parameter.shard
            full = parameter.full
            if shard.requires_grad != full.requires_grad:
                full.requires_grad_(shard.requires_grad)
                full.grad = None
        if any(self._is_data_replaced(*pair) for pair in self.split_by_parameter(self.shard)):
            self._copy_to_new_memory()

    def split_by_parameter(self, values: Tensor) -> list[tuple[ShardedParameter, Tensor]]:
        """Return each parameter with its part of `values`, a tensor in the layout of `shard`."""
        views = []
        start = 0
        for parameter in self.parameters:
            part = values[start : start + parameter.stop - parameter.start]
            start += part.numel()
            views.append((parameter, as_column(part, len(parameter.shape))))
        return views

    def _is_data_replaced(self, parameter: ShardedParameter, stored: Tensor) -> bool:
        """Return True for replaced `.data`; raise RuntimeError for a new shape, dtype or device."""
        data = as_plain_shard(parameter.shard)
        is_at_stored = data.data_ptr() == stored.data_ptr() and has_same_elements(data, stored)
        if is_at_stored or not stored.numel():
            return False
        if (data.shape, data.dtype, data.device) != (stored.shape, stored.dtype, stored.device):
            raise RuntimeError(
                f"expected the shard of {parameter.name} to stay {tuple(stored.shape)} "
                f"{stored.dtype} on {stored.device}, got {tuple(data.shape)} {data.dtype} on "
                f"{data.device}: change dtype and device of the module before FSDP(module)"
            )
        return True

    # Tensors that are created in inference mode could not be trained.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy_to_new_memory(self) -> None:
        """Copy all shards to new memory, because the caller may use their earlier `.data`."""
        self.shard = self.shard.clone()
        self._gathered_version = -1
        for parameter, stored in self.split_by_parameter(self.shard):
            stored.copy_(as_plain_shard(parameter.shard))
            parameter.shard.data = stored

    def check_not_stepping(self) -> None:
        """Raise RuntimeError if an optimizer's step failed while parameters held full tensors."""
        if self.holds_full_tensors:
            raise RuntimeError(
                f"rank {self.communicator.rank}: an earlier step of the optimizer raised, so some "
                f"ranks have full tensors instead of shards of {self.label}: load a checkpoint "
                "into another FSDP"
            )

    def mark_changed(self, parameter: ShardedParameter) -> None:
        """Record a change of the shard, and make autograd reject graphs that saved earlier values.

        The storage of the full parameter is refilled with the new values, so the gradient of such a
        graph would silently be wrong.
        """
        # A shard whose `.data` was replaced has a separate version counter.
        self._gathered_version = -1
        increment_version(parameter.full)
        if parameter.full in self._full_versions:
            self._full_versions[parameter.full] = parameter.full._version

    @property
    def is_used(self) -> bool:
        """Return True while a module runs, or if the caller has unsharded the parameters."""
        return self._num_users > 0

    @property
    def unsharded_bytes(self) -> int:
        """The bytes that full parameters occupy now."""
        return self.full.untyped_storage().nbytes()

    def unshard(self) -> None:
        """Start gathering the full parameters, unless they are valid or being gathered."""
        is_valid = self._gathered_version == self.shard._version
        if self.state is not UnitState.SHARDED and is_valid:
            return
        # A shard may have changed since a gather was started, which still fills the memory.
        self._finish_unshard()
        # If launching the gather fails, the parameters are not valid.
        self.state = UnitState.SHARDED
        version = self.shard._version
        self.full.untyped_storage().resize_(self._full_nbytes)
        self._unshard_input = self.shard.to(self.full.dtype)
        self._unshard_work = self.communicator.all_gather(
            self.full, self._unshard_input, self.label
        )
        self._gathered_version = version
        self.state = UnitState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait until the full parameters are valid; start gathering them if necessary."""
        self.unshard()
        self._finish_unshard()

    def _finish_unshard(self) -> None:
        work = self._unshard_work
        if work is None:
            return
        # Work that fails must not be waited for again.
        self._unshard_work = None
        self.state = UnitState.SHARDED
        work.wait()
        self._unshard_input = None
        self.state = UnitState.UNSHARDED
        self._mark_freed(False)
        self._full_versions = {p.full: p.full._version for p in self.parameters}

    def reshard(self) -> None:
        """Free unused full parameters; raise RuntimeError if they were written to or exported.

        Parameters that stayed full between steps could become wrong, because a change of a shard
        through `.data` is not detected.
        """
        self._finish_unshard()
        if self.state is UnitState.UNSHARDED and not self._num_users:
            self._check_versions()
            storage = self.full.untyped_storage()
            if not storage.resizable():
                raise RuntimeError(
                    f"expected to free the full parameters of {self.label}, but numpy() or "
                    "share_memory_() exported their memory during the forward pass: call clone() "
                    "first"
                )
            storage.resize_(0)
            self.state = UnitState.SHARDED
            self._full_versions = {}
            self._mark_freed(True)

    def _mark_freed(self, is_freed: bool) -> None:
        """Add FREED to the versions of the full parameters, or subtract it after a gather."""
        if is_freed != self._is_marked_freed:
            full = tuple(parameter.full for parameter in self.parameters)
            change = FREED if is_freed else -FREED
            _unsafe_set_version_counter(full, tuple(tensor._version + change for tensor in full))
            self._is_marked_freed = is_freed

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a forward pass wrote to the full parameters.

        The written values would be lost. A write through `.data` is only detected at some checks,
        on the rank whose shard has the written elements.
        """
        self._check_versions()
        self._num_checks += 1
        # A write through `.data` changes the values but not the version counter. Each rank compares
        # its elements at checks 1, 2, 4, 8, ..., so that the cost per step becomes negligible.
        is_due = self._num_checks & (self._num_checks - 1) == 0
        is_valid = self._gathered_version == self.shard._version
        if not (is_due and self.state is UnitState.UNSHARDED and is_valid):
            return
        start = self.communicator.rank * self.shard.numel()
        gathered = self.full[start : start + self.shard.numel()]
        expected = self.shard.to(self.full.dtype)
        # Compare bytes, because NaN is not equal to itself.
        if not gathered.is_meta and not torch.equal(
            gathered.view(torch.uint8), expected.view(torch.uint8)
        ):
            raise RuntimeError(self._describe_write(self.label))

    def _check_versions(self) -> None:
        for parameter in self.parameters:
            version = parameter.full._version
            if self._full_versions.get(parameter.full, version) != version:
                # Raise only once, because the cleanup after the error checks the unit again.
                self._full_versions = {}
                raise RuntimeError(self._describe_write(parameter.name))

    def _describe_write(self, name: str) -> str:
        return (
            f"rank {self.communicator.rank}: a forward or backward pass wrote to {name}, which is "
            "whole only while its layer runs, so the written values would be lost: change "
            "parameters between steps"
        )

    def reset_after_error(self) -> None:
        """Discard the gradients and the full parameters of a backward pass that was interrupted."""
        self._full_versions = {}
        self._num_users = 0
        self._is_unsharded_by_caller = False
        self.gradients.discard()
        self._register(are_full=False)
        self.reshard()

    def add_user(self) -> None:
        """Register the full parameters as the modules' parameters, and add one user."""
        for parameter in self.parameters:
            parameter.check_registered()
        self._num_users += 1
        self._register(are_full=True)

    def set_unsharded_by_caller(self, is_unsharded: bool) -> None:
        """Register the full parameters for the caller, or the shards if `is_unsharded` is False.

        Full parameters remain registered until the caller reshards them or their module has run.
        """
        if is_unsharded and not self._is_unsharded_by_caller:
            self.add_user()
        elif self._is_unsharded_by_caller and not is_unsharded:
            self.remove_user()
        self._is_unsharded_by_caller = is_unsharded

    def remove_user(self) -> None:
        """Remove one user.

        After the last user, register this rank's shards as the modules' parameters.
        """
        self._num_users = max(0, self._num_users - 1)
        if not self._num_users:
            self._register(are_full=False)

    def _register(self, *, are_full: bool) -> None:
        """Set the modules' parameters to the full parameters or to this rank's shards."""
        for parameter in self.parameters:
            for module, name in parameter.owners:
                module._parameters[name] = parameter.full if are_full else parameter.shard

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return copies of the full parameters by name; every rank must call this method."""
        self.adopt_shard_changes()
        return self.gather(self.shard)

    def gather(self, values: Tensor) -> dict[str, Tensor]:
        """Return full tensors by name, gathered from `values` in the layout of `shard`."""
        flat = values.new_empty(self.full.shape)
        self.communicator.all_gather(flat, values).wait()
        return {
            parameter.name: flat[offset : offset + prod(parameter.shape)].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self.partition.offsets, strict=True)
        }

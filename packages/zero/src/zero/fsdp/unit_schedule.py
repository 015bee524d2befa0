"""The schedule of stage 3: when each unit is gathered, freed and reduced.

    forward    all-gather layer i+1 while layer i runs, then free layer i    S (n-1)/n sent per rank
    backward   all-gather layer i-1 while layer i runs, then free layer i    S (n-1)/n
               reduce-scatter layer i's gradient while layer i-1 runs        S (n-1)/n

S is the size of the parameters in bytes, and n the number of ranks. A layer that runs several times
per forward pass may be gathered for each run.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zero.fsdp.autograd_hooks import (
    MutableArgument,
    call_after_gradients,
    call_before_gradients,
    cast,
    clone_alias,
    has_hidden_tensors,
    refuse_transforms,
    replace_tensors,
)
from zero.fsdp.optimizer_hooks import end_step
from zero.fsdp.shard import Shard, ShardedParameter, check_all_registered, find_sharded
from zero.fsdp.state_dict import StateDictHooks
from zero.fsdp.unit import Unit, UnitState
from zero.fsdp.wrapping import can_read_weight_in_backward, intercept_reads
from zero.parameter_checks import check_dense
from zero.process_groups import Communicator


class UnitSchedule(nn.Module):
    """The hooks that gather, free and reduce an FSDP's units; `FSDP` is the public class."""

    communicator: Communicator
    module: nn.Module
    units: list[Unit]
    compute_dtype: torch.dtype | None
    prefetch: int
    forward_sync_buffers: bool
    ignored_params: set[nn.Parameter]
    #: Input and output dtypes of modules that override the defaults, `compute_dtype` and None.
    input_dtypes: dict[nn.Module, torch.dtype | None]
    output_dtypes: dict[nn.Module, torch.dtype]
    #: The units that each module needs unsharded while it runs.
    units_of: dict[nn.Module, list[Unit]]

    def _init_runtime_state(self) -> None:
        #: True if the latest forward pass ran with gradients and synchronization, or if there was
        #: none. As in DDP, the next forward pass then broadcasts the buffers.
        self._buffers_may_differ = True
        #: The units in the order of this forward pass and of the previous one.
        self._forward_order: list[Unit] = []
        self._previous_order: list[Unit] = []
        #: The number of units that ran before each module in this forward pass.
        self._position: dict[nn.Module, int] = {}
        #: Maps each module to the units of its enclosing modules, whose backward passes end later.
        #: They include a unit of the module itself if an outer module shares one of its parameters.
        self._outer_units: dict[nn.Module, set[Unit]] = {}
        self._gradient_hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._in_backward = False
        #: False in `torch.autograd.grad()`, which does not change `.grad`.
        self._accumulates_gradients = False
        #: The unit whose gradients are being reduced.
        self._reducing_unit: Unit | None = None
        self._num_ready_gradients: dict[Unit, int] = {}
        #: A weak reference to the callback that ends the backward pass. Only the engine keeps the
        #: callback alive, so the reference is dead if an exception has interrupted that pass.
        self._end_callback: Callable[[], object] = lambda: None
        #: The number of nested hooked modules that are in the forward pass.
        self._num_running = 0
        #: The mutable arguments of each running forward pass of each module.
        self._mutable_arguments: dict[nn.Module, list[list[MutableArgument]]] = defaultdict(list)
        self.state_dict_hooks = StateDictHooks(self.communicator)
        self._hook_ids: dict[nn.Module, set[int]] = {}

    # Hooks

    def _hook_modules(self) -> None:
        # The root starts and ends a forward pass, even if it has no unit.
        self.units_of.setdefault(self.module, [])
        for module in self.units_of:
            self._hook_module(module)
            for inner in module.modules():
                if inner in self.units_of and inner is not module:
                    self._outer_units.setdefault(inner, set()).update(self.units_of[module])
        encoders = [m for m in self.module.modules() if isinstance(m, nn.TransformerEncoder)]
        for encoder in encoders:
            if not self.units_of.keys().isdisjoint(encoder.layers.modules()):
                # The fast path for padded inputs reads parameters of a layer that does not run.
                encoder.use_nested_tensor = False
        parameters_of: dict[nn.Module, dict[str, ShardedParameter]] = {}
        for unit in self.units:
            for parameter in unit.parameters:
                for module, name in parameter.owners:
                    intercept_reads(module, self._read_parameter)
                    parameters_of.setdefault(module, {})[name] = parameter
        for module, parameters in parameters_of.items():
            ids = self.state_dict_hooks.attach(module, parameters)
            self._hook_ids.setdefault(module, set()).update(ids)
        self._adopt_shard_changes()

    def _hook_module(self, module: nn.Module) -> None:
        # A compiled module runs these hooks between its graphs.
        before: Any = torch.compiler.disable(self._prepare_module_forward)
        after: Any = torch.compiler.disable(self._finish_module_forward)
        pre_hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        hook = module.register_forward_hook(after, always_call=True)
        self._hook_ids.setdefault(module, set()).update((pre_hook.id, hook.id))

    def _adopt_shard_changes(self) -> None:
        """Apply the caller's changes to the shards, and hook parameters that became trainable."""
        # Every rank raises this error before the first collective. Otherwise a collective could
        # fail on some ranks with another error.
        parameters = [parameter for unit in self.units for parameter in unit.parameters]
        check_all_registered(self.module, parameters, self.ignored_params)
        for unit in self.units:
            unit.adopt_shard_changes()
            for full in (parameter.full for parameter in unit.parameters):
                if full.requires_grad and full not in self._gradient_hooks:
                    self._hook_gradient(unit, full)

    def _hook_gradient(self, unit: Unit, full: nn.Parameter) -> None:
        # The references are weak, because Python does not collect cycles through hooks of tensors.
        mark_ready_ref = weakref.WeakMethod(self._mark_gradient_ready)
        unit_ref = weakref.ref(unit)

        def mark_ready(parameter: Tensor) -> None:
            mark_gradient_ready = mark_ready_ref()
            ready_unit = unit_ref()
            if mark_gradient_ready is not None and ready_unit is not None:
                mark_gradient_ready(ready_unit, parameter)

        self._gradient_hooks[full] = full.register_post_accumulate_grad_hook(mark_ready)

    # Forward

    def _begin_forward(self) -> None:
        """Prepare a forward pass when the outermost hooked module starts.

        The outermost module is `fsdp.module`, or an inner module that the caller calls directly.
        """
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._reset_after_error()
        self._num_running += 1
        refuse_transforms()
        if self._num_running > 1 or self._in_backward:
            return
        end_step()
        self._previous_order = self._forward_order
        self._forward_order = []
        for unit in self.units:
            unit.reshard()
        self._adopt_shard_changes()
        if self._buffers_may_differ and self.forward_sync_buffers:
            self.communicator.broadcast_buffers(self.module)

    def _prepare_module_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather a module's units, prefetch the next units, and hook gradients of the inputs."""
        if module is self.module and not self._in_backward:
            # An interrupt may have prevented the end of an earlier forward pass.
            self._num_running = 0
        self._begin_forward()
        units = self.units_of[module]
        self._position[module] = len(self._forward_order)
        for unit in units:
            unit.unshard()
        if not self._in_backward:
            self._forward_order += units
            start = len(self._forward_order)
            for unit in self._previous_order[start : start + self.prefetch]:
                unit.unshard()
        for unit in units:
            unit.wait_for_unshard()
            unit.add_user()
        dtype = self.input_dtypes.get(module, self.compute_dtype)
        mutable: list[MutableArgument] = []
        self._mutable_arguments[module].append(mutable)
        if units and dtype is not None:
            args, kwargs = cast(dtype, (args, kwargs), mutable)
        if units and torch.is_grad_enabled():
            finish_backward = partial(self._finish_module_backward, module)
            args, kwargs = call_after_gradients((args, kwargs), mutable, finish_backward)
        return args, kwargs

    def _finish_module_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Free a module's units, and hook the gradients of its outputs."""
        units = self.units_of[module]
        # The list is empty if gathering the units failed.
        running = self._mutable_arguments[module]
        added: list[Any] = []
        for argument in reversed(running.pop() if running else []):
            added += argument.write_back()
        try:
            for unit in units:
                unit.check_unchanged()
            full_parameters = [unit.full for unit in units]
            output = replace_tensors(partial(clone_alias, full_parameters), output, [])
        except RuntimeError:
            self._num_running = max(0, self._num_running - 1)
            raise
        finally:
            # The caller may catch an error and run another forward pass, so leave in any case.
            self._leave_module(units)
        if module in self.output_dtypes:
            output = cast(self.output_dtypes[module], output, [])
        if units and can_read_weight_in_backward(module, self._hook_ids[module]):
            if torch.is_grad_enabled() and has_hidden_tensors(output):
                raise TypeError(
                    f"{type(module).__name__} returned a {type(output).__name__}, in which FSDP "
                    "finds no tensor, so it cannot gather weights for the backward pass: return "
                    "tensors in containers or dataclasses, or register the class as a torch pytree"
                )
            # During recomputation, position 0 disables prefetching: the backward pass of a segment
            # must not prefetch layers in the order of the outer forward pass.
            position = 0 if self._in_backward else self._position[module]
            before_backward = partial(self._prepare_module_backward, module, position)
            output = call_before_gradients(output, before_backward, args)
            call_before_gradients(added, before_backward, args)
        return self._end_forward(output)

    def _leave_module(self, units: list[Unit]) -> None:
        # If all units of the previous forward pass have run, no further unit is expected to run.
        is_forward_complete = self._forward_order == self._previous_order
        for unit in units:
            unit.set_unsharded_by_caller(False)
            unit.remove_user()
            should_keep = is_forward_complete or not unit.reshard_after_forward
            if not (should_keep and torch.is_grad_enabled()) and not self._in_backward:
                unit.reshard()

    def _end_forward(self, output: Any) -> Any:
        """Finish a forward pass when the outermost hooked module returns."""
        self._num_running = max(0, self._num_running - 1)
        if self._num_running or self._in_backward:
            return output
        is_synced = all(unit.gradients.sync for unit in self.units)
        self._buffers_may_differ = torch.is_grad_enabled() and is_synced
        unsharded: list[Unit] = []
        if torch.is_grad_enabled():
            # The backward pass starts with the last layer, and ends with the root.
            unsharded = [*self._forward_order[-1:], *self.units_of[self.module]]
            unsharded += [u for u in self._forward_order if not u.reshard_after_forward]
        for unit in self.units:
            if unit not in unsharded:
                unit.reshard()
        return call_before_gradients(output, self._begin_backward)

    def _read_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that a module's attribute returns for a registered parameter.

        Raise RuntimeError if the parameter is sharded while the model runs: if another module reads
        it, the hooks that gather the unit have not run.
        """
        # Check this first, because torch.compile traces this function and cannot look up a shard.
        if type(parameter) is not Shard or not (self._num_running or self._in_backward):
            return parameter
        sharded = find_sharded(parameter)
        assert sharded is not None
        if self._in_backward and sharded.unit.state is not UnitState.SHARDED:
            # A part of the unit's module is recomputed, which does not call the module itself.
            sharded.unit.wait_for_unshard()
            return sharded.full
        raise RuntimeError(
            f"{sharded.name} is read while its module does not run, so it is sharded: select the "
            'module that reads it with shard=(...), or pass shard="blocks"'
        )

    # Backward

    def _begin_backward(self) -> None:
        """Prepare a backward pass when the first of its hooks runs.

        Raise RuntimeError if the backward pass records a graph.
        """
        if self._in_backward and self._end_callback() is None:
            self._reset_after_error()
        if self._in_backward:
            return
        # During a backward pass, gradients are enabled only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward pass without create_graph=True, because parameters are whole "
                "only while their layers run: gradients of gradients cannot be sharded at stage 3, "
                "so use ShardedOptimizer (stages 1 and 2)"
            )
        self._in_backward = True
        end_step()
        self._accumulates_gradients = self._is_accumulating_backward()
        for unit in self.units:
            unit.gradients.discard_cleared()
        callback = self._end_backward
        self._end_callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _prepare_module_backward(self, module: nn.Module, position: int) -> None:
        """Gather a module's units before its backward pass, and prefetch the previous units."""
        self._begin_backward()
        for unit in self.units_of[module]:
            unit.wait_for_unshard()
        previous = self._forward_order[max(0, position - self.prefetch) : position]
        for unit in reversed(previous):
            if unit.is_read_in_backward:
                unit.unshard()

    def _finish_module_backward(self, module: nn.Module) -> None:
        """Free a module's units after its backward pass, except units of enclosing modules."""
        outer = self._outer_units.get(module, ())
        for unit in self.units_of[module]:
            if unit not in outer:
                unit.reshard()

    def _is_accumulating_backward(self) -> bool:
        """Return True in a `backward()` that reaches a parameter, otherwise False."""
        parameters = [p.full for unit in self.units for p in unit.parameters]
        try:
            # In a `backward()`, the engine executes the node of every parameter of the graph.
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
                for parameter in parameters
                if parameter.requires_grad
            )
        except RuntimeError:
            # torch's function raises for a leaf that is an input of `torch.autograd.grad`.
            return False

    @torch.no_grad()
    def _mark_gradient_ready(self, unit: Unit, parameter: Tensor) -> None:
        """Reduce a unit if its last gradient has been accumulated."""
        check_dense(parameter.grad)
        self._begin_backward()
        # With reentrant checkpointing, an inner backward pass accumulates the gradients, so
        # `_is_accumulating_backward` returned False for the outer graph.
        self._accumulates_gradients = True
        num_ready = self._num_ready_gradients.get(unit, 0) + 1
        self._num_ready_gradients[unit] = num_ready
        num_trainable = sum(p.full.requires_grad for p in unit.parameters)
        if unit.gradients.sync and num_ready == num_trainable:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._wait_for_reduction()
        unit.gradients.reduce_grads()
        self._reducing_unit = unit

    def _wait_for_reduction(self) -> None:
        if self._reducing_unit is not None:
            self._reducing_unit.gradients.wait_for_reduce_grads()
        self._reducing_unit = None

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        """Reduce the remaining gradients; a parameter gets `.grad` on all ranks or on none."""
        self._num_ready_gradients.clear()
        synced = [unit for unit in self.units if unit.gradients.sync]
        if synced and self._accumulates_gradients:
            for unit in synced:
                if unit.gradients.has_unreduced():
                    self._reduce(unit)
            agreed = self.communicator.launch_flag_reduction(
                [used for unit in self.units for used in unit.gradients.is_used]
            )
            self._wait_for_reduction()
            used_anywhere = iter(agreed()[0])
            for unit in self.units:
                is_used = [next(used_anywhere) for _ in unit.parameters]
                unit.gradients.assign_unclaimed_averages(is_used)
        for unit in self.units:
            if not unit.gradients.sync:
                unit.gradients.mark_unreduced()

    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        try:
            self._finish_gradients()
        except BaseException:
            self._reset_after_error()
            raise
        for unit in self.units:
            unit.reshard()

    def _reset_after_error(self) -> None:
        """Reset the state of a backward pass that raised an exception."""
        self._in_backward = False
        self._num_ready_gradients.clear()
        self._reducing_unit = None
        for unit in self.units:
            unit.reset_after_error()

"""Stage 3: parameters are sharded too, and are gathered for the forward and backward passes.

`FSDP` groups the parameters into units. `unit_schedule.py` describes the order of communication.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero.fsdp.optimizer_hooks import install_optimizer_hooks
from zero.fsdp.shard import find_sharded, mark_replaced
from zero.fsdp.unit import Unit
from zero.fsdp.unit_schedule import UnitSchedule
from zero.fsdp.wrapping import ShardPolicy, get_original_name, make_units, materialize_module
from zero.parameter_checks import check_module, check_parameters, hide_from_ddp
from zero.process_groups import Collective, Communicator, DryRun, Group

#: The attribute in which every module passed to `fully_shard` stores the FSDP of the outermost one.
#: It is set in `__dict__`, so that it is not a submodule.
FULLY_SHARDED = "_zero_fsdp"


class FSDP(UnitSchedule):
    """Fully sharded data parallelism: every rank stores 1/n of the elements of each unit.

    Between steps, `parameters()` returns this rank's shards, one per parameter. A shard of k
    elements has the shape (k, 1, ..., 1). torch's optimizers step shards, except LBFGS and
    SparseAdam, which raise an error. The constructor raises ValueError if a parameter or a buffer
    cannot be sharded or synchronized, or if the parameters differ between ranks.

    shard: selects the units. The parameters of each selected module, except those of selected
        modules within it, form one unit, which is gathered together. "blocks" selects each block of
        the model's outermost ModuleList, ModuleDict and Sequential. Module classes and names, or a
        predicate of name and module, select other modules. All remaining parameters form the root
        unit. Parameters of one module with different dtypes, and its frozen parameters, form
        separate units.
    compute_dtype: the dtype of floating-point parameters and inputs while sharded modules run;
        shards keep their dtype. By default, nothing is cast.
    gradient_dtype: the dtype in which gradients are sent; by default, the dtype in which they are
        computed.
    device: the device on which modules on the meta device are allocated; by default, the device of
        the collectives. A unit is sharded as soon as its last module has been allocated.
    initialize: the function that fills a module's tensors after their allocation; by default
        its `reset_parameters()`.
    group: a process group, or a one-dimensional DeviceMesh; by default, all ranks.
    reshard_after_forward: False keeps units unsharded until their backward pass, which then needs
        no second gather.
    prefetch: the number of units that are gathered ahead of the running unit.
    ignored_params: parameters that are not sharded, averaged or synchronized, in addition to those
        of `inner`.
    forward_sync_buffers: copy rank 0's buffers to all ranks before a forward pass, unless the
        previous one ran without gradients or in `no_sync()`. torch's DDP uses the same rule.
    elementwise_optimizers: custom optimizer classes that update every element independently and may
        step shards. A trial verifies this before the first step. torch's element-wise classes need
        not be listed. For any other optimizer class, all ranks gather each unit during a step, and
        one owner rank steps each full parameter.
    reduce_scatter_tensor, all_gather_into_tensor, all_reduce: replacements for torch's functions.
    inner: the FSDPs of modules within `module`. This FSDP takes over their units and their ignored
        parameters (`fully_shard`).
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        shard: ShardPolicy = "blocks",
        gradient_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        ignored_params: Iterable[nn.Parameter] = (),
        forward_sync_buffers: bool = True,
        elementwise_optimizers: Iterable[type[torch.optim.Optimizer]] = (),
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
        inner: Sequence[FSDP] = (),
    ) -> None:
        super().__init__()
        adopted: set[nn.Parameter] = set()
        self.ignored_params = set(ignored_params)
        for fsdp in inner:
            # As in torch, a parameter that was ignored for an inner module stays ignored.
            self.ignored_params |= fsdp.ignored_params
            for unit in fsdp.units:
                adopted.update(parameter.shard for parameter in unit.parameters)
        check_module(module, adopted)
        self.communicator = Communicator(
            group,
            reduce_scatter_tensor=reduce_scatter_tensor,
            all_gather_into_tensor=all_gather_into_tensor,
            all_reduce=all_reduce,
        )
        self.module = module
        self.compute_dtype = compute_dtype
        self.prefetch = prefetch
        self.forward_sync_buffers = forward_sync_buffers
        ignored = adopted | self.ignored_params
        named = list(module.named_parameters(remove_duplicate=False))
        check_parameters(
            [(get_original_name(name), p) for name, p in named if p not in ignored],
            module.named_buffers(),
            self.communicator,
        )
        target = torch.device(device) if device else self.communicator.device
        self.units, self.units_of = make_units(
            module,
            shard,
            None if isinstance(group, DryRun) else partial(materialize_module, target, initialize),
            partial(Unit, self.communicator, compute_dtype, gradient_dtype),
            ignored,
        )
        for unit in self.units:
            unit.elementwise_optimizers = tuple(elementwise_optimizers)
            unit.reshard_after_forward = reshard_after_forward
        self.input_dtypes = {}
        self.output_dtypes = {}
        for fsdp in inner:
            self._adopt(fsdp)
        for parameter in {p for _, p in named}.difference(module.parameters()):
            mark_replaced(parameter)
        self.communicator.broadcast_buffers(module)
        self._init_runtime_state()
        self._hook_modules()
        hide_from_ddp(self)
        install_optimizer_hooks()
        # Do not count the initial broadcasts as training traffic.
        self.communicator.pop_bytes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging the gradients of the current backward pass.

        The end of the backward pass does this already, so this call usually has no effect.
        """
        if self._in_backward:
            self._end_backward()

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return copies of all full parameters by their names in the unwrapped module.

        They have the dtypes of the shards. Every rank must call this method.
        """
        full: dict[str, Tensor] = {}
        for unit in self.units:
            full |= unit.gather_full_parameters()
        named: dict[str, Tensor] = {}
        for wrapped_name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = get_original_name(wrapped_name)
            sharded = find_sharded(parameter)
            # Units have a tied parameter under its first name only, and no ignored parameter.
            first = sharded.name if sharded else name
            named[name] = full[first] if first in full else parameter.detach().clone()
        return named

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local, unsharded gradients in the backward passes within the context.

        The first backward pass outside the context averages them.
        """
        synced = [unit for unit in self.units if unit.gradients.sync]
        for unit in synced:
            unit.gradients.sync = False
        try:
            yield
        finally:
            for unit in synced:
                unit.gradients.sync = True

    def remove_hooks(self) -> None:
        """Remove the hooks of this FSDP from the modules and the parameters.

        The hook of `intercept_reads` remains, because another FSDP replaces it.
        """
        for module, ids in self._hook_ids.items():
            for hooks in vars(module).values():
                if isinstance(hooks, OrderedDict):
                    for key in ids & hooks.keys():
                        del hooks[key]
        for handle in self._gradient_hooks.values():
            handle.remove()

    def _adopt(self, inner: FSDP) -> None:
        """Take over the units of an inner module's FSDP; raise ValueError if its group differs."""
        if not self.communicator.uses_same_group(inner.communicator):
            raise ValueError(
                "expected one process group for a module and the modules within it, got several: "
                "pass the same mesh to every fully_shard call"
            )
        names = {m: get_original_name(name) for name, m in self.module.named_modules()}
        inner.remove_hooks()
        for unit in inner.units:
            unit.communicator = self.communicator
            for parameter in unit.parameters:
                parameter.name = f"{names[inner.module]}.{parameter.name}"
        self.units += inner.units
        for module, units in inner.units_of.items():
            self.units_of.setdefault(module, []).extend(units)
            self.input_dtypes[module] = inner.compute_dtype
        self.input_dtypes |= inner.input_dtypes
        self.output_dtypes |= inner.output_dtypes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "FSDP stores this rank's shards only, so it cannot be copied or pickled: copy the "
            "module before FSDP(module), and use save_checkpoint or gather_full_params()"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> FSDP:
        raise RuntimeError(
            "FSDP's shards cannot be moved or cast: call .to(...) on the module before FSDP(module)"
        )


def find_fsdps(model: nn.Module) -> list[FSDP]:
    """Return all FSDP instances in `model`, including those that `fully_shard` created."""
    fsdps = [m if isinstance(m, FSDP) else vars(m).get(FULLY_SHARDED) for m in model.modules()]
    return list(dict.fromkeys(filter(None, fsdps)))

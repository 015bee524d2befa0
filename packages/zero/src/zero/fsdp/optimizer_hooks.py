"""Hooks that let torch's optimizers step FSDP's shards.

An element-wise optimizer steps shards directly. Any other optimizer needs full tensors
(`full_tensors.py`).

In state dicts, state with the shape of its parameter is a DTensor. Loading accepts DTensors, whole
tensors, and this rank's shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import compress
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from zero.dtensors import Run, gather_state_rows, iter_full_entries
from zero.fsdp.full_tensors import FullTensorExchange
from zero.fsdp.shard import ShardedParameter, find_sharded
from zero.gradients.shard import ShardGradient, as_plain
from zero.optimizer import option_checks
from zero.optimizer.optimizer_kinds import (
    ELEMENTWISE,
    REFUSED,
    WHOLE_PARAMETERS,
    check_constructed,
    choose_split,
    read_constructor_options,
)
from zero.optimizer.parameter_groups import check_not_replaced, is_same_list
from zero.optimizer.state_dict import get_options
from zero.process_groups import Communicator


@cache
def install_optimizer_hooks() -> None:
    """Register hooks for the steps and state dicts of all optimizers of this process."""
    register_optimizer_step_pre_hook(_order_hooks)
    state_dict = torch.optim.Optimizer.state_dict

    @wraps(state_dict)
    def get_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        find_optimizer_hooks(optimizer)
        return state_dict(optimizer)

    # Before its first step, an optimizer may have state from its constructor or from a state dict.
    # torch has no global hook for state dicts, so the method itself is replaced.
    torch.optim.Optimizer.state_dict = get_state_dict  # type: ignore[assignment,method-assign]


def find_optimizer_hooks(optimizer: torch.optim.Optimizer) -> OptimizerHooks | None:
    """Return the OptimizerHooks of an optimizer of shards, or None for any other optimizer.

    Create or update it if necessary. Raise RuntimeError if the optimizer cannot step shards.
    """
    hooks, known = _hooks_of.get(optimizer, (None, []))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not is_same_list(parameters, known):
        try:
            for index, parameter in enumerate(parameters):
                check_not_replaced(f"number {index}", parameter)
            if any(find_sharded(parameter) for parameter in parameters):
                check_constructed(optimizer)
                hooks = hooks or OptimizerHooks(optimizer)
                hooks.update(optimizer)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        _hooks_of[optimizer] = hooks, parameters
    for state in optimizer.state.values() if hooks else ():
        # A copy of a gradient or a shard, such as a momentum buffer, must not act like a gradient.
        state.update({k: as_plain(v) for k, v in state.items() if isinstance(v, ShardGradient)})
    return hooks


def _order_hooks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Make `_prepare_step` the last pre-hook of a step, and `_finish_step` the first post-hook.

    The caller's hooks may clip gradients or read norms over all ranks, so they must run before
    `_prepare_step` or after `_finish_step`. torch runs global pre-hooks before the optimizer's
    pre-hooks, and global post-hooks after the optimizer's post-hooks.
    """
    hooks = find_optimizer_hooks(optimizer)
    if hooks is not None:
        # torch's annotation of these ordered dictionaries is `dict`.
        pre_hooks: Any = optimizer._optimizer_step_pre_hooks
        post_hooks: Any = optimizer._optimizer_step_post_hooks
        num_hooks = len(pre_hooks) + len(post_hooks)
        num_hooks += len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
        # Three of the hooks are this function, `_prepare_step` and `_finish_step`.
        if num_hooks > 3 and hooks.is_step_within_step(optimizer):
            raise RuntimeError(
                f"expected no step hooks, got {num_hooks - 3}: {type(optimizer).__name__}.step "
                "calls the step of its base class, for which torch runs the hooks again, on this "
                "rank's elements only; call the functions before and after optimizer.step() instead"
            )
        before, after = hooks.step_hook_ids
        pre_hooks.move_to_end(before)
        post_hooks.move_to_end(after, last=False)


def _prepare_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Prepare a step of shards, and return its changed arguments; None changes nothing."""
    hooks = find_optimizer_hooks(optimizer)
    if hooks is None or hooks.is_step_within_step(optimizer):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        # The closure computes the gradients, so it must run before they are exchanged.
        with torch.enable_grad():
            loss = closure()
        once = partial(_return_once, [loss])
        if "closure" in kwargs:
            kwargs = {**kwargs, "closure": once}
        else:
            args = args[0], once, *args[2:]
    end_step()
    for exchange in hooks.exchanges:
        for parameter in exchange.parameters:
            parameter.unit.check_not_stepping()
    hooks.check_gradients_match(optimizer)
    for exchange in hooks.exchanges:
        exchange.gather_full_tensors()
    options = _StepOptions(kwargs)
    ShardGradient.step_options = hooks.step_options = ref(options)
    return args, options


class _StepOptions(dict[str, Any]):
    """The keyword arguments of a step, which torch keeps alive until the step returns or raises.

    torch calls no hook after a step that raised an error, so a step ends when the arguments are
    freed.
    """


def end_step() -> None:
    """Make operations on shards span all ranks again.

    The next forward or backward pass calls this function too, because a traceback may keep the
    arguments of a step that raised an error.
    """
    ShardGradient.step_options = lambda: None


def _return_once(losses: list[Any]) -> Any:
    """Pop the loss of a step's closure; raise RuntimeError if the closure is evaluated again."""
    if not losses:
        raise RuntimeError(
            "the optimizer evaluates its closure several times per step, so it cannot be sharded: "
            "the gradients of shards are exchanged once per step; use it unsharded"
        )
    return losses.pop()


def _finish_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    hooks = find_optimizer_hooks(optimizer)
    # The step of a base class, which runs within another step, has other keyword arguments.
    if hooks is None or not isinstance(kwargs, _StepOptions):
        return
    end_step()
    for exchange in hooks.exchanges:
        for parameter in exchange.scatter_full_tensors():
            # torch's tools require that the state is empty on all ranks or on none.
            optimizer.state.setdefault(parameter, {})
    for sharded in hooks.stepped:
        sharded.unit.mark_changed(sharded)
    hooks.stepped = []
    hooks.options_after_step = option_checks.list_numeric_options(optimizer)


#: The code of the function by which torch wraps each `step` to run its hooks.
_HOOKED_STEP: Any = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class OptimizerHooks:
    """State of one optimizer that steps shards, with the hooks of its steps and state dicts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.exchanges: list[FullTensorExchange] = []
        #: The rank that steps each parameter. It never changes, because that rank has the state.
        self._owner: dict[nn.Parameter, int] = {}
        #: The parameters with a gradient in the current step.
        self.stepped: list[ShardedParameter] = []
        self.options_after_step: option_checks.Options = []
        #: A weak reference to the keyword arguments of the latest step.
        self.step_options: Callable[[], _StepOptions | None] = lambda: None
        #: The ids of `_prepare_step` and `_finish_step` among the hooks of the optimizer.
        self.step_hook_ids = (
            optimizer.register_step_pre_hook(_prepare_step).id,
            optimizer.register_step_post_hook(_finish_step).id,
        )
        optimizer.register_state_dict_post_hook(self._save_rows)
        optimizer.register_load_state_dict_pre_hook(self._load_rows)

    def is_step_within_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the running step is a `super().step()` call within a subclass's `step`.

        torch runs the hooks of both steps. The keyword arguments of the outer step are alive until
        it ends. A traceback may keep them longer, so the call stack is checked too.
        """
        if self.step_options() is None:
            return False
        frames = [f for f, _ in walk_stack(sys._getframe()) if f.f_code is _HOOKED_STEP]
        return len([f for f in frames if f.f_locals["self"] is optimizer]) > 1

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Determine which parameters must be full in a step, and shard loaded state."""
        parameters_of: dict[tuple[Communicator, torch.dtype], list[ShardedParameter]] = {}
        for group in optimizer.param_groups:
            entries = [sharded for p in group["params"] if (sharded := find_sharded(p))]
            if entries and _needs_full_tensors(optimizer, group, entries):
                for parameter in entries:
                    key = parameter.unit.communicator, parameter.shard.dtype
                    parameters_of.setdefault(key, []).append(parameter)
        self.exchanges = [
            FullTensorExchange(communicator, entries, self._owner)
            for (communicator, _), entries in parameters_of.items()
        ]
        for exchange in self.exchanges:
            self._owner |= exchange.owner
        if optimizer.state:
            # The state was loaded before the hooks were registered.
            loaded = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            local_state = self._load_rows(optimizer, loaded)["state"]
            optimizer.state.clear()
            optimizer.state.update(local_state)

    def check_gradients_match(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if a shard has a gradient only on some ranks.

        Also raise it if the optimizer options differ between ranks. Set `self.stepped` to the
        shards that have a gradient.
        """
        sharded_of: dict[Communicator, list[ShardedParameter]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                sharded = find_sharded(parameter)
                if sharded is not None:
                    sharded_of.setdefault(sharded.unit.communicator, []).append(sharded)
        self.stepped = []
        changes = option_checks.find_changed_options(optimizer, self.options_after_step)
        for communicator, parameters in sharded_of.items():
            has_gradient = [parameter.shard.grad is not None for parameter in parameters]
            self.stepped += compress(parameters, has_gradient)
            on_some, on_others, options = communicator.launch_flag_reduction(
                has_gradient,
                [not flag for flag in has_gradient],
                option_checks.make_checksum_flags(changes),
            )()
            option_checks.check_options_match(options, changes, communicator)
            for index, parameter in enumerate(parameters):
                if on_some[index] and on_others[index]:
                    raise RuntimeError(
                        f"{parameter.name} has a gradient on some ranks only: set .grad to None, "
                        "or skip the step, on every rank or on none"
                    )

    def find_run(self, parameter: nn.Parameter) -> Run | None:
        """Return the elements whose state this rank has; None if another rank has the state."""
        sharded = find_sharded(parameter)
        if sharded is None:
            return Run(0, parameter.numel(), parameter.shape)
        for exchange in self.exchanges:
            owner = exchange.owner.get(parameter)
            if owner == exchange.communicator.rank:
                return Run(0, sharded.shape.numel(), sharded.shape)
            if owner is not None:
                return None
        return Run(sharded.start, sharded.stop, parameter.shape)

    def _save_rows(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a state dict with the state of all ranks' shards in DTensors."""
        state = dict(state_dict["state"])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            sharded = find_sharded(parameter)
            if sharded is None:
                continue
            run = self.find_run(parameter)
            entry = state.pop(index, {})
            local_state = [(run, entry)] if run else []
            rows = gather_state_rows(local_state, sharded.full, sharded.unit.communicator)
            if rows:
                state[index] = rows
        return {**state_dict, "state": dict(sorted(state.items()))}

    def _load_rows(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a state dict with this rank's part of each value, which is whole or a DTensor."""
        state = dict(state_dict["state"])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        entries = iter_full_entries(state_dict)
        for parameter, key, entry in zip(parameters, keys, entries, strict=False):
            if not entry:
                continue
            shape = (find_sharded(parameter) or parameter).shape
            run = self.find_run(parameter)
            state[key] = {k: run.select(shape, k, v) for k, v in entry.items()} if run else {}
        return {**state_dict, "state": state}


#: OptimizerHooks (None if it has no shards) and parameters of each optimizer at its last check.
_hooks_of: WeakKeyDictionary[
    torch.optim.Optimizer, tuple[OptimizerHooks | None, list[nn.Parameter]]
] = WeakKeyDictionary()


def _needs_full_tensors(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[ShardedParameter]
) -> bool:
    """Return True if an optimizer needs full tensors; raise ValueError if it cannot be sharded."""
    cls = type(optimizer)
    is_known = cls in ELEMENTWISE or cls in WHOLE_PARAMETERS or cls in REFUSED
    is_declared = any(cls in p.unit.elementwise_optimizers for p in parameters)
    split = choose_split(
        cls,
        {} if is_known else read_constructor_options(optimizer, group),
        parameters[0].shard.device,
        elementwise=True if is_declared else None,
        group=get_options(group),
        shapes=[parameter.shape for parameter in parameters],
        dtypes=[parameter.shard.dtype for parameter in parameters],
        as_columns=True,
    )
    return split == "parameters"

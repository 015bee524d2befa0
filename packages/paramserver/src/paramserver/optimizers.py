"""Optimizers with a schedule, groups by name, gradient clipping and master weights.

An `OptimizerSpec` is accepted wherever an optimizer factory is: by servers, as `outer` of
`LocalSteps`, and as the local optimizer of workers. `Updater` creates the optimizer and applies
updates with it.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserver.arguments import require_number


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer with its schedule, parameter groups, clipping and master weights.

    Args:
        optimizer: factory of the optimizer, such as `partial(torch.optim.AdamW, lr=1e-3)`.
        scheduler: factory of a torch LR scheduler for the optimizer, which advances after every
            update. `partial(LambdaLR, lr_lambda=f)` multiplies the learning rate by `f(updates)`.
        groups: function that maps a parameter's name and shape to the options that differ from the
            optimizer's options, such as `{"weight_decay": 0.0}`.
        max_norm: maximum norm of all gradients of an update together; see
            `torch.nn.utils.clip_grad_norm_`. On servers, it requires one fragment, and limits the
            norm of the mean gradient if the policy averages.
        master_dtype: dtype in which a server stores and updates the parameters. Workers receive
            them rounded to the module's dtype. Local optimizers of workers refuse it.

    Raises:
        ValueError: `max_norm` is not positive, or `master_dtype` is not a floating-point dtype.
    """

    optimizer: Callable[..., Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    groups: Callable[[str, torch.Size], Mapping[str, Any]] | None = None
    max_norm: float | None = None
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not require_number("max_norm", self.max_norm) > 0:
            raise ValueError(f"expected max_norm > 0, or None, got {self.max_norm!r}")
        dtype = self.master_dtype
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"expected a floating-point master_dtype, or None, got {dtype}")

    def check_groups(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` if `groups` is set, but does not return options for any parameter."""
        if self.groups and not any(self.groups(n, p.shape) for n, p in parameters.items()):
            names = ", ".join(list(parameters)[:8]) + (", ..." if len(parameters) > 8 else "")
            raise ValueError(
                "expected `groups` to return options for some parameter, got none for any of "
                f"{names}; correct the names, or pass groups=None"
            )


OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer] | OptimizerSpec


def as_spec(factory: OptimizerFactory) -> OptimizerSpec:
    """Return an optimizer factory as an `OptimizerSpec`; raise `TypeError` for anything else."""
    if isinstance(factory, OptimizerSpec):
        return factory
    if not callable(factory):
        raise TypeError(
            "expected optimizer to be a function of the parameters, such as "
            f"partial(torch.optim.SGD, lr=0.1), or an OptimizerSpec, got {factory!r:.60}"
        )
    return OptimizerSpec(factory)


class Updater:
    """The optimizer of some parameters, with its schedule, clipping and master weights.

    Args:
        factory: the optimizer factory.
        parameters: the parameters, or parts of parameters.
        names: name of each of `parameters`.
        model: all parameters of the model, by name. They determine the groups, so that all servers
            have the same groups.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        model: Mapping[str, Tensor],
    ) -> None:
        self.spec = spec = as_spec(factory)
        self._parameters = parameters
        self._names = names
        #: The tensors that receive the gradients and that the optimizer updates: `parameters`, or
        #: their master weights.
        self.targets = parameters
        if spec.master_dtype:
            self.targets = [nn.Parameter(p.detach().to(spec.master_dtype)) for p in parameters]
        self.optimizer = spec.optimizer(self._build_groups(model) if spec.groups else self.targets)
        received = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if received != {id(target) for target in self.targets}:
            raise ValueError(
                "expected the factory to pass exactly its argument to the optimizer, got an "
                "optimizer over other parameters; pass a function such as "
                "partial(torch.optim.SGD, lr=0.1)"
            )
        _copy_options(self.optimizer)
        if spec.groups:
            _require_known_options(self.optimizer)
        scheduler = spec.scheduler
        self._scheduler = _build_scheduler(scheduler, self.optimizer) if scheduler else None

    def compute_norm(self) -> Tensor:
        """Return the norm of all gradients of `targets` together, as float64."""
        gradients = [t.grad for t in self.targets if t.grad is not None]
        # Norms are float64, because squares of finite gradients may overflow in their dtype.
        # torch 2.11 has no norm of a sparse tensor.
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return get_total_norm([torch.linalg.vector_norm(values.double()) for values in dense])

    def step(self, norm: float | None = None) -> None:
        """Clip and apply the gradients of `targets`, clear them, and advance the schedule.

        `norm` is the norm that `max_norm` limits; None computes the norm of these gradients.
        """
        if self.spec.max_norm is not None:
            total = self.compute_norm() if norm is None else torch.tensor(norm, dtype=torch.float64)
            clip_grads_with_norm_(self.targets, self.spec.max_norm, total)
        self.optimizer.step()
        # Set gradients to None, so that the next step skips parameters of other fragments and does
        # not change their momentum.
        self.optimizer.zero_grad()
        self._publish()
        if self._scheduler:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of the optimizer, the schedule and the master weights."""
        optimizer = _convert_numpy_numbers(copy.deepcopy(self.optimizer.state_dict()))
        state: dict[str, Any] = {"optimizer": optimizer, "scheduler": None, "masters": None}
        if self._scheduler:
            state["scheduler"] = _convert_numpy_numbers(copy.deepcopy(self._scheduler.state_dict()))
        if self.spec.master_dtype:
            state["masters"] = [target.detach().clone() for target in self.targets]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        # Copy, because the optimizer stores the loaded tensors and changes them in place.
        saved = copy.deepcopy(state["optimizer"])
        self.optimizer.load_state_dict(saved)
        targets = [t for group in self.optimizer.param_groups for t in group["params"]]
        for index, values in saved["state"].items():
            # Undo torch's rounding of values to the parameter's dtype (`mu_product` of NAdam).
            loaded = self.optimizer.state[targets[index]]
            for key, value in values.items():
                if isinstance(value, Tensor):
                    loaded[key] = value.to(loaded[key].device)
        if self._scheduler:
            self._scheduler.load_state_dict(state["scheduler"])
        if self.spec.master_dtype:
            for target, master in zip(self.targets, state["masters"], strict=True):
                target.copy_(master)
            self._publish()

    def format_settings(self) -> dict[str, str]:
        """Return the settings that affect updates, by name, as strings equal in all processes."""
        settings = self.format_common_settings()
        del settings["options"]
        # Errors name the first difference. The scheduler's state also contains learning rates, so
        # the options precede it.
        scheduler = settings.pop("scheduler")
        names = {id(target): name for target, name in zip(self.targets, self._names, strict=True)}
        for group in self.optimizer.param_groups:
            options = format_group_options(group)
            for target in group["params"]:
                settings[f"options of {names[id(target)]}"] = ", ".join(options)
        settings["scheduler"] = scheduler
        return settings

    def format_common_settings(self) -> dict[str, str]:
        """Return the settings that are equal on all servers of a job; see `format_settings`."""
        spec = self.spec
        settings = {"max_norm": str(spec.max_norm), "master_dtype": str(spec.master_dtype)}
        settings["optimizer"] = type(self.optimizer).__name__
        groups = [", ".join(format_group_options(group)) for group in self.optimizer.param_groups]
        settings["options"] = "; ".join(groups)
        settings["scheduler"] = "None"
        if self._scheduler:
            state = _convert_numpy_numbers(self._scheduler.state_dict())
            settings["scheduler"] = f"{type(self._scheduler).__name__} {state}"
        return settings

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the master weights, if there are any, into the parameters."""
        if self.spec.master_dtype:
            for parameter, target in zip(self._parameters, self.targets, strict=True):
                parameter.copy_(target)

    def _build_groups(self, model: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return one optimizer group per set of options, in the same order on all servers."""
        assert self.spec.groups is not None
        groups: list[dict[str, Any]] = []
        group_of = {}
        for name, parameter in model.items():
            new: dict[str, Any] = {"params": [], **self.spec.groups(name, parameter.shape)}
            group_of[name] = next((group for group in groups if group == new), new)
            if group_of[name] is new:
                groups.append(new)
        for target, name in zip(self.targets, self._names, strict=True):
            group_of[name]["params"].append(target)
        return groups


def format_group_options(group: Mapping[str, Any]) -> list[str]:
    """Return the options of a parameter group, or of `defaults`, as strings "key=value".

    The strings are equal in all processes. Options are omitted unless they are numbers, strings,
    sequences or tensors.
    """
    types = (bool, int, float, str, tuple, list, Tensor)
    return [
        f"{key}={value}" for key, value in group.items() if type(value) in types and key != "params"
    ]


def save_state(state: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a state to a file; raise `ValueError` if `weights_only` loading would refuse it."""
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="meta")  # skips tensor data
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ValueError(
            "expected only numbers, strings and tensors in the state of the optimizer, the "
            f"schedule and the module, got other objects ({error}); journals and checkpoints "
            "cannot store them"
        ) from error


def _copy_options(optimizer: Optimizer) -> None:
    """Copy options that are tensors, such as `lr`, and convert NumPy numbers in other options.

    A schedule changes tensors in place, and a factory may pass one tensor to several optimizers.
    """
    for group in optimizer.param_groups:
        for name, option in group.items():
            if isinstance(option, Tensor):
                group[name] = option.clone()
            elif name != "params":
                group[name] = _convert_numpy_numbers(option)


def _convert_numpy_numbers(value: Any) -> Any:
    """Convert NumPy numbers, which journals and checkpoints cannot contain, to Python numbers."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_convert_numpy_numbers(element) for element in value)
    if type(value) is dict:
        return {key: _convert_numpy_numbers(element) for key, element in value.items()}
    return value


def _require_known_options(optimizer: Optimizer) -> None:
    """Raise `ValueError` if a group has an option that the optimizer would silently ignore."""
    for group in optimizer.param_groups:
        if unknown := sorted(set(group) - {"params", *optimizer.defaults}):
            raise ValueError(
                f"expected `groups` to return options of {type(optimizer).__name__}, which are "
                f"{', '.join(optimizer.defaults)}, got {', '.join(unknown)}"
            )


def _build_scheduler(
    factory: Callable[[Optimizer], LRScheduler], optimizer: Optimizer
) -> LRScheduler:
    """Return the optimizer's scheduler, after a check that a journal can resume it.

    Raises:
        ValueError: the scheduler is of another optimizer, or its state cannot be stored.
    """
    scheduler = factory(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "expected the factory to pass its argument to the scheduler, got a scheduler of "
            "another optimizer, whose learning rate it would change; pass a function such as "
            "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
        )
    save_state(_convert_numpy_numbers(scheduler.state_dict()), io.BytesIO())
    return scheduler

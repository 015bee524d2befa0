"""The parameters that are averaged, and a check for changes that is cheap enough for every step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils.weak import WeakTensorKeyDictionary

from ddp.consistency.failure_attribution import FailureAttribution
from ddp.consistency.model_agreement import (
    broadcast_tensors,
    check_same_descriptions,
    collect_sparse_parameters,
    collect_state,
    describe_model,
)
from ddp.process_group import ReduceGroup


class TrackedParameters:
    """The trained parameters of the wrapped module by name, without the names in `ignored`.

    Modules change after they are wrapped: layers are unfrozen, `load_state_dict(assign=True)`
    replaces parameters, heads are added, and `half()` changes dtypes. The wrapper is not notified,
    so each forward pass compares the identities and three attributes of the parameters with the
    recorded ones.

    `wrapper_modules` is the `_modules` dictionary of the wrapper. Its entry "module" is the wrapped
    module, which the caller may replace. Parameters and buffers in `ignored` are neither averaged
    nor copied.
    """

    def __init__(self, wrapper_modules: Mapping[str, Any], ignored: Collection[str]) -> None:
        self._wrapper_modules = wrapper_modules
        self._ignored = ignored
        #: The parameters of the module, trained or not, at the last call of `refresh`.
        self._compared = WeakTensorKeyDictionary()
        self.refresh()

    def refresh(self) -> None:
        """Record the current parameters."""
        self._record_modules()
        self._compared.clear()
        for parameter in self._module.parameters():
            self._compared[parameter] = True
        # Sparse gradients cannot be views of a flat buffer, so they are reduced one by one.
        sparse = collect_sparse_parameters(self._module)
        self.trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name not in self._ignored
        }
        self.dense = {name: p for name, p in self.trained.items() if p not in sparse}
        self.sparse = {name: p for name, p in self.trained.items() if p in sparse}
        #: Dtype and device of each averaged parameter, by the id of the parameter.
        self._averaged = {id(p): (p.dtype, p.device) for p in self.trained.values()}

    def detect_changes(self) -> bool:
        """Return True if the parameters to average are not the recorded ones. Record other changes.

        Frozen parameters stay recorded, and count as unused if all ranks froze them. A training
        loop may therefore freeze and unfreeze parameters in every step without new buckets.
        """
        now = self._snapshot()
        if self._last.is_equal_to(now):
            return False
        if not all(isinstance(p, nn.Parameter) for p in now.owned):
            return False  # `torch.func.functional_call` replaces parameters during one call.
        if self._must_be_adopted():
            return True
        self._record_modules()
        return False

    def adopt_changes(self, group: ReduceGroup, failures: FailureAttribution) -> None:
        """Copy new parameters from rank 0, and record the current parameters.

        This is a collective. Raises `ValueError` on every rank if the modules differ. The change is
        then not recorded, so that the next forward pass detects it again.
        """
        cause = "parameters were unfrozen, replaced or added"
        description = describe_model(self._module, self._ignored)
        check_same_descriptions(failures.rendezvous(cause, description))
        new = []
        for parameter in collect_state(self._module, self._ignored, buffers=False).values():
            is_unfrozen = parameter.requires_grad and id(parameter) not in self._averaged
            if is_unfrozen or parameter not in self._compared:
                new.append(parameter)
        broadcast_tensors(new, group.process_group, failures, "the broadcast of new weights")
        self.refresh()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All recorded parameters."""
        return [*self.dense.values(), *self.sparse.values()]

    def collect_buffers(self) -> dict[str, Tensor]:
        """Return the buffers to synchronize by name. Modules may replace them at any time."""
        if not self.has_buffers():
            return {}
        named = self._module.named_buffers()
        return {name: b for name, b in named if name not in self._ignored and b.numel()}

    def has_buffers(self) -> bool:
        """Return True if the modules have buffers."""
        return any(self._buffer_dicts)

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self._wrapper_modules["module"]
        return module

    def _record_modules(self) -> None:
        # A submodule without trained parameters may have been added. Its buffers are synchronized
        # from now on, and its parameters may be unfrozen later.
        modules = list(self._module.modules())
        self._child_dicts = [self._wrapper_modules, *(module._modules for module in modules)]
        self._parameter_dicts = [module._parameters for module in modules]
        self._buffer_dicts = [module._buffers for module in modules]
        self._last = self._snapshot()

    def _must_be_adopted(self) -> bool:
        """Return True if a parameter to average is new, converted or no longer in the module."""
        current = {}
        for name, parameter in self._module.named_parameters():
            if name not in self._ignored:
                current[id(parameter)] = (parameter.dtype, parameter.device)
                if parameter.requires_grad and id(parameter) not in self._averaged:
                    return True
        return any(current.get(key) != recorded for key, recorded in self._averaged.items())

    def _snapshot(self) -> _Snapshot:
        # The snapshot references the tensors, so that their ids are not reused.
        parameters = chain.from_iterable([owner.values() for owner in self._parameter_dicts])
        owned = [p for p in parameters if p is not None]
        attributes = [(p.requires_grad, p.dtype, p.device) for p in owned]
        children = list(chain.from_iterable([owner.values() for owner in self._child_dicts]))
        return _Snapshot(owned, attributes, children)


@dataclass(frozen=True)
class _Snapshot:
    """The parameters of a module at one time, their attributes, and all submodules."""

    owned: list[Any]
    #: `requires_grad`, dtype and device of each parameter.
    attributes: list[tuple[Any, ...]]
    children: list[Any]

    def is_equal_to(self, other: _Snapshot) -> bool:
        """Return True if `other` contains the same objects with the same attributes."""
        return (
            _are_identical(self.owned, other.owned)
            and self.attributes == other.attributes
            and _are_identical(self.children, other.children)
        )


def is_in_functional_call(module: nn.Module) -> bool:
    """Return True if a running `torch.func.functional_call` has replaced parameters of `module`."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            called: nn.Module = frame.f_locals["module"]
            if any(submodule is module for submodule in called.modules()):
                return True
        frame = frame.f_back
    return False


def _are_identical(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))

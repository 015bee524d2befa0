"""FSDP's shards as others know parameters: whole for a while, or DTensors in state dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero.fsdp.unit import ShardedParameter, Unit
from zero.rows import rows, whole_of
from zero.wire import Wire


class StateDictionaries:
    """Hooks that put DTensors for shards into the modules' state dictionaries, and take them back.

    Every rank asks for a state dictionary, as it is a collective. Loading takes whole tensors too.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        # Shards as they are, without communication.
        self.raw = False
        self._latest: tuple[Unit, dict[str, Tensor]] | None = None

    def attach(
        self, module: nn.Module, own: Mapping[str, tuple[Unit, ShardedParameter]]
    ) -> set[int]:
        """Hook a module whose attributes `own` are sharded; return the hooks' numbers."""

        def give(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, (unit, parameter) in own.items():
                if not self.raw and prefix + name in state:
                    state[prefix + name] = self._rows(unit, parameter)

        def take(
            module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
        ) -> None:
            for name, (_, parameter) in own.items():
                value = state.get(prefix + name)
                if isinstance(value, Tensor):
                    state[prefix + name] = _elements(prefix + name, value, parameter, rest[-1])

        handles = (
            module.register_state_dict_post_hook(give),
            module.register_load_state_dict_pre_hook(take),
        )
        return {handle.id for handle in handles}

    def forget(self) -> None:
        """Let go of the unit that was gathered last."""
        self._latest = None

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Let state dictionaries hold this rank's shards."""
        before, self.raw = self.raw, True
        try:
            yield
        finally:
            self.raw = before

    @torch.no_grad()
    def _rows(self, unit: Unit, parameter: ShardedParameter) -> DTensor:
        if self._latest is None or self._latest[0] is not unit:
            self._latest = unit, unit.full_parameters()
        return rows(self._latest[1][parameter.name], self.wire)


def _elements(name: str, value: Tensor, parameter: ShardedParameter, problems: list[str]) -> Tensor:
    """This rank's elements of a whole tensor or DTensor, in a column."""
    local = parameter.local.detach()
    if tuple(value.shape) != tuple(parameter.shape):
        problems.append(
            f"size mismatch for {name}: {tuple(value.shape)} in the state dictionary, "
            f"{tuple(parameter.shape)} in the model, of which this rank holds a part"
        )
        return local
    mine: Tensor = whole_of(value).reshape(-1)[parameter.start : parameter.stop]
    return mine.view_as(local)


@contextmanager
def summoned(units: list[Unit], *, writeback: bool) -> Iterator[None]:
    """Put whole parameters in the modules' places; then take this rank's elements of them."""
    for unit in units:
        whole = unit.full_parameters()
        for parameter in unit.parameters:
            stand_in = nn.Parameter(whole[parameter.name], parameter.local.requires_grad)
            for module, attribute in parameter.places:
                module._parameters[attribute] = stand_in
    try:
        yield
        if writeback:
            with torch.no_grad():
                for parameter in (p for unit in units for p in unit.parameters):
                    module, attribute = parameter.places[0]
                    now = module._parameters[attribute]
                    assert now is not None
                    mine = now.reshape(-1)[parameter.start : parameter.stop]
                    parameter.local.copy_(mine.view_as(parameter.local))
    finally:
        for parameter in (p for unit in units for p in unit.parameters):
            for module, attribute in parameter.places:
                module._parameters[attribute] = parameter.local

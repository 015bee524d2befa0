"""Conversion of FSDP's shards to DTensors in state dicts, and back when a state dict is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero.dtensors import gather_value, shard_rows
from zero.fsdp.shard import ShardedParameter, as_plain_shard
from zero.process_groups import Communicator


class StateDictHooks:
    """Hooks that put DTensors instead of shards into state dicts, and that load them.

    Creating a state dict, and loading DTensors, are collectives, so every rank must do them. Whole
    tensors can be loaded too.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        #: True while state dicts contain this rank's shards, which needs no communication.
        self.keeps_shards = False

    def attach(self, module: nn.Module, parameters: Mapping[str, ShardedParameter]) -> set[int]:
        """Register the hooks of a module with these sharded parameters; return the hooks' ids."""

        def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, parameter in parameters.items():
                is_saved = not self.keeps_shards and prefix + name in state
                if is_saved and parameter.is_registered(module, name):
                    shard: Any = parameter.shard
                    with torch.no_grad():
                        parameter.unit.adopt_shard_changes()
                        state[prefix + name] = shard_rows(shard.full_tensor(), self.communicator)

        def load(
            module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
        ) -> None:
            error_messages = rest[-1]
            for name, parameter in parameters.items():
                value = state.get(prefix + name)
                if value is parameter.shard or value is parameter.full:
                    # torch's `set_model_state_dict` passes the registered tensors of parameters not
                    # to load. After `FSDPModule.unshard`, these are the full parameters.
                    parameter.unit.set_unsharded_by_caller(False)
                    state[prefix + name] = parameter.shard
                    continue
                if isinstance(value, Tensor) and parameter.is_registered(module, name):
                    # After `FSDPModule.unshard` the module may have the full parameter.
                    parameter.unit.set_unsharded_by_caller(False)
                    parameter.unit.mark_changed(parameter)
                    selected = _select_shard(prefix + name, value, parameter, error_messages)
                    with torch.no_grad():
                        as_plain_shard(parameter.shard).copy_(selected)
                    # torch copies the shard to itself, or assigns it with `assign=True`.
                    state[prefix + name] = parameter.shard

        handles = (
            module.register_state_dict_post_hook(save),
            module.register_load_state_dict_pre_hook(load),
        )
        return {handle.id for handle in handles}

    @contextmanager
    def keep_shards(self) -> Iterator[None]:
        """Let state dicts contain this rank's shards within the context."""
        before = self.keeps_shards
        self.keeps_shards = True
        try:
            yield
        finally:
            self.keeps_shards = before


def _select_shard(
    name: str, value: Tensor, parameter: ShardedParameter, error_messages: list[str]
) -> Tensor:
    """Return this rank's elements of a whole tensor or DTensor, in the shape of the shard.

    If the shape does not fit, add an error message, and return the shard itself.
    """
    shard = as_plain_shard(parameter.shard)
    if tuple(value.shape) != tuple(parameter.shape):
        error_messages.append(
            f"size mismatch for {name}: expected {tuple(parameter.shape)} as in the model, got "
            f"{tuple(value.shape)} in the state dict"
        )
        return shard
    elements: Tensor = gather_value(value).reshape(-1)[parameter.start : parameter.stop]
    return elements.view_as(shard)

"""Merging of adapters into the weights that they update, and back.

`merge` keeps the adapters, and `unmerge` undoes it bit for bit. `merge_and_unload` leaves a plain
model. A merged weight differs from the weights that it was tied to, so the configuration of a
transformers model is untied as well.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from tinyml.adapters.insertion import adapters_of
from tinyml.adapters.lora import LoRA
from tinyml.adapters.parameter_lora import (
    check_updated_parameters,
    parameter_adapters,
    unload_parameters,
)
from tinyml.conversion import check_hooks, replace_modules


def merge(model: nn.Module) -> nn.Module:
    """Merge every adapter of `model` in place, so that it runs at the speed of the base.

    Raise an error, and merge no adapter, if one of them cannot be merged or is already merged.
    """
    if single := sorted(parameter_adapters(model)):
        raise ValueError(
            f"merge supports adapters of layers only, got one of the parameter {single[0]}; call "
            "merge_and_unload(model)"
        )
    _merge_all(adapters_of(model))
    return model


def _merge_all(adapters: dict[str, LoRA]) -> None:
    for name, adapter in adapters.items():
        try:
            adapter.check_mergeable()
        except (RuntimeError, TypeError, ValueError) as error:
            raise type(error)(f"{name or 'the model'}: {error}; nothing was merged") from error
    for adapter in adapters.values():
        adapter.merge()


def merge_and_unload(model: nn.Module) -> nn.Module:
    """Merge every adapter and restore the plain layers, in place; return the model.

    Adapters that are already merged are included. Weights have their names from
    before `add_lora`, so `from_pretrained` can read the result of `save_pretrained`. They remain
    frozen. If
    an adapter cannot be merged, an error is raised and nothing changes. An adapted weight that was
    tied to another layer is separate afterwards, and the model's configuration is updated.
    """
    adapters = adapters_of(model)
    bases: dict[nn.Module, nn.Module] = {adapter: adapter.base for adapter in adapters.values()}
    check_hooks(model, bases)
    for adapter in adapters.values():
        adapter.restored()  # raises if a factor has changed since it was merged
    check_updated_parameters(model)
    untied = _tied_weights(model, adapters)
    if unmerged := {name: adapter for name, adapter in adapters.items() if not adapter.merged}:
        _merge_all(unmerged)
    for config in _tying_configs(model) if untied else ():
        config.tie_word_embeddings = False
    unload_parameters(model)
    return replace_modules(model, bases)


def _tied_weights(model: nn.Module, adapters: dict[str, LoRA]) -> bool:
    """Return True if an adapted weight is shared with another layer.

    Raise `RuntimeError` if the configuration of a pretrained model cannot express the result.
    """
    weights = {name: m._parameters.get("weight") for name, m in model.named_modules()}
    for name, adapter in adapters.items():
        unmerged = adapter._unmerged_weight
        before = cast(Any, adapter.base.weight if unmerged is None else unmerged[0])
        weights[f"{name}.base" if name else "base"] = before
    is_shared = False
    for name in adapters:
        base = f"{name}.base" if name else "base"
        sharing = [n for n, w in weights.items() if w is weights[base] and n != base]
        is_shared |= bool(sharing)
        if len(sharing) > 1 and _tying_configs(model):
            raise RuntimeError(
                f"the weight of {name} is tied to those of {sharing}, and a configuration unties "
                "all or none of them; adapt other layers, or untie the weights before add_lora"
            )
    return is_shared


def _tying_configs(model: nn.Module) -> list[Any]:
    """Return the transformers configurations that tie embeddings and heads."""
    configs = []
    for module in model.modules():
        config = getattr(module, "config", None)
        for candidate in (config, getattr(config, "text_config", None)):
            if getattr(candidate, "tie_word_embeddings", False):
                configs.append(candidate)
    return configs


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge`, bit for bit."""
    for adapter in adapters_of(model).values():
        adapter.unmerge()
    return model

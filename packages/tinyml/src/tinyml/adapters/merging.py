"""Merging of adapters into the weights that they update, and unmerging."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tinyml.adapters.insertion import find_tying_configs, require_adapters
from tinyml.adapters.lora import LoRA
from tinyml.adapters.parameter_lora import (
    check_updated_parameters,
    find_parameter_adapters,
    unload_parameters,
)
from tinyml.conversion import check_hooks, replace_modules


def merge(model: nn.Module) -> nn.Module:
    """Merge every adapter of `model` in place, so that forward passes add no low-rank updates.

    Return the model. If an adapter cannot be merged or is merged already, raise an error before any
    adapter is merged.
    """
    if names := sorted(find_parameter_adapters(model)):
        raise ValueError(
            f"expected adapters of layers only, got an adapter of the parameter {names[0]}; call "
            "merge_and_unload(model)"
        )
    _merge_all(require_adapters(model))
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
    """Merge every adapter and remove the adapters, in place; return the model.

    Adapters that are already merged are removed too. The weights have the same names as before
    `add_lora`, so `from_pretrained` can read the result of `save_pretrained`. All parameters remain
    frozen. If an adapter cannot be merged, an error is raised and nothing changes. An adapted
    weight that was tied to another layer is separate afterwards, and the configuration of a
    transformers model no longer ties its weights.
    """
    adapters = require_adapters(model)
    bases: dict[nn.Module, nn.Module] = {adapter: adapter.base for adapter in adapters.values()}
    check_hooks(model, bases)
    for adapter in adapters.values():
        adapter.get_layer_to_compress()  # raises if a factor has changed since it was merged
    check_updated_parameters(model)
    before = _get_unmerged_weights(model, adapters)
    _merge_all({name: adapter for name, adapter in adapters.items() if not adapter.merged})
    unload_parameters(model)
    model = replace_modules(model, bases)
    # Two adapters have updated one weight, or another module has the weight before the update.
    is_untied = len(set(before)) < len(before) or not set(before).isdisjoint(model.parameters())
    configs = find_tying_configs(model)
    if is_untied and configs:
        for config in configs:
            config.tie_word_embeddings = False
        _separate_shared_parameters(model)
    return model


def _separate_shared_parameters(model: nn.Module) -> None:
    """Copy parameters that several modules share, so that `save_pretrained` writes each of them.

    With an untied configuration, `from_pretrained` ties no parameters, and missing ones would be
    random. BERT, for example, ties the bias of its head as well.
    """
    visited: set[nn.Parameter] = set()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in visited:
                copied = parameter.detach().clone()
                module._parameters[key] = nn.Parameter(copied, parameter.requires_grad)
            elif parameter is not None:
                visited.add(parameter)


def _get_unmerged_weights(model: nn.Module, adapters: dict[str, LoRA]) -> list[Tensor | None]:
    """Return the weight without the update of each adapted layer and parameter."""
    names = [name.rpartition(".") for name in find_parameter_adapters(model)]
    owners: list[tuple[Any, str]] = [(model.get_submodule(path), key) for path, _, key in names]
    before: list[Tensor | None] = [owner.parametrizations[key].original for owner, key in owners]
    for adapter in adapters.values():
        before += adapter._unmerged_weight or (adapter.base._parameters.get("weight"),)
    return before


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge`, bit for bit; adapters that are not merged are unchanged. Return the model."""
    for adapter in require_adapters(model).values():
        adapter.unmerge()
    return model

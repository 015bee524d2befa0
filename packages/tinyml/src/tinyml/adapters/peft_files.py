"""LoRA adapters in peft's format: a folder with two files.

`adapter_model.safetensors` contains the factors, whose names are those of their modules with the
prefix "base_model.model.". `adapter_config.json` contains ranks and scalings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tinyml.adapters.insertion import insert_adapters, require_adapters, require_no_adapters
from tinyml.adapters.lora import LoRA
from tinyml.adapters.parameter_lora import (
    ParameterLoRA,
    find_parameter_adapters,
    make_parameter_adapter,
    match_parameters,
)
from tinyml.conversion import check_supported
from tinyml.export.atomic_file import atomic_file
from tinyml.layers import is_conv1d
from tinyml.validation import check_finite, format_names

_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: Options of peft that change the function of an adapter, with the values that do not change it.
_NEUTRAL_OPTIONS = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False,
    "trainable_token_indices": None, "layer_replication": None,
    "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None,
    "arrow_config": None, "kasa_config": None, "monteclora_config": None,
}  # fmt: skip
#: The values of init_lora_weights for which the weight of the base is unchanged.
_INITS_OF_FACTORS_ONLY = (True, False, None, "gaussian", "eva", "orthogonal")


def save_lora(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of `model` into `folder`; each of the two files is replaced atomically.

    Raise `ValueError` if the model has no adapters, or if it is itself an adapter.
    """
    check_supported(model)
    adapters = require_adapters(model)
    if "" in adapters:
        raise ValueError(
            "expected adapters inside a module, got a single adapter, which has no name in the "
            "file; pass the module around it"
        )
    single = find_parameter_adapters(model)
    all_adapters: dict[str, LoRA | ParameterLoRA] = {**adapters, **single}
    path_of = {name: path for path, name in _map_paths_to_names(list(single)).items()}
    tensors: dict[str, Tensor] = {}
    for name, adapter in all_adapters.items():
        for key, parameter in (("A", adapter.lora_A), ("B", adapter.lora_B)):
            path = f"{_PREFIX}{path_of.get(name, name)}.lora_{key}.weight"
            tensors[path] = parameter.detach().cpu().contiguous()
    first = next(iter(all_adapters.values()))
    ranks = {name: adapter.rank for name, adapter in all_adapters.items()}
    alphas = {name: adapter.scaling * adapter.rank for name, adapter in all_adapters.items()}
    alpha = first.scaling * first.rank
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": alpha,
        "rank_pattern": _make_pattern(ranks, first.rank),
        "alpha_pattern": _make_pattern(alphas, alpha),
        "lora_dropout": max((adapter.dropout.p for adapter in adapters.values()), default=0.0),
        "target_modules": sorted(adapters),
        "target_parameters": sorted(single) or None,
        "fan_in_fan_out": any(is_conv1d(adapter.base) for adapter in adapters.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / _WEIGHTS) as weights, atomic_file(folder / _CONFIG) as settings:
        save_file(tensors, weights, {"format": "pt"})
        settings.write_text(json.dumps(config, indent=2) + "\n")


def load_lora(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the adapters in `folder` to `model`, in place; return the model.

    The base is frozen. Raise `ValueError` if `model` has adapters, or if the adapters in the folder
    do not fit, belong to embeddings or use unsupported options of peft. Raise `TypeError` if one of
    them belongs to another layer that cannot have an adapter, such as a convolution. An error
    leaves the model unchanged.
    """
    folder = Path(folder)
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"expected peft_type 'LORA' in {folder}, got {config.get('peft_type')!r}")
    for key, neutral in _NEUTRAL_OPTIONS.items():
        if (config.get(key) or neutral) != neutral:
            raise ValueError(
                f"expected {key}={neutral!r} in {folder}, got {config[key]!r}, which these "
                "adapters cannot express; merge with peft (merge_and_unload) and load the result"
            )
    init = config.get("init_lora_weights", True)
    if init not in _INITS_OF_FACTORS_ONLY:
        raise ValueError(
            f"expected init_lora_weights that does not change the base in {folder}, got {init!r}; "
            "save with peft's path_initial_model_for_weight_conversion"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    pairs = _read_factors(folder, modules)
    require_no_adapters(model)
    targeted = match_parameters(model, config.get("target_parameters") or ())
    names = _map_paths_to_names([f"{module}.{key}" for module, key in targeted])
    _check_layers(pairs.keys() - names.keys(), modules)
    single = {}
    for path, name in names.items():
        module, _, key = name.rpartition(".")
        rank, alpha = _read_rank_and_alpha(name, config)
        single[module, key] = make_parameter_adapter(model, module, key, rank, alpha)
        _copy_factors(name, single[module, key], pairs.pop(path, {}))
    named: dict[nn.Module, str] = {}
    for name in pairs:
        other = named.setdefault(modules[name], name)
        if other != name:
            raise ValueError(
                f"expected one adapter per layer, got adapters of {other} and {name}, which are "
                "one layer of the model; copy the layer first"
            )

    def make_adapter(base: nn.Module) -> LoRA:
        name = named[base]
        rank, alpha = _read_rank_and_alpha(name, config)
        dropout = float(config.get("lora_dropout") or 0.0)
        adapter = LoRA(base, rank, alpha=alpha, dropout=dropout)
        _copy_factors(name, adapter, pairs[name])
        return adapter

    return insert_adapters(model, named, make_adapter, single)


def _check_layers(names: Set[str], modules: dict[str, nn.Module]) -> None:
    """Raise `TypeError` for layers that cannot be adapted, and `ValueError` for unknown names."""
    for name in sorted(names & modules.keys()):
        if isinstance(modules[name], nn.modules.conv._ConvNd | nn.MultiheadAttention):
            raise TypeError(
                f"expected adapters of linear layers or parameters, got one of {name}, a "
                f"{type(modules[name]).__name__}; merge with peft (merge_and_unload) and load the "
                "result"
            )
    if unknown := sorted(names - modules.keys()):
        raise ValueError(
            f"expected names of this model, got names of another model: {format_names(unknown)}"
        )


def _map_paths_to_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name of each adapted parameter by its path in the file.

    peft wraps the module once per parameter, in the order of registration. The last wrapper is the
    outermost. The paths of the other wrappers contain ".base_layer" once per wrapper around them.
    """
    modules = [name.rpartition(".")[0] for name in names]
    return {
        module + ".base_layer" * modules[number + 1 :].count(module): name
        for number, (module, name) in enumerate(zip(modules, names, strict=True))
    }


def _read_factors(folder: Path, modules: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Return the factors A and B in `folder` by the name of their module."""
    stored = load_file(folder / _WEIGHTS)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        base = re.fullmatch(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight", key)
        if base is not None and ".lora_" not in key:
            parameter = getattr(modules.get(base[1]), "weight", None)
            if parameter is None or not torch.equal(
                parameter.detach().cpu(), tensor.to(parameter.dtype)
            ):
                raise ValueError(
                    f"expected the model's weight as {key!r} in {folder}, got another value; load "
                    "this weight into the model first"
                )
            continue
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.weight)?", key)
        if match is None:
            raise ValueError(
                f"expected factors of updates of linear layers or parameters in {folder}, got "
                f"{key!r}; merge with peft (merge_and_unload) and load the result"
            )
        check_finite(key, tensor)
        pairs.setdefault(match[1], {})[match[2]] = tensor
    return pairs


def _read_rank_and_alpha(name: str, config: dict[str, Any]) -> tuple[int, float]:
    """Return the rank and the alpha of an adapter, so that alpha / rank is its scaling."""
    rank: int = _match_pattern(name, config.get("rank_pattern"), config["r"])
    alpha: float = _match_pattern(name, config.get("alpha_pattern"), config["lora_alpha"])
    if config.get("use_rslora"):  # alpha / sqrt(r) instead of alpha / r
        alpha = alpha * rank**0.5
    return rank, alpha


@torch.no_grad()
def _copy_factors(name: str, adapter: LoRA | ParameterLoRA, pair: dict[str, Tensor]) -> None:
    if pair.keys() != {"A", "B"}:
        raise ValueError(
            f"expected the factors A and B of {name}, got {sorted(pair)}; load a complete file"
        )
    for parameter, factor in ((adapter.lora_A, pair["A"]), (adapter.lora_B, pair["B"])):
        if parameter.shape != factor.shape:
            raise ValueError(
                f"expected a factor of {name} of shape {tuple(parameter.shape)} for rank "
                f"{adapter.rank}, got {tuple(factor.shape)}; load adapters of this model"
            )
        parameter.copy_(factor)


def _make_pattern(values: dict[str, Any], default: Any) -> dict[str, Any]:
    """Return a peft pattern, {regex: value}, with which `_match_pattern` returns `values[name]`.

    A key also matches longer names that end with it. Therefore longer names come first, including
    those whose value is `default`. Names are escaped, because a dot matches any character.
    """
    different = {re.escape(name): True for name, value in values.items() if value != default}
    named = [name for name in values if _match_pattern(name, different, False)]
    return {re.escape(name): values[name] for name in sorted(named, key=len, reverse=True)}


def _match_pattern(name: str, pattern: dict[str, Any] | None, default: Any) -> Any:
    """Return the first value whose key matches the end of the name, as in peft, or `default`."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", name):
            return value
    return default

"""LoRA adapters as the peft library reads and writes them: a folder of two files.

Notable: `adapter_model.safetensors` holds the factors under the module's name behind
"base_model.model.", `adapter_config.json` what they are multiplied with. What peft can say and
these adapters cannot be (DoRA, trained biases, whole modules) is refused by name, because leaving
it out would be another function.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tinyml.adapters.lora import LoRA, adapters_of, put_in
from tinyml.export.whole_file import whole_file
from tinyml.layers import check_finite, is_conv1d

_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_REFUSED = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False,
    "trainable_token_indices": None, "target_parameters": None, "layer_replication": None,
    "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None,
    "arrow_config": None, "kasa_config": None, "monteclora_config": None,
}  # fmt: skip
_LEAVE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def save_lora(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of `model` into `folder`; each file appears whole or not at all."""
    adapters = adapters_of(model)
    if "" in adapters:
        raise ValueError(
            "the model is one adapter; put it into a module, whose name the file needs"
        )
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        for key, kept in zip(("A", "B"), (adapter.lora_A, adapter.lora_B), strict=True):
            tensors[_key(name, adapter.base, key)] = kept.detach().cpu().contiguous()
    first = next(iter(adapters.values()))
    alphas = {name: adapter.scaling * adapter.rank for name, adapter in adapters.items()}
    alpha = first.scaling * first.rank
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": alpha,
        "rank_pattern": _pattern({n: a.rank for n, a in adapters.items()}, first.rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "lora_dropout": first.dropout.p,
        "target_modules": sorted(adapters),
        "fan_in_fan_out": any(is_conv1d(adapter.base) for adapter in adapters.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / _WEIGHTS) as weights, whole_file(folder / _CONFIG) as settings:
        save_file(tensors, weights, {"format": "pt"})
        settings.write_text(json.dumps(config, indent=2) + "\n")


def load_lora(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put the adapters in `folder` into `model`, the plain one, in place; return the model.

    The base is frozen. Everything is checked before anything is changed.
    """
    folder = Path(folder)
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} holds a {config.get('peft_type')} adapter; LORA is supported")
    for key, plain in _REFUSED.items():
        if (config.get(key) or plain) != plain:
            raise ValueError(f"{folder} has {key}={config[key]!r}, which is not supported")
    if (start := config.get("init_lora_weights", True)) not in _LEAVE_THE_BASE:
        raise ValueError(
            f"{folder} has init_lora_weights={start!r}, which changes the base; let peft write it "
            "as a plain adapter (path_initial_model_for_weight_conversion)"
        )
    stored = load_file(folder / _WEIGHTS)
    pairs: dict[str, dict[str, Tensor]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for key, tensor in stored.items():
        base = re.fullmatch(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight", key)
        if base is not None and ".lora_" not in key:
            own = getattr(modules.get(base[1]), "weight", None)
            if own is None or not torch.equal(own.detach().cpu(), tensor.to(own.dtype)):
                raise ValueError(
                    f"{folder} holds {key!r}, a weight of the base that is not the model's; load "
                    "that weight into the model first"
                )
            continue
        match = re.fullmatch(
            r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", key
        )
        if match is None:
            raise ValueError(f"{folder} holds {key!r}, which is no factor of a LoRA update")
        check_finite(key, tensor)
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if held := sorted(name for name, module in modules.items() if isinstance(module, LoRA)):
        raise ValueError(f"the model has adapters already, at {held[:3]}")
    if unknown := sorted(pairs.keys() - modules.keys()):
        raise ValueError(f"the adapters are of another model: it has no {unknown[:3]}")
    named = {modules[name]: name for name in pairs}

    def make(base: nn.Module) -> LoRA:
        return _adapter(named[base], base, pairs[named[base]], config)

    return put_in(model, named, make)


def _adapter(name: str, base: nn.Module, pair: dict[str, Tensor], config: dict[str, Any]) -> LoRA:
    if pair.keys() != {"A", "B"}:
        raise ValueError(f"{name} has factor {sorted(pair)} alone; A and B belong together")
    rank = pair["A"].shape[0]
    said = _of_pattern(name, config.get("rank_pattern"), config["r"])
    if rank != said:
        raise ValueError(f"{name}: the factors have rank {rank}, the settings say {said}")
    alpha = _of_pattern(name, config.get("alpha_pattern"), config["lora_alpha"])
    if config.get("use_rslora"):  # alpha / sqrt(r) instead of alpha / r
        alpha = alpha * rank**0.5
    dropout = float(config.get("lora_dropout") or 0.0)
    adapter = LoRA(base, rank, alpha=alpha, dropout=dropout)
    with torch.no_grad():
        for own, given in ((adapter.lora_A, pair["A"]), (adapter.lora_B, pair["B"])):
            if own.shape != given.shape:
                raise ValueError(
                    f"{name}: a factor is {tuple(given.shape)}, {tuple(own.shape)} fits; the "
                    "adapters are of another model"
                )
            own.copy_(given)
    return adapter


def _pattern(values: dict[str, Any], usual: Any) -> dict[str, Any]:
    """Entries that `_of_pattern` finds the values by.

    A name that is the end of another one's fits that too: the longer one stands before it.
    """
    own = [name for name, value in values.items() if value != usual]
    named = {name for name in values if _of_pattern(name, dict.fromkeys(own, True), False)}
    return {name: values[name] for name in sorted(named, key=len, reverse=True)}


def _of_pattern(name: str, pattern: dict[str, Any] | None, otherwise: Any) -> Any:
    """The entry whose key the end of the name matches, as peft looks it up."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", name):
            return value
    return otherwise


def _key(name: str, base: nn.Module, factor: str) -> str:
    if isinstance(base, nn.Embedding):
        return f"{_PREFIX}{name}.lora_embedding_{factor}"
    return f"{_PREFIX}{name}.lora_{factor}.weight"

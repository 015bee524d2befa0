"""Loading of decoders from folders in Hugging Face's format: config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from interp.decoder.config_settings import build_settings
from interp.decoder.constants import build_constants
from interp.decoder.decoder import Decoder
from interp.decoder.expected_weights import list_missing_weights
from interp.decoder.families import FAMILIES
from interp.decoder.names import assign_roles, canonicalize_weights, count_layers


def load_decoder(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Load a decoder from a folder with one or several safetensors files, without transformers.

    Raises FileNotFoundError for a missing file. Raises ValueError for an unsupported architecture,
    for missing and unused tensors, and for attention weights that are not whole heads. Other wrong
    shapes raise RuntimeError in the first call.
    """
    folder = Path(path)
    config = json.loads((folder / "config.json").read_text())
    settings = build_settings(config)
    tensors: dict[str, Tensor] = {}
    for file in _list_weight_files(folder):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for key in opened.keys():  # noqa: SIM118  (safe_open is not a mapping)
                tensors[key] = opened.get_tensor(key).to(dtype)
    if "embed.weight" not in assign_roles(tensors).values():
        raise ValueError(f"{folder} has no tensor for embed.weight; is a shard missing?")
    is_tied = bool(config.get("tie_word_embeddings", FAMILIES[config["model_type"]].tied))
    _drop_tied_unembedding(tensors, is_tied, folder)
    layers, expected_layers = count_layers(tensors), len(settings.windows)
    if layers != expected_layers:
        raise ValueError(
            f"expected {expected_layers} layers in {folder}, the number in its config.json, got "
            f"{layers}; is a shard missing?"
        )
    folded = build_constants(None, config).fold_into(tensors)
    weights = canonicalize_weights(folded, d_head=settings.d_head, heads=settings.heads)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    _require_equal_layers(weights, folder)
    if missing := list_missing_weights(weights, config, settings):
        raise ValueError(f"{folder} has no tensor for {', '.join(missing)}; is a shard missing?")
    return Decoder(weights, settings).to(device)


def _drop_tied_unembedding(tensors: dict[str, Tensor], is_tied: bool, folder: Path) -> None:
    """Drop a copy of a tied embedding; raise ValueError if `is_tied` contradicts the tensors."""
    names = {role: name for name, role in assign_roles(tensors).items()}
    embed, unembed = names.get("embed.weight"), names.get("unembed.weight")
    if not is_tied and unembed is None:
        raise ValueError(
            f"{folder} has no unembedding (lm_head.weight), and its config.json has "
            "tie_word_embeddings = false, or omits it; is a shard missing?"
        )
    if not is_tied or embed is None or unembed is None:
        return
    if not torch.equal(tensors[embed], tensors[unembed]):
        # Versions of transformers disagree on which of the two tensors is used.
        raise ValueError(
            f"{folder} has an unembedding {unembed} that differs from {embed}, and its config.json "
            "has tie_word_embeddings = true, or omits it; set it to false, or remove the "
            "unembedding"
        )
    del tensors[unembed]


def _list_weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def _require_equal_layers(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError if a layer has no weight or bias of a kind that another layer has.

    Layers with and without experts (DeepSeek) are compared separately.
    """
    roles_by_layer: dict[str, set[str]] = {}
    for name in weights:
        if name.startswith("blocks."):
            _, layer, role = name.split(".", 2)
            roles_by_layer.setdefault(layer, set()).add(role)
    expected: dict[bool, set[str]] = {True: set(), False: set()}  # With and without experts.
    for roles in roles_by_layer.values():
        expected["mlp.router.weight" in roles] |= roles
    for layer, roles in roles_by_layer.items():
        missing = sorted(expected["mlp.router.weight" in roles] - roles)
        if missing:
            raise ValueError(
                f"expected {', '.join(missing)} in layer {layer} of {folder}, as in other layers, "
                "got none; is a shard missing?"
            )

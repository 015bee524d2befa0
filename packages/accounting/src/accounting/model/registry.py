"""The arguments of a `Transformer` for any Hugging Face configuration.

A family without a table raises `ValueError` with its name. A multimodal configuration is treated as
its language model plus the parameters of a known vision tower.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from accounting.model.family import build_family_arguments
from accounting.model.family_tables import FAMILIES, REFUSED
from accounting.model.formulas import Table
from accounting.model.multimodal import (
    PartSizes,
    find_language_model,
    has_head,
    iter_vision_tower,
    resolve_tied_embeddings,
)


def build_transformer_arguments(content: Mapping[str, Any], part_sizes: PartSizes) -> Table:
    """Return the keyword arguments of the `Transformer` that a configuration describes.

    `part_sizes` maps keyword arguments of a `Transformer` to the number of parameters in each part.
    Raises `ValueError` for an unknown or unsupported family.
    """
    family = content.get("model_type")
    if not isinstance(family, str | None):
        raise ValueError(f"expected model_type to be a name, got {family!r}")
    if family in FAMILIES:
        return build_family_arguments(content, family)
    inner = find_language_model(content, family)
    if inner is None or family is None:
        raise ValueError(_explain_refusal(family))
    # The class of the whole model decides whether its language model has a head.
    classes = {"architectures": None if has_head(content) else [f"{inner['model_type']}Model"]}
    arguments = build_transformer_arguments(
        inner | resolve_tied_embeddings(content, inner) | classes, part_sizes
    )
    tower = tuple(iter_vision_tower(content, arguments["d_model"], part_sizes))
    scope = "without its other parts"
    if tower:
        scope = "with the parameters of its vision tower; FLOPs and activations are of text"
    name = f"{arguments['name']}, the language model of {family} {scope}"
    arguments["extra"] = (*arguments["extra"], *tower)
    return arguments | {"name": content.get("_name_or_path") or name}


def _explain_refusal(family: str | None) -> str:
    """Return the reason why a family without a table is refused."""
    if family is None:
        return "expected a config.json with model_type, got one without it"
    why = REFUSED.get(family.removesuffix("_text"))
    if why:
        return (
            f"model_type {family!r} is not supported: {why}; fits(module, sample) traces a step of "
            "its module, also on the meta device"
        )
    return (
        f"expected model_type to be one of {', '.join(sorted(FAMILIES))}, got {family!r}; "
        "describe another family with Transformer(layers=..., d_model=..., ...)"
    )


def read_content(config: object) -> dict[str, Any]:
    """Return the fields of a configuration: a folder, a file, its content, or a config object.

    Raises `FileNotFoundError` if the file does not exist, `ValueError` if it is not a JSON object,
    and `TypeError` for any other argument.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str) and config.lstrip().startswith("{"):
        raise ValueError("expected the path of a config.json, got its text; pass json.loads(text)")
    if isinstance(config, str | PathLike):
        path = Path(config)
        file = path / "config.json" if path.is_dir() and str(config) else path
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist; pass a config.json or its folder. This package does not "
                f"use the network: `hf download {config} config.json --local-dir FOLDER` "
                "downloads the file of a model on the hub"
            )
        try:
            content = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError as error:  # Invalid JSON, or bytes that are not UTF-8.
            raise ValueError(f"{file} is not JSON ({error}); pass a config.json") from None
        if not isinstance(content, dict):
            raise ValueError(
                f"expected a JSON object in a model config, got {type(content).__name__}"
            )
        return content
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict) and not isinstance(config, type):
        return dict(to_dict())
    got = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
    raise TypeError(
        f"expected config to be a folder, a config.json, its content as a mapping, or a "
        f"transformers config, got {got}"
    )

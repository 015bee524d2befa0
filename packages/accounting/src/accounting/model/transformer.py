"""A `Transformer`: a shape that can be read from a config, a file, or a module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting import checks
from accounting.model.matrices import matrices
from accounting.model.shape import Shape

if TYPE_CHECKING:
    from torch import nn


@checks.named
@dataclass(frozen=True, kw_only=True)
class Transformer(Shape):
    """A transformer by its sizes; raises `ValueError` for sizes that cannot be."""

    @classmethod
    def from_hf(cls, config: str | PathLike[str] | Mapping[str, Any] | object) -> Transformer:
        """Read a Hugging Face configuration: a folder, a file, its content, or a config object.

        Raises `ValueError` naming the field that is missing or the family that is not known, and
        `FileNotFoundError` saying what to download where a name of the hub is given.
        """
        from accounting.model.registry import transformer_arguments

        return cls(**transformer_arguments(_content(config)))

    @classmethod
    def from_module(cls, module: nn.Module, *, heads: int | None = None) -> Transformer:
        """Read the shape off an `nn.Module`, and accept it only if every parameter is explained.

        `heads` is needed where no submodule has an attribute that says it (`num_heads`, `n_head`,
        ...).
        """
        from accounting.model.module import shape_arguments

        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            # The class decides what of the file is built: with a head, without, a pooler.
            content = _content(config) | {"architectures": [type(module).__name__]}
            found = cls.from_hf(content)
        else:
            found = cls(**shape_arguments(module, heads))
        held, described = sum(p.numel() for p in module.parameters()), found.size
        if held != described:
            raise ValueError(
                f"{type(module).__name__} holds {held:,} parameters and the shape read off it "
                f"describes {described:,}; describe it with Transformer(layers=..., d_model=...)"
            )
        return found

    @property
    def size(self) -> int:
        """Parameters in all."""
        own = sum(matrix.size for matrix in matrices(self))
        return own + (sum(m.size for m in matrices(self.encoder)) if self.encoder else 0)


def _content(config: object) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | PathLike):
        path = Path(config)
        file = path / "config.json" if path.is_dir() and str(config) else path
        if path.is_dir() and not file.exists():
            raise FileNotFoundError(
                f"{file} is not there; give a folder with a model's config.json"
            )
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is not there; this package does not use the network: download the "
                f"config.json (`hf download {config} config.json --local-dir FOLDER`) and give "
                "its folder"
            )
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON ({error}); give a config.json") from None
        if not isinstance(content, dict):
            raise ValueError(f"a model config is a JSON object, not {type(content).__name__}")
        return content
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    raise TypeError(
        f"config is {type(config).__name__}; give a folder, a config.json, its content as a "
        "mapping, or a transformers config"
    )

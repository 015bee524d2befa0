"""A `Transformer`: a shape that can be read from a configuration, a file or a module."""

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
    """A transformer described by its sizes; raises `ValueError` for inconsistent sizes."""

    @classmethod
    def from_hf(cls, config: str | PathLike[str] | Mapping[str, Any] | object) -> Transformer:
        """Read a Hugging Face configuration: a folder, a file, its content, or a config object.

        Raises `ValueError` that names a missing field or an unknown family. Raises
        `FileNotFoundError` with the download command if the argument is the name of a model on the
        hub.
        """
        from accounting.model.registry import transformer_arguments

        return cls(**transformer_arguments(content_of(config)))

    @classmethod
    def from_module(cls, module: nn.Module) -> Transformer:
        """Read the configuration of a Hugging Face module, and check the number of parameters.

        Raises `ValueError` if the module has no configuration, or if the number of parameters
        differs from that of the configuration.
        """
        config = getattr(module, "config", None)
        if not hasattr(config, "to_dict"):
            raise ValueError(
                "expected a module with a Hugging Face configuration, got "
                f"{type(module).__name__}; describe it with Transformer(layers=..., d_model=...), "
                "or trace it with fits(module, sample)"
            )
        # The class decides which parts of the model exist, such as the head or a pooler.
        content = content_of(config) | {"architectures": [type(module).__name__]}
        model = cls.from_hf(content)
        actual, described = sum(p.numel() for p in module.parameters()), model.size
        if actual != described:
            raise ValueError(
                f"{type(module).__name__} has {actual:,} parameters and the shape read from it "
                f"describes {described:,}; describe it with Transformer(layers=..., d_model=...)"
            )
        return model

    @property
    def size(self) -> int:
        """Return the total number of parameters."""
        return sum(matrix.size for matrix in matrices(self))


def content_of(config: object) -> dict[str, Any]:
    """Return the fields of a configuration: a folder, a file, its content, or a config object."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | PathLike):
        path = Path(config)
        file = path / "config.json" if path.is_dir() and str(config) else path
        if path.is_dir() and not file.exists():
            raise FileNotFoundError(f"{file} does not exist; pass a folder with a config.json")
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist; this package does not use the network: download the "
                f"config.json (`hf download {config} config.json --local-dir FOLDER`) and pass "
                "its folder"
            )
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON ({error}); pass a config.json") from None
        if not isinstance(content, dict):
            raise ValueError(
                f"expected a JSON object in a model config, got {type(content).__name__}"
            )
        return content
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    raise TypeError(
        f"expected config to be a folder, a config.json, its content as a mapping, or a "
        f"transformers config, got {type(config).__name__}"
    )

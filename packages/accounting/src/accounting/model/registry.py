"""Which families are known, and how one is found for a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting import checks
from accounting.model.config import Arguments, Config
from accounting.model.encoders import ENCODERS
from accounting.model.families import DECODERS
from accounting.model.hybrids import HYBRIDS

FAMILIES = DECODERS | HYBRIDS | ENCODERS
"""A function for each `model_type` that is known."""
# Files of models with several modalities: the language model inside is what is described.
_NESTED = ("text_config", "llm_config", "language_config")


def transformer_arguments(content: Mapping[str, Any]) -> Arguments:
    """The keyword arguments of the `Transformer` that this configuration describes."""
    family = content.get("model_type")
    known = FAMILIES
    if family not in known:
        for field in _NESTED:
            inner = content.get(field)
            if isinstance(inner, Mapping) and inner.get("model_type", f"{family}_text") in known:
                shared = {key: content[key] for key in _INHERITED if key in content}
                return transformer_arguments(
                    shared | {"model_type": f"{family}_text"} | dict(inner)
                )
    if family is None:
        raise ValueError("model_type is missing: this is not a model's config.json")
    if family not in known:
        raise ValueError(
            f"model_type is {family!r}, a family not known here; known are "
            f"{', '.join(sorted(known))}{checks.nearest(family, known)}; any other can be "
            "described with Transformer(layers=..., d_model=..., ...)"
        )
    config = Config(content, family)
    arguments = {"name": content.get("_name_or_path") or family} | known[family](config)
    return _built(config, arguments) if family not in ENCODERS else arguments


_INHERITED = ("tie_word_embeddings", "_name_or_path")


def _built(config: Config, arguments: Arguments) -> Arguments:
    """What the named class builds: the whole, or the model without its head."""
    name = config.architecture
    if not name or name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return arguments
    if name.endswith("Model"):
        return arguments | {"lm_head": False, "head_bias": False}
    raise ValueError(
        f"architectures is {name!r}, whose head is not known for {config.family}; "
        "leave it out for the language model"
    )

"""The arguments of a `Transformer` for any Hugging Face configuration.

A family without a table is refused, and the error names it. A multimodal configuration is treated
as its language model plus the parameters of a known vision tower.
"""

from collections.abc import Mapping
from typing import Any

from accounting import checks
from accounting.model.family import class_named, family_arguments, spelled
from accounting.model.family_tables import FAMILIES, REFUSED
from accounting.model.formulas import Table
from accounting.model.multimodal import language_model, tied, vision_tower


def transformer_arguments(content: Mapping[str, Any]) -> Table:
    """Return the keyword arguments of the `Transformer` that a configuration describes."""
    family = content.get("model_type")
    if not isinstance(family, str | None):
        raise ValueError(f"expected model_type to be a name, got {family!r}")
    if family in FAMILIES:
        return family_arguments(content, family)
    text = language_model(content, family)
    if text is None:
        raise ValueError(_reason(family))
    arguments = transformer_arguments(text | tied(content, text))
    if spelled(class_named(content)) == spelled(f"{family}_model"):
        arguments |= {"lm_head": False, "head_bias": False}
    tower = tuple(vision_tower(content, arguments["d_model"]))
    missing = "without its other parts"
    if tower:
        missing = "with the parameters of its vision tower; FLOPs and activations are of text"
    name = f"{arguments['name']}, the language model of {family} {missing}"
    arguments["extra"] = (*arguments["extra"], *tower)
    return arguments | {"name": content.get("_name_or_path") or name}


def _reason(family: str | None) -> str:
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
        f"expected model_type to be one of {', '.join(sorted(FAMILIES))}, got {family!r}"
        f"{checks.nearest(family, FAMILIES)}; describe another family with "
        "Transformer(layers=..., d_model=..., ...)"
    )

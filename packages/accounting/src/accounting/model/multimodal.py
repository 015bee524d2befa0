"""The parts of a multimodal configuration: its language model, and a known vision tower."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accounting.model.config import Config
from accounting.model.family import build_family_arguments, get_class_name, normalize_name
from accounting.model.family_tables import FAMILIES, MULTIMODAL, NESTED_SIZES, TOWERS, merge_table
from accounting.model.formulas import Table
from accounting.model.records import Matrix

#: A function from keyword arguments of a `Transformer` to the number of parameters in each part.
PartSizes = Callable[[Table], dict[str, int]]

#: Fields in which multimodal configurations nest the configuration of their language model.
_NESTED = ("text_config", "llm_config", "language_config")
#: Families whose head has the sizes at the top of the file; the language model must have the same.
_OUTER_HEAD = ("ovis2",)


def find_language_model(content: Mapping[str, Any], family: Any) -> Table | None:
    """Return the configuration of a multimodal model's language model, or None without one.

    The result is a nested configuration, or the file itself for families that are `flat` in
    towers.toml. Raises `ValueError` if the sizes of head and language model differ.
    """
    for field in _NESTED:
        inner = content.get(field)
        if isinstance(inner, Mapping) and inner.get("model_type", f"{family}_text") in FAMILIES:
            for size in ("hidden_size", "vocab_size") if family in _OUTER_HEAD else ():
                if content.get(size, inner.get(size)) != inner.get(size):
                    raise ValueError(
                        f"expected one {size} of {family!r}, got {content[size]} in the file and "
                        f"{inner.get(size)} in {field}"
                    )
            sizes = NESTED_SIZES.get(str(inner.get("model_type")), {})
            return {"model_type": f"{family}_text"} | sizes | dict(inner)
    if TOWERS.get(family, {}).get("flat") and content.get("text_config") is None:
        ties = ("architectures", "tie_word_embeddings")
        flat = {name: value for name, value in content.items() if name not in ties}
        return flat | {"model_type": f"{family}_text"}
    return None


def has_head(content: Mapping[str, Any]) -> bool:
    """Return True if `architectures` names a class with a language-model head, or no class.

    Raises `ValueError` if the class is neither a known base model nor a class for generation.
    """
    family = content["model_type"]
    name = get_class_name(content)
    # Base models in `by_language_model` may contain the head, so they are refused below.
    groups = ("tied_by_default", "untied_by_default", "by_either")
    known = any(family in MULTIMODAL[group] for group in groups)
    if known and normalize_name(name) == normalize_name(f"{family}_model"):
        return False
    if not name or name.endswith(("ForConditionalGeneration", "ForCausalLM")):
        return True
    raise ValueError(
        f"expected architectures of {family!r} to name a class for generation, got {name!r}; omit "
        "it for the language model with its head"
    )


def resolve_tied_embeddings(content: Mapping[str, Any], inner: Mapping[str, Any]) -> Table:
    """Return {"tie_word_embeddings": value} if the outer field overrides the language model's.

    The dictionary is empty if the language model's field applies. Raises `ValueError` if it is
    unknown which of the two fields the family uses, unless both are set and equal.
    """
    field = "tie_word_embeddings"
    family = content["model_type"]
    outer_value = content.get(field)
    inner_value = inner.get(field)
    if family in MULTIMODAL["by_language_model"] or inner_value == outer_value is not None:
        return {}
    if family in MULTIMODAL["by_either"]:
        return {field: bool(outer_value or inner_value)}
    if family in MULTIMODAL["tied_by_default"] or family in MULTIMODAL["untied_by_default"]:
        default = family in MULTIMODAL["tied_by_default"]
        return {field: default if outer_value is None else outer_value}
    raise ValueError(
        f"expected {field} of {family!r} and of its language model to be set and equal, got "
        f"{outer_value!r} and {inner_value!r}; pass the configuration of the language model"
    )


def iter_vision_tower(
    content: Mapping[str, Any], width: int, part_sizes: PartSizes
) -> Iterator[Matrix]:
    """Yield the parts of a vision tower of a known kind and of its projector.

    The parts have the kind `table`, because no text token multiplies them. Every tensor-parallel
    rank stores them. Yields nothing for an unknown kind of tower.
    """
    family, vision = str(content["model_type"]), content.get("vision_config")
    table = TOWERS.get(family, {})
    kind = vision.get("model_type") if isinstance(vision, Mapping) else None
    if not vision or ("tower" not in table and kind not in table.get("kinds", ())):
        return
    if "tower" in table:
        fields = Config(vision, f"{family}_vision", table | {"fields": table["vision"]})
        for name, formula in table["tower"].items():
            yield _build_tower_part(name, fields.evaluate_size(name, formula))
    else:
        fields = Config(vision, str(kind), merge_table(str(kind)))
        arguments = build_family_arguments({**vision, "architectures": None}, str(kind))
        for name, size in part_sizes(arguments).items():
            yield _build_tower_part(name, size)
    outer = Config({**content, "vision": fields, "width": width}, family, table)
    for name, formula in table.get("projector", {}).items():
        yield _build_tower_part(f"projector {name}", outer.evaluate_size(name, formula))


def _build_tower_part(name: str, size: int) -> Matrix:
    return Matrix("vision tower", name, 1, size, kind="table")

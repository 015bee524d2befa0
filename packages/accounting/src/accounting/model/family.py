"""The arguments of a `Transformer` for a configuration of one family.

The transformers class in `architectures` decides whether a model has a head.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from accounting.model.config import Config
from accounting.model.family_tables import merge_table
from accounting.model.formulas import Table

#: The families whose tables read `per_layer_config`, which overrides fields of single layers.
_FAMILIES_WITH_LAYER_SIZES = ("gemma4_text",)


def build_family_arguments(content: Mapping[str, Any], family: str) -> Table:
    """Return the keyword arguments of `Transformer` for a configuration of a known family.

    Raises `ValueError` if the family's table refuses the configuration, if the table does not list
    the class in `architectures`, if a field is missing or invalid, or if the sizes of single layers
    differ in a family other than Gemma 4.
    """
    table = merge_table(family)
    config = Config(content, family, table)
    for condition, message in table.get("refuse", ()):
        if config.evaluate(condition):
            raise ValueError(message.format_map(config))
    if content.get("per_layer_config") and family not in _FAMILIES_WITH_LAYER_SIZES:
        raise ValueError(
            f"expected one size for all layers of {family}, got per_layer_config ="
            f" {content['per_layer_config']!r}; fits(module, sample) traces a step of its module"
        )
    return {"name": content.get("_name_or_path") or family} | config.build_arguments(
        table | _get_head_entries(table, content, family)
    )


def get_class_name(content: Mapping[str, Any]) -> str:
    """Return the first name in `architectures`, or "" without one.

    Raises `ValueError` unless the field is a list or missing.
    """
    named = content.get("architectures")
    if not isinstance(named, list | tuple | None):
        raise ValueError(f"expected architectures to be a list of names, got {named!r}")
    return str(named[0]) if named else ""


def _get_head_entries(table: Table, content: Mapping[str, Any], family: str) -> Table:
    """Return the table entries for the head that the class in `architectures` builds.

    Raises `ValueError` for a class that the table does not list.
    """
    name = get_class_name(content)
    known: dict[str, Table] = {}
    for endings, head_entries in table["heads_known"].items():
        for ending in endings.split("|"):
            known |= dict.fromkeys(_iter_class_names(table, family, ending), head_entries)
    if normalize_name(name) not in known:
        raise ValueError(
            f"expected architectures to name a known class of {family}, got {name!r}; omit it for "
            "a decoder with its head, or an encoder without one"
        )
    return dict(known[normalize_name(name)])


def _iter_class_names(table: Table, family: str, ending: str) -> Iterator[str]:
    """Yield the normalized names of a family's classes with an ending, such as `ForCausalLM`.

    An empty ending yields an empty name. A class name starts with the name of its family, or with a
    name that the table lists.
    """
    if not ending:
        yield ""
        return
    endings = ("", "_text", "_model", "_text_model")
    for name in (*table.get("classes", ()), *map(family.removesuffix, endings)):
        yield normalize_name(name + ending)


def normalize_name(name: str) -> str:
    """Return a name in lower case without separators, so MPTForCausalLM equals MptForCausalLM."""
    return name.replace("_", "").replace("-", "").lower()

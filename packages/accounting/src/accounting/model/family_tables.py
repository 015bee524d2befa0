"""The tables of model families in `families/*.toml`, and their inheritance.

A table maps each size of a `Transformer` to a number, a bool, or a formula over the fields of the
configuration. Defaults of these fields are part of the table. `families/decoders.toml` documents
the format.
"""

from functools import cache

from accounting.model.formulas import Table, read_tables

_FILES = {
    name: read_tables(f"model/families/{name}.toml") for name in ("decoders", "hybrids", "encoders")
}
_BASE: Table = {
    name: table for file in _FILES.values() for name, table in file.pop("base", {}).items()
}
#: Aliases of fields, and the families that use them.
ALIASES: Table = read_tables("model/families/aliases.toml")
#: Vision towers and projectors of multimodal families.
TOWERS: Table = read_tables("model/families/towers.toml")
TOWERS |= {name: TOWERS[table["like"]] for name, table in TOWERS.items() if "like" in table}
#: Multimodal classes, grouped by the field that ties the head of their language model.
MULTIMODAL: Table = _FILES["decoders"].pop("multimodal")
#: Default sizes of language models, by family, which only multimodal configurations may omit.
NESTED_SIZES: Table = _FILES["decoders"].pop("nested_sizes")
#: Reasons why some families are refused.
REFUSED: dict[str, str] = {
    name: why
    for names, why in _FILES["decoders"].pop("refused").items()
    for name in names.split("|")
}
#: One table per known `model_type`.
FAMILIES: dict[str, Table] = {
    name: table for file in _FILES.values() for name, table in file.items()
}
ENCODERS = frozenset(_FILES["encoders"])


@cache
def read_mixer_tables() -> Table:
    """Return the tables of recurrent layers by name."""
    return read_tables("model/families/mixers.toml")


@cache
def merge_table(name: str, base: bool = False) -> Table:
    """Return a family's table, merged with the tables in its `like`, whose entries it overrides.

    With `base`, `name` is a base table even if a family has the same name.
    """
    entries: Table = _BASE[name] if base or name not in FAMILIES else FAMILIES[name]
    merged: Table = {}
    for base_name in entries.get("like", ()):
        merged = _override(merged, merge_table(base_name, base=base_name in _BASE))
    return _override(merged, entries)


def _override(table: Table, entries: Table) -> Table:
    """Return a table with `entries` added; the tables `fields` and `let` are merged by key."""
    nested = {
        key: table[key] | entries[key]
        for key in ("fields", "let")
        if key in table and key in entries
    }
    return table | entries | nested

"""Hugging Face families, read from tables: `families/*.toml` say what becomes of each config.json.

A table's values are numbers, switches, or formulas over the fields of a configuration, whose
defaults stand beside them; `families/decoders.toml` says how to write one. A family that is not
there is refused by name.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from accounting import checks
from accounting.model.formulas import FUNCTIONS, Table, tables, value
from accounting.model.records import MLA, Experts, Matrix, Mixer, Window
from accounting.model.shape import Shape

# What stands in a table beside the fields of a Transformer.
_ABOUT = ("like", "fields", "let", "refuse", "heads_known", "classes", "extra", "more")
# Files of models with several modalities: the language model inside is what is described.
_NESTED = ("text_config", "llm_config", "language_config")
_INHERITED = ("tie_word_embeddings", "_name_or_path")
_ATTENTION = ("attention", "full_attention", "indexed_attention", "*")
_KINDS = (
    *(*_ATTENTION, "sliding_attention", "chunked_attention", "linear_attention"),
    *("mamba", "recurrent", "conv", "moe", "mlp", "hybrid", "M", "E", "-", "sparse", "dense"),
)
# What keeps the same for the backward counts as one: GELU in its variants, and xIELU, their input.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
        *("gelu_python_tanh", "gelu_pytorch_tanh", "quick_gelu", "xielu"),
    ),
    "relu": ("relu", "relu2"),
}


def transformer_arguments(content: Mapping[str, Any]) -> Table:
    """The keyword arguments of the `Transformer` that this configuration describes."""
    family = content.get("model_type")
    if not isinstance(family, str | None):
        raise ValueError(f"model_type is {family!r}; it must be a name")
    if family not in FAMILIES:
        for field in _NESTED:
            inner = content.get(field)
            if isinstance(inner, Mapping) and inner.get("model_type", f"{family}_text") in FAMILIES:
                shared = {key: content[key] for key in _INHERITED if key in content}
                whole = shared | {"model_type": f"{family}_text"} | dict(inner)
                return transformer_arguments(whole)
    if family is None:
        raise ValueError("model_type is missing: this is not a model's config.json")
    why = REFUSED.get(family.removesuffix("_text"))
    if why:
        raise ValueError(
            f"model_type is {family!r}, not described here: {why}. parameters(module) counts its "
            "module, on the meta device too, and fits(module, sample) follows a step of it"
        )
    if family not in FAMILIES:
        raise ValueError(
            f"model_type is {family!r}, a family not known here; known are "
            f"{', '.join(sorted(FAMILIES))}{checks.nearest(family, FAMILIES)}; any other can be "
            "described with Transformer(layers=..., d_model=..., ...)"
        )
    table = _table(family)
    config = Config(content, family, table)
    for condition, message in table.get("refuse", ()):
        if config.value(condition):
            raise ValueError(message.format_map(config))
    return {"name": content.get("_name_or_path") or family} | config.arguments(
        table | _head(table, content, family)
    )


def _head(table: Table, content: Mapping[str, Any], family: str) -> Table:
    """What the class that `architectures` names builds beside the blocks."""
    named = content.get("architectures")
    if not isinstance(named, list | tuple | None):
        raise ValueError(f"architectures is {named!r}; it must be a list of names")
    name = str(named[0]) if named else ""
    known: dict[str, Table] = {}
    for endings, more in table["heads_known"].items():
        for ending in endings.split("|"):
            known |= dict.fromkeys(_class_names(table, family, ending), more)
    if _spelled(name) not in known:
        raise ValueError(
            f"architectures is {name!r}, whose head is not known for {family}; leave it out for "
            "the model that the family stands for"
        )
    return dict(known[_spelled(name)])


def _class_names(table: Table, family: str, ending: str) -> Iterator[str]:
    """The classes of a family with that ending; without one, the file names no class at all.

    A class has the name of its family, or one of those that the table lists.
    """
    if not ending:
        yield ""
        return
    endings = ("", "_text", "_model", "_text_model")
    for name in (*table.get("classes", ()), *map(family.removesuffix, endings)):
        yield _spelled(name + ending)


def _spelled(name: str) -> str:
    """A name without underscores and case: MPTForCausalLM in a file is MptForCausalLM."""
    return name.replace("_", "").replace("-", "").lower()


class Config:
    """The names of a formula: functions, `let`, and fields; it names the field that is missing."""

    def __init__(self, content: Mapping[str, Any], family: str, table: Table) -> None:
        self.content, self.family, self.table = content, family, table
        self.let: Table = table.get("let", {})
        self.fields: Table = table.get("fields", {})
        self.layers, self.layer = 0, -1
        listed = self.get("layer_types", self.get("layers_block_type"))
        self.types: Any = () if listed is None else listed
        self.typed = listed is not None
        own = (self.get, self.given, self.some, self.first_of, self.sliding, self.attends)
        self.functions = _FUNCTIONS | {function.__name__: function for function in own}

    def __getitem__(self, name: str) -> Any:
        if name in self.functions:
            return self.functions[name]
        if name in self.let:
            return self.value(self.let[name])
        if name == "i":
            return self.layer
        if name == "kind":
            return self._kind()
        value = self.content.get(name)
        if value is not None:
            return value
        default = self.fields.get(name)
        if default is None:
            raise ValueError(f"{name} is missing from this {self.family} config.json")
        if name in self.content and default:
            raise ValueError(
                f"{name} is null in this {self.family} config.json; leave it out for the default "
                f"of its class, {default!r}, or give a value"
            )
        # The empty text stands for None, which TOML does not have: the class derives the value.
        return None if default == "" else default

    def get(self, name: str, default: Any = None) -> Any:
        """The field where the file has it and it is not null."""
        value = self.content.get(name)
        return default if value is None else value

    def given(self, name: str, default: Any = None) -> Any:
        """The field where the file has it, null or not."""
        return self.content.get(name, default)

    def some(self, name: str, default: Any) -> Any:
        """The field where the file has it and it is not null; `ValueError` where it is 0."""
        value = self.content.get(name)
        return default if value is None else self.positive(name, value)

    def first_of(self, *names: str) -> Any:
        """The first of these fields that the file has, else the first with a default."""
        for name in names:
            if self.content.get(name) is not None:
                return self.content[name]
        return self[next((name for name in names if self.fields.get(name)), names[-1])]

    def sliding(self, default: bool) -> bool:
        """Whether a layer has a window: its entry of layer_types, or the family's pattern."""
        kind = self._kind()
        return default if kind is None else bool(kind == "sliding_attention")

    def attends(self, default: bool) -> bool:
        """Whether a layer has attention, likewise."""
        kind = self._kind()
        return default if kind is None else kind in _ATTENTION

    def _kind(self) -> Any:
        return self.types[self.layer] if self.types else None

    def value(self, entry: Any) -> Any:
        """A number or a switch as it is, a formula worked out."""
        if not isinstance(entry, str):
            return entry
        try:
            return value(entry, self)  # type: ignore[arg-type]
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"this {self.family} config.json cannot be read: {entry} fails with {error}"
            ) from None

    def size(self, name: str, entry: Any) -> int:
        """A whole number, or a switch that counts as one or none."""
        value = self.value(entry)
        return checks.whole(name, int(value) if isinstance(value, bool) else value, least=0)

    def where(self, entry: Any) -> tuple[int, ...]:
        """The layers for which a formula holds."""
        found = []
        for layer in range(self.layers):
            self.layer = layer
            if self.value(entry):
                found.append(layer)
        return tuple(found)

    def arguments(self, table: Table) -> Table:
        """The sizes that a table of formulas gives."""
        self.layers = checks.whole("layers", self.value(table["layers"]), most=checks.MOST_LAYERS)
        if self.typed and len(self.types) != self.layers:
            raise ValueError(f"layer_types has {len(self.types)} entries for {self.layers} layers")
        for kind in self.types:
            checks.choice("a kind in layer_types", kind, _KINDS)
        found: Table = {}
        for key, entry in table.items():
            if key in _ABOUT:
                continue
            if key in ("attention_layers", "mlp_layers"):
                found[key] = self.where(entry)
            elif key in _RECORDS:
                found[key] = self.record(_RECORDS[key], entry)
            elif key == "mixers":
                found[key] = tuple(m for m in map(self.mixer, entry) if m.layers)
            elif key == "encoder":
                # With the formulas of its family, and as many layers as it has itself.
                side = Config(self.content, self.family, self.table)
                found[key] = Shape(**side.arguments(_table(entry)), name=key) if entry else None
            elif key in _DERIVED:
                # The number 0 in a table and a field that is None leave the size to `Shape`.
                size = self.value(entry)
                if entry != 0 and size is not None:
                    found[key] = self.positive(entry, size)
                elif key == "heads":
                    found[key] = size
            else:
                found[key] = self.value(entry)
        rows = (*table.get("extra", ()), *table.get("more", ()))
        return found | {"extra": tuple(m for row in rows for m in self.matrices(row) if m.one)}

    def record(self, kind: type, entry: Table) -> Any:
        """Experts, a window or a latent; None where its `if`, its size or its layers are none."""
        if not self.value(entry.get("if", True)):
            return None
        layers = {"layers": self.where(entry["where"])} if "where" in entry else {}
        if layers == {"layers": ()}:
            return None
        sizes = {k: self.value(v) for k, v in entry.items() if k not in ("if", "where")}
        if "size" in sizes and sizes["size"] is None:
            return None
        for name in ("width", "q_rank"):
            if sizes.get(name) is not None:
                self.positive(entry[name], sizes[name])
        return kind(**{k: v for k, v in sizes.items() if v is not None}, **layers)

    def positive(self, entry: Any, value: Any) -> Any:
        """A size, and `ValueError` for a 0, which would be taken for a size not given."""
        if not value:
            raise ValueError(
                f"{entry} is {value!r} in this {self.family} config.json; leave it out, or make it "
                "null, for what its class derives"
            )
        return value

    def mixer(self, entry: Table) -> Mixer:
        """A recurrent mixer of `mixers.toml`, with the sizes that the family gives it."""
        name, layers = entry["like"], self.where(entry["where"])
        about = _mixers()[name]
        sizes = {k: self.value(v) for k, v in entry.items() if k not in ("like", "where")}
        sizes = about.get("sizes", {}) | sizes | {"d_model": self.value(self.table["d_model"])}
        inner = Config(sizes, self.family, about)
        found = (
            Matrix(
                "mixer",
                label,
                inner.size(label, rows or 1),
                inner.size(label, columns),
                split,
                kind="matrix" if rows else "vector",
            )
            for label, rows, columns, split in about["matrices"]
        )
        numbers = {key: inner.value(about[key]) for key in ("state", "scan", "kept")}
        return Mixer(name=name, layers=layers, matrices=tuple(m for m in found if m.one), **numbers)

    def matrices(self, row: Table) -> Iterator[Matrix]:
        """A matrix, table or vector that a family has beside all else, and its bias."""
        if not self.value(row.get("if", True)):
            return
        once = row.get("once", False)
        kind = row.get("kind", "matrix" if row.get("bias") else "vector")
        about: Table = {"part": "pooler" if once else row.get("part", "ends")}
        about |= {"meets": "sequence"} if once else {}
        about |= {"layers": self.where(row["where"])} if "where" in row else {}
        rows, columns = (self.size(row["name"], row.get(key, 1)) for key in ("rows", "columns"))
        more: Table = {"split": row.get("split", "none"), "chosen": row.get("chosen", 1)}
        more["skips"] = self.size("skips", row.get("skips", 0))
        yield Matrix(name=row["name"], rows=rows, columns=columns, kind=kind, **about, **more)
        if row.get("bias"):
            yield Matrix(
                name=f"{row['name']} bias", rows=1, columns=columns, kind="vector", **about
            )


def activation(name: str) -> str:
    """Which of the three kinds an activation is, by what it keeps for the backward."""
    for known, names in _ACTIVATIONS.items():
        if name in names:
            return known
    listed = ", ".join(name for names in _ACTIVATIONS.values() for name in names)
    raise ValueError(f"hidden_act is {name!r}; known are {listed}")


def _most(value: Any) -> int:
    return int(max(value) if isinstance(value, list) else value)


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, list | tuple) else (value, value)


_DERIVED = ("heads", "kv_heads", "head_dim", "v_head_dim", "d_ff", "embedding_dim")
"""What `Shape` derives from other sizes where it is not given, and the heads: 0 is no size."""
_FUNCTIONS: Table = FUNCTIONS | {"act": activation, "most": _most, "pair": _pair}
_RECORDS: dict[str, type] = {"experts": Experts, "window": Window, "mla": MLA}


@cache
def _mixers() -> Table:
    return tables("model/families/mixers.toml")


@cache
def _table(name: str, base: bool = False) -> Table:
    """A family's table with those that it is like, its own entries last."""
    own: Table = _BASE[name] if base or name not in FAMILIES else FAMILIES[name]
    merged: Table = {}
    for each in own.get("like", ()):
        above = _table(each, base=each in _BASE)
        merged = _joined(merged, above)
    return _joined(merged, own)


def _joined(above: Table, own: Table) -> Table:
    both = {key: above[key] | own[key] for key in ("fields", "let") if key in above and key in own}
    return above | own | both


_FILES = {
    name: tables(f"model/families/{name}.toml") for name in ("decoders", "hybrids", "encoders")
}
_BASE: Table = {
    name: table for each in _FILES.values() for name, table in each.pop("base", {}).items()
}
REFUSED: dict[str, str] = {
    name: why for each in _FILES.values() for name, why in each.pop("refused", {}).items()
}
"""Why some that are asked for are not there."""
FAMILIES: dict[str, Table] = {
    name: table for each in _FILES.values() for name, table in each.items()
}
"""A table for each `model_type` that is known."""
ENCODERS = frozenset(_FILES["encoders"])

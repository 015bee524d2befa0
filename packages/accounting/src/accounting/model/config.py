"""A Hugging Face configuration, whose fields a family's formulas refer to by name."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accounting import checks
from accounting.model.family_tables import ALIASES, read_mixer_tables
from accounting.model.formulas import FUNCTIONS, Table, evaluate, list_names
from accounting.model.records import RECORDS, Compressed, Matrix, Mixer, Window

#: Keys of a table that are not fields of a `Transformer`.
_OTHER_KEYS = (
    "like",
    "fields",
    "let",
    "kinds",
    "refuse",
    "heads_known",
    "classes",
    "extra",
    "more",
)
_ATTENTION = ("attention", "full_attention")
#: Names of each kind of activation function. Functions of one kind save the same number of
#: tensors; see `Transformer.activation`.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu", "gelu_pytorch_tanh"),
    "quick_gelu": ("quick_gelu", "gelu_10"),
    "gelu_python": ("gelu_python",),
    "gelu_new": ("gelu_new", "gelu_accurate", "gelu_python_tanh"),
    "gelu_fast": ("gelu_fast",),
    "xielu": ("xielu",),
    "relu2": ("relu2",),
    "relu": ("relu",),
}


def _add_canonical_names(content: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return the configuration with each aliased field also stored under its canonical name.

    Raises `ValueError` if both names are present with different values, because the order of fields
    in the file would decide which value transformers uses.
    """
    renamed: Table = {}
    for name, aliases in ALIASES.items():
        for alias, families in aliases.items():
            if family not in families or content.get(alias) is None:
                continue
            renamed[name] = content[alias]
            if content.get(name, content[alias]) != content[alias]:
                raise ValueError(
                    f"expected {name} and {alias}, two names of one field of {family}, to be "
                    f"equal, got {content[name]!r} and {content[alias]!r}; omit one of them"
                )
    return {**content, **renamed} if renamed else content


class Config:
    """The values of names in formulas: functions, `let` definitions and configuration fields.

    A missing field without a default raises a `ValueError` that names it. A null field also raises
    `ValueError`, unless its default is 0, False or an empty string.
    """

    def __init__(self, content: Mapping[str, Any], family: str, table: Table) -> None:
        self.content = _add_canonical_names(content, family)
        self.family = family
        self.table = table
        self.let: Table = table.get("let", {})
        self.fields: Table = table.get("fields", {})
        self.layers = 0
        self.layer = -1
        layer_types = self.get("layer_types", self.get("layers_block_type"))
        self.layer_types: Any = () if layer_types is None else layer_types
        self.has_layer_types = layer_types is not None
        self.functions = _FUNCTIONS | {
            "get": self.get,
            "raw": self.get_raw,
            "some": self.get_nonzero,
            "first_of": self.get_first,
            "sliding": self.is_sliding,
            "attends": self.is_attention,
        }

    def __getitem__(self, name: str) -> Any:
        if name in self.functions:
            return self.functions[name]
        if name in self.let:
            return self.evaluate(self.let[name])
        if name == "i":
            return self.layer
        if name == "kind":
            return self._get_kind()
        value = self.content.get(name)
        if value is not None:
            return value
        default = self.fields.get(name)
        if default is None:
            raise ValueError(f"{name} is missing from this {self.family} config.json")
        if name in self.content and default:
            raise ValueError(
                f"{name} is null in this {self.family} config.json; omit it for the default of "
                f"its class, {default!r}, or pass a value"
            )
        # TOML has no None, so an empty string stands for None. The class then derives the value.
        return None if default == "" else default

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default` if it is missing or null."""
        value = self.content.get(name)
        return default if value is None else value

    def get_raw(self, name: str, default: Any = None) -> Any:
        """Return a field even if it is null, or `default` if it is missing."""
        return self.content.get(name, default)

    def get_nonzero(self, name: str, default: Any) -> Any:
        """Return a field, or `default` if it is missing or null; raise `ValueError` if it is 0."""
        value = self.content.get(name)
        return default if value is None else self.require_nonzero(name, value)

    def get_first(self, *names: str) -> Any:
        """Return the first of these fields that the file sets, or otherwise their first default.

        A default of 0, False or "" is used only if it is that of the last field. Raises
        `ValueError` if no field is set and none has a default.
        """
        for name in names:
            if self.content.get(name) is not None:
                return self.content[name]
        return self[next((name for name in names if self.fields.get(name)), names[-1])]

    def is_sliding(self, default: bool) -> bool:
        """Return True if this layer has a window in `layer_types`; `default` without that field."""
        kind = self._get_kind()
        return default if kind is None else bool(kind == "sliding_attention")

    def is_attention(self, default: bool) -> bool:
        """Return True if this layer is attention in `layer_types`; `default` without that field."""
        kind = self._get_kind()
        return default if kind is None else kind in _ATTENTION

    def _get_kind(self) -> Any:
        return self.layer_types[self.layer] if self.layer_types else None

    def evaluate(self, entry: Any) -> Any:
        """Return the value of a formula; a number or a bool is returned unchanged.

        Raises `ValueError` if the evaluation fails.
        """
        if not isinstance(entry, str):
            return entry
        try:
            return evaluate(entry, self)  # type: ignore[arg-type]
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            raise ValueError(self._explain_failure(entry)) from None

    def _explain_failure(self, entry: str) -> str:
        """Return the message for a formula that fails, with the fields that it reads."""
        read = [name for name in list_names(entry) if name in self.content]
        values = ", ".join(f"{name}={self.content[name]!r:.60}" for name in read)
        return (
            f"expected values in this {self.family} config.json that its class can read, got "
            f"{values or 'none of its fields'}; pass a value of the type that the class "
            "documents, or omit the field"
        )

    def evaluate_size(self, name: str, entry: Any) -> int:
        """Return the value of a formula as an integer; a bool counts as 1 or 0."""
        value = self.evaluate(entry)
        return checks.require_integer(
            name, int(value) if isinstance(value, bool) else value, minimum=0
        )

    def list_layers(self, entry: Any) -> tuple[int, ...]:
        """Return the indices of the layers for which a formula is true."""
        indices = []
        for layer in range(self.layers):
            self.layer = layer
            if self.evaluate(entry):
                indices.append(layer)
        return tuple(indices)

    def build_arguments(self, table: Table) -> Table:
        """Return the keyword arguments of `Transformer` that a family's table of formulas defines.

        Raises `ValueError` if `layer_types` has the wrong length or an unknown entry, or if a
        formula fails.
        """
        self.layers = checks.require_integer(
            "layers", self.evaluate(table["layers"]), maximum=checks.MOST_LAYERS
        )
        if self.has_layer_types and len(self.layer_types) != self.layers:
            raise ValueError(
                f"expected one entry of layer_types per layer ({self.layers}), got "
                f"{len(self.layer_types)}"
            )
        for kind in self.layer_types:
            checks.require_choice(
                f"a kind in layer_types of {self.family}", kind, table.get("kinds", _ATTENTION)
            )
        arguments: Table = {}
        for key, entry in table.items():
            if key in _DERIVABLE:
                arguments |= self._build_explicit_size(key, entry)
            elif key not in _OTHER_KEYS:
                arguments[key] = self._build_argument(key, entry)
        extra = [matrix for row in table.get("extra", ()) for matrix in self.iter_matrices(row)]
        # The rows of `more` belong to a head or pooler, which reads the output of the last layer.
        for row in table.get("more", ()):
            extra += [replace(matrix, where="last") for matrix in self.iter_matrices(row)]
        return arguments | {"extra": tuple(matrix for matrix in extra if matrix.entries)}

    def _build_argument(self, key: str, entry: Any) -> Any:
        """Return the value of one argument of `Transformer`."""
        if key in ("attention_layers", "mlp_layers", "shared_kv_layers"):
            return self.list_layers(entry)
        if key in RECORDS:
            return self.build_record(RECORDS[key], entry)
        if key == "mixers":
            mixers = [self.build_mixer(row) for row in entry]
            return tuple(mixer for mixer in mixers if mixer.layers)
        return self.evaluate(entry)

    def _build_explicit_size(self, key: str, entry: Any) -> Table:
        """Return `{key: size}`, or an empty dictionary if `Transformer` has to derive the size.

        `Transformer` derives a size other than `heads` if its table entry is 0 or its field is
        None. Raises `ValueError` if a field is 0.
        """
        size = self.evaluate(entry)
        if entry != 0 and size is not None:
            return {key: self.require_nonzero(entry, size)}
        return {key: size} if key == "heads" else {}

    def build_record(self, kind: type, entry: Table) -> Any:
        """Return an `Experts`, `Window` or `MLA` record, or None if the model does not have it.

        Raises `ValueError` if `width` or `q_rank` is 0, or if `layer_types` requires a window that
        is missing.
        """
        if not self.evaluate(entry.get("if", True)):
            return self._require_no_window(kind)
        layers = {"layers": self.list_layers(entry["where"])} if "where" in entry else {}
        if layers == {"layers": ()}:
            return None
        sizes = {k: self.evaluate(v) for k, v in entry.items() if k not in ("if", "where")}
        if "size" in sizes and sizes["size"] is None:
            return self._require_no_window(kind)
        for name in ("width", "q_rank"):
            if sizes.get(name) is not None:
                self.require_nonzero(entry[name], sizes[name])
        return kind(**{k: v for k, v in sizes.items() if v is not None}, **layers)

    def _require_no_window(self, kind: type) -> None:
        """Raise `ValueError` if `kind` is `Window` and `layer_types` has windowed layers."""
        if kind is Window and "sliding_attention" in self.layer_types:
            raise ValueError(
                f"layer_types of this {self.family} config.json has sliding_attention, but "
                "sliding_window is null or switched off; pass a size, or full_attention layers"
            )

    def require_nonzero(self, entry: Any, value: Any) -> Any:
        """Return a size; raise `ValueError` for 0, which `Transformer` would treat as missing."""
        if not value:
            raise ValueError(
                f"{entry} is {value!r} in this {self.family} config.json; omit it or set it to "
                "null to let its class derive it"
            )
        return value

    def build_mixer(self, entry: Table) -> Mixer:
        """Return a recurrent mixer: the formulas of mixers.toml for the sizes of the family."""
        name = entry["like"]
        layers = self.list_layers(entry["where"])
        table = read_mixer_tables()[name]
        sizes = {
            k: self.evaluate(v) for k, v in entry.items() if k not in ("like", "where", "name")
        }
        sizes = table.get("sizes", {}) | sizes | {"d_model": self.evaluate(self.table["d_model"])}
        inner = Config(sizes, self.family, table)
        matrices = (
            Matrix(
                "mixer",
                label,
                inner.evaluate_size(label, rows or 1),
                inner.evaluate_size(label, columns),
                split,
                kind="matrix" if rows else "vector",
            )
            for label, rows, columns, split in table["matrices"]
        )
        entries = {key: inner.evaluate(size) for key, size in table.get("compressed", {}).items()}
        return Mixer(
            name=str(entry.get("name", name)),
            layers=layers,
            matrices=tuple(matrix for matrix in matrices if matrix.entries),
            state=inner.evaluate(table["state"]),
            scan=inner.evaluate(table["scan"]),
            saved=inner.evaluate(table["saved"]) if "saved" in table else None,
            compressed=Compressed(**entries) if entries else None,
        )

    def iter_matrices(self, row: Table) -> Iterator[Matrix]:
        """Yield an additional matrix, table or vector of a family, and its bias if it has one."""
        if not self.evaluate(row.get("if", True)):
            return
        once = row.get("once", False)
        kind = row.get("kind", "matrix" if row.get("bias") else "vector")
        matrix = Matrix(
            part=row.get("part", "pooler" if once else "ends"),
            name=row["name"],
            rows=self.evaluate_size(row["name"], row.get("rows", 1)),
            columns=self.evaluate_size(row["name"], row.get("columns", 1)),
            split=row.get("split", "none"),
            kind=kind,
            layers=self.list_layers(row["where"]) if "where" in row else None,
            applies_to="sequence" if once else "tokens",
            skips=self.evaluate_size("skips", row.get("skips", 0)),
            shared=self.evaluate_size("shared", row.get("shared", 0)),
        )
        yield matrix
        if row.get("bias"):
            name = f"{matrix.name} bias"
            yield replace(matrix, name=name, rows=1, kind="vector", split="none", skips=0)


def classify_activation(name: str) -> str:
    """Return the value of `Transformer.activation` for a name in a config.json.

    Raises `ValueError` for an unknown name.
    """
    for kind, names in ACTIVATIONS.items():
        if name in names:
            return kind
    listed = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise ValueError(f"expected hidden_act to be one of {listed}, got {name!r}")


def _require_same(value: Any) -> Any:
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ValueError(f"expected one value, or the same value for all layers, got {value!r}")
    return values.pop()


def _count_values(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1


def _as_pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, list | tuple) else (value, value)


#: Sizes that `Transformer` derives if they are missing, and `heads`; a file must not set them to 0.
_DERIVABLE = ("heads", "kv_heads", "head_dim", "v_head_dim", "d_ff", "embedding_dim")
_FUNCTIONS: Table = FUNCTIONS | {
    "act": classify_activation,
    "same": _require_same,
    "pair": _as_pair,
    "count": _count_values,
}

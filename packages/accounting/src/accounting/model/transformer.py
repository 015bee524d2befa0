"""A transformer, described by the sizes that determine its cost, and the list of its matrices.

The sizes cover grouped-query and latent attention, recurrent mixers, experts and windows in some
layers, and individual biases and norms. The defaults describe a Llama-like decoder: RMSNorm, rotary
positions, a gated MLP, no biases, and an untied head. All counts are derived from the matrices,
which are listed in matrices.toml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from typing import Any, ClassVar

from accounting import checks
from accounting.model.config import ACTIVATIONS
from accounting.model.formulas import evaluate, read_tables
from accounting.model.records import MLA, AttentionGroup, Experts, LowRank, Matrix, Mixer, Window
from accounting.model.registry import build_transformer_arguments, read_content


class DerivedSize(int):
    """A size that was not passed, so `dataclasses.replace` derives it again."""


_NOT_PASSED = DerivedSize(0)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer described by its sizes.

    `dataclasses.replace` recomputes every size that was not passed explicitly. Raises `ValueError`
    if the sizes are inconsistent.
    """

    derived_sizes: ClassVar = (
        "d_ff",
        "kv_heads",
        "head_dim",
        "v_head_dim",
        "embedding_dim",
        "attention_width",
    )

    layers: int
    d_model: int
    #: Number of query heads; 0 means blocks without attention.
    heads: int
    #: Rows of the embedding; 0 means a model without embedding and head.
    vocab_size: int
    #: Hidden width of the MLP; the default is four times `d_model`.
    d_ff: int = _NOT_PASSED
    #: Key and value heads; the default is `heads` (MHA), and 1 is MQA.
    kv_heads: int = _NOT_PASSED
    #: Width of a head; the default is `d_model / heads`. With MLA, this is the part without rotary
    #: positions.
    head_dim: int = _NOT_PASSED
    #: Width of a value; the default is `head_dim`.
    v_head_dim: int = _NOT_PASSED

    #: True if the MLP has three matrices (SwiGLU, GeGLU); otherwise it has two.
    gated_mlp: bool = True
    #: `silu`, `gelu`, `relu`, `relu2` (squared ReLU), or an activation that Hugging Face
    #: transformers computes with several operators, which save more tensors: `quick_gelu`,
    #: `gelu_python`, `gelu_new`, `gelu_fast` or `xielu`.
    activation: str = "silu"
    #: `rmsnorm` (a weight), `layernorm` (a weight and a bias), or `none`.
    norm: str = "rmsnorm"
    #: False for a LayerNorm without bias (Cohere, MPT).
    norm_bias: bool = True
    norms_per_layer: int = 2
    #: True if attention and MLP read the same input and their outputs are summed (GPT-NeoX, Phi,
    #: PaLM).
    parallel_block: bool = False
    final_norm: bool = True
    #: Norm of queries and keys. True or `head` normalizes each head with one weight of width
    #: `head_dim`. `heads` normalizes each head with its own weight. `all` normalizes all heads
    #: together (OLMo 2).
    qk_norm: bool | str = False
    #: Rows of a learned position table; 0 for rotary positions.
    positions: int = 0
    #: Width of the embedding if it differs from `d_model` and is projected (OPT-350M).
    embedding_dim: int = _NOT_PASSED
    #: True if the head uses the embedding matrix.
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    #: Width of the input of queries, keys and values; the default is `d_model`.
    attention_width: int = _NOT_PASSED
    #: True if the layers without a window have no value matrix, because their values are the output
    #: of the key matrix (Gemma 4).
    keys_as_values: bool = False
    #: Number of distinct blocks of attention and MLP, which the layers reuse cyclically (Zamba 2);
    #: 0 if each layer has its own block.
    shared_blocks: int = 0
    #: True if each head has a learned logit that is included in the softmax (gpt-oss).
    sinks: bool = False
    #: True if the attention output is multiplied by a gate of the same width that is computed from
    #: the input of attention (Qwen3-Next).
    output_gate: bool = False

    mla: MLA | None = None
    low_rank: LowRank | None = None
    experts: Experts | None = None
    window: Window | None = None
    #: Layers with attention; the default is all layers, or none if `heads` is 0.
    attention_layers: tuple[int, ...] | None = None
    #: Layers that attend to the keys and values of an earlier layer (Gemma 3n). They have neither
    #: key and value matrices nor a cache.
    shared_kv_layers: tuple[int, ...] = ()
    #: Layers with a dense MLP; the default is all layers without experts.
    mlp_layers: tuple[int, ...] | None = None
    #: Kinds of recurrent layers, each with the layers that contain it.
    mixers: tuple[Mixer, ...] = ()
    #: False for encoders, in which each token attends to all tokens.
    causal: bool = True
    #: False for a model that ends with its final norm, such as an encoder.
    lm_head: bool = True
    #: Additional matrices that are specific to a family.
    extra: tuple[Matrix, ...] = ()
    name: str = "transformer"

    @classmethod
    def from_hf(cls, config: str | PathLike[str] | Mapping[str, Any] | object) -> Transformer:
        """Return the model of a Hugging Face configuration.

        `config` is a folder, a file, its content, or a config object. The class in `architectures`
        decides which parts exist, such as the head or a pooler. Without this field, a decoder has a
        head and an encoder none. Raises `ValueError` if a field is missing or invalid, or if the
        family is unknown. Raises `FileNotFoundError` with the download command if `config` is a
        path that does not exist, such as the name of a model on the hub.
        """
        return cls(**build_transformer_arguments(read_content(config), _count_part_sizes))

    def __post_init__(self) -> None:
        checks.convert_fields(self, heads=0, vocab_size=0, norms_per_layer=0, **_CHOICES)
        for name, (record, listed) in _RECORDS.items():
            self._check_record(name, record, listed)
        self._derive_sizes()
        all_layers = tuple(range(self.layers))
        if self.experts:
            layers = self._resolve_layers("experts.layers", self.experts.layers, all_layers)
            width = self.experts.width
            if not width or isinstance(width, DerivedSize):
                width = DerivedSize(self.d_ff)
            object.__setattr__(self, "experts", replace(self.experts, layers=layers, width=width))
        if self.window:
            layers = self._resolve_layers("window.layers", self.window.layers, all_layers)
            object.__setattr__(self, "window", replace(self.window, layers=layers))
        attention = self._resolve_layers(
            "attention_layers", self.attention_layers, all_layers if self.heads else ()
        )
        object.__setattr__(self, "attention_layers", attention)
        shared = self._resolve_layers("shared_kv_layers", self.shared_kv_layers, ())
        object.__setattr__(self, "shared_kv_layers", shared)
        if attention and not self.heads:
            raise ValueError("expected heads >= 1 with attention_layers, got heads=0")
        if self.window and not {*attention} & {*(self.window.layers or ())}:
            raise ValueError(
                "expected window in a layer with attention, got none; pass window=None"
            )
        dense = tuple(i for i in all_layers if i not in self.expert_layers)
        object.__setattr__(
            self, "mlp_layers", self._resolve_layers("mlp_layers", self.mlp_layers, dense)
        )
        if self.window and self.window.chunked and not self.causal:
            raise ValueError("expected window.chunked=False for an encoder, got True")
        for mixer in self.mixers:
            self._resolve_layers(f"layers of {mixer.name}", mixer.layers, ())
        self._check_blocks()
        self._check_sharing()

    def _derive_sizes(self) -> None:
        """Set the sizes that were not passed; raise `ValueError` for a passed size of 0."""
        for name in self.derived_sizes:
            size = getattr(self, name)
            if isinstance(size, DerivedSize):
                object.__setattr__(self, name, 0)
            elif size == 0 and self.heads:
                raise ValueError(f"expected {name} >= 1, got 0; omit it to derive it")
        if self.heads and not self.head_dim and self.d_model % self.heads:
            raise ValueError(
                f"expected heads to divide d_model={self.d_model}, got heads={self.heads}; "
                "pass head_dim if the width of a head is not d_model / heads"
            )
        self._fill("head_dim", self.d_model // self.heads if self.heads else 0)
        self._fill("v_head_dim", self.head_dim)
        self._fill("kv_heads", self.heads)
        self._fill("d_ff", 4 * self.d_model)
        self._fill("embedding_dim", self.d_model)
        self._fill("attention_width", self.d_model)
        kv_heads = {"kv_heads": self.kv_heads}
        if self.window and self.window.kv_heads:
            kv_heads["window.kv_heads"] = self.window.kv_heads
        for name, count in kv_heads.items():
            if self.heads and self.heads % count:
                raise ValueError(
                    f"expected {name} to divide heads={self.heads}, got {name}={count}; "
                    "each key and value head serves the same number of query heads"
                )

    def _check_blocks(self) -> None:
        """Raise `ValueError` if a layer has no block, or both a dense MLP and experts.

        `dataclasses.replace` recomputes sizes that were not passed, but copies the tuples of
        layers. It could not derive the layers of windows, mixers and additional matrices for
        another depth.
        """
        derive = (
            "pass attention_layers=None and mlp_layers=None, and experts and window without "
            "layers, to derive them again"
        )
        dense = {*(self.mlp_layers or ())}
        both = sorted(dense & self.expert_layers)
        if both:
            raise ValueError(
                f"expected a dense MLP or experts in a layer, got both in layer {both[0]}; {derive}"
            )
        blocks = dense | self.expert_layers | {*(self.attention_layers or ())}
        blocks = blocks.union(*(mixer.layers for mixer in self.mixers))
        empty = sorted({*range(self.layers)} - blocks)
        if empty:
            raise ValueError(
                f"expected attention, an MLP, experts or a mixer in each layer, got none in layer "
                f"{empty[0]}; {derive}"
            )

    def _check_sharing(self) -> None:
        """Raise `ValueError` if a layer that shares keys has no attention or no earlier keys.

        Also raises `ValueError` for latent attention with fields that describe other keys.
        """
        shared, attention = self.shared_kv_layers, self.attention_layers or ()
        first_key = min(self.key_layers, default=self.layers)
        if shared and (shared[0] < first_key or not set(shared) <= set(attention)):
            raise ValueError(
                f"expected shared_kv_layers among attention_layers={attention} and after a layer "
                f"with keys, got {shared}"
            )
        if self.mla and self._has_special_keys():
            raise ValueError(
                "expected mla=None with shared_kv_layers, keys_as_values, attention_width, or head "
                "sizes of a window, got mla; latent attention has no such keys"
            )
        self._check_low_rank()

    def _has_special_keys(self) -> bool:
        """Return True if keys are shared, are values, or have widths that latents do not have."""
        window_sizes = self.window and (self.window.head_dim or self.window.kv_heads)
        is_wider = self.attention_width != self.d_model
        return bool(self.shared_kv_layers or self.keys_as_values or window_sizes or is_wider)

    def _check_low_rank(self) -> None:
        """Raise `ValueError` if `low_rank` is inconsistent with other fields, or is missing."""
        if not self.low_rank:
            if any(mixer.compressed for mixer in self.mixers):
                raise ValueError("expected low_rank with compressed entries, got None")
            return
        if self.mla or self._has_special_keys():
            raise ValueError(
                "expected low_rank=None with mla, shared_kv_layers, keys_as_values, "
                f"attention_width, or head sizes of a window, got {self.low_rank}"
            )
        if (self.kv_heads, self.v_head_dim) != (1, self.head_dim):
            raise ValueError(
                f"expected kv_heads=1 and v_head_dim=head_dim={self.head_dim} with low_rank, got "
                f"kv_heads={self.kv_heads} and v_head_dim={self.v_head_dim}; the key of all heads "
                "is their value"
            )
        width = self.heads * self.head_dim
        if width % self.low_rank.out_groups:
            raise ValueError(
                f"expected low_rank.out_groups to divide heads x head_dim = {width}, got "
                f"{self.low_rank.out_groups}"
            )

    def _check_record(self, name: str, record: type, listed: bool) -> None:
        field = getattr(self, name)
        entries = field
        if not listed:
            entries = () if field is None else (field,)
        if not isinstance(entries, tuple) or not all(isinstance(x, record) for x in entries):
            kind = f"a tuple of {record.__name__}" if listed else f"{record.__name__}(...) or None"
            raise TypeError(f"expected {name} to be {kind}, got {field!r}")

    def _fill(self, name: str, default: int) -> None:
        """Set a size to `default` if it was not passed."""
        if not getattr(self, name):
            object.__setattr__(self, name, DerivedSize(default))

    def _resolve_layers(
        self, name: str, layers: Iterable[int] | None, default: tuple[int, ...]
    ) -> tuple[int, ...]:
        return default if layers is None else checks.require_layers(name, layers, self.layers)

    @property
    def size(self) -> int:
        """The total number of parameters."""
        return sum(matrix.size for matrix in list_matrices(self))

    @cached_property
    def expert_layers(self) -> frozenset[int]:
        """The layers whose MLP is a mixture of experts."""
        return frozenset(self.experts.layers or () if self.experts else ())

    @cached_property
    def windowed_layers(self) -> frozenset[int]:
        """The attention layers with a window."""
        layers = self.window.layers or () if self.window else ()
        return frozenset(layers) & frozenset(self.attention_layers or ())

    @cached_property
    def attention_groups(self) -> tuple[AttentionGroup, ...]:
        """The attention layers without a window and those with one; an empty group is omitted."""
        attention = full = tuple(self.attention_layers or ())
        if self.window:
            full = tuple(layer for layer in attention if layer not in self.windowed_layers)
        groups = [AttentionGroup(False, full, self.kv_heads, self.qk_dim, self.v_head_dim)]
        if self.window:
            windowed = tuple(layer for layer in attention if layer in self.windowed_layers)
            kv_heads = self.window.kv_heads or self.kv_heads
            widths = [self.window.head_dim or width for width in (self.qk_dim, self.v_head_dim)]
            groups.append(AttentionGroup(True, windowed, kv_heads, *widths))
        return tuple(group for group in groups if group.layers)

    @cached_property
    def key_layers(self) -> tuple[int, ...]:
        """The attention layers that compute keys, and therefore have a cache."""
        return tuple(i for i in self.attention_layers or () if i not in self.shared_kv_layers)

    def check_step(self) -> None:
        """Raise `ValueError` if the tensors and times of a training step are not modeled."""
        reasons = {
            "its layers share blocks": self.shared_blocks,
            "its layers share keys and values": self.shared_kv_layers or self.keys_as_values,
            "its layers have heads of several sizes": self.window
            and (self.window.head_dim or self.window.kv_heads),
            "its attention reads more than the residual stream": self.attention_width
            != self.d_model,
            "its attention selects keys by an index": self.mla and self.mla.index_heads,
            "its queries and outputs have a low rank": self.low_rank,
        }
        reasons |= {f"it has {m.name}": m.saved is None for m in self.mixers}
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(
                    f"expected a model whose training step is modeled, got {self.name}; {reason}; "
                    "trace a step with fits, or count it with parameters, flops and kv_cache"
                )

    def check_positions(self, seq: int) -> None:
        """Raise `ValueError` if the position table of a text model has fewer than `seq` rows.

        Image encoders are not checked, because they may interpolate their table.
        """
        # The positions of Electra are narrower than its layers, so they are an additional table. A
        # vision tower also has positions, but no text token uses them.
        tables = [m for m in self.extra if (m.part, m.name) == ("ends", "positions")]
        positions = self.positions or sum(m.rows for m in tables)
        is_text = self.causal or self.vocab_size > 0
        if is_text and 0 < positions < seq:
            raise ValueError(
                f"expected seq <= {positions}, the number of positions of {self.name}, got {seq}"
            )

    @property
    def qk_dim(self) -> int:
        """The width of a query or key in attention."""
        return self.head_dim + (self.mla.rope_head_dim if self.mla else 0)

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of an MLP: 3 if it is gated, and otherwise 2."""
        return 3 if self.gated_mlp else 2

    @property
    def norm_vectors(self) -> int:
        """Number of vectors per norm: 0 for `none`, 1 for a weight, 2 for a weight and a bias."""
        return {"rmsnorm": 1, "layernorm": 1 + self.norm_bias, "none": 0}[self.norm]


_CHOICES: dict[str, tuple[object, ...]] = {
    "norm": ("rmsnorm", "layernorm", "none"),
    "activation": tuple(ACTIVATIONS),
    "qk_norm": (False, True, "head", "heads", "all"),
}
_RECORDS: dict[str, tuple[type, bool]] = {
    "mla": (MLA, False),
    "low_rank": (LowRank, False),
    "experts": (Experts, False),
    "window": (Window, False),
    "mixers": (Mixer, True),
    "extra": (Matrix, True),
}
_PARTS = read_tables("model/matrices.toml")


def _count_part_sizes(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of parameters in each part of a `Transformer` with these arguments."""
    sizes: Counter[str] = Counter()
    for matrix in list_matrices(Transformer(**arguments)):
        sizes[matrix.part] += matrix.size
    return dict(sizes)


@lru_cache(maxsize=4096)
def list_matrices(model: Transformer) -> tuple[Matrix, ...]:
    """Return the matrices of a model that have entries, one record per kind of matrix."""
    mixers = (
        replace(matrix, part=mixer.name, layers=mixer.layers)
        for mixer in model.mixers
        for matrix in mixer.matrices
    )
    ordered = [matrix for part in _PARTS for matrix in _iter_part(model, part)]
    ends = [i for i, matrix in enumerate(ordered) if matrix.part in ("norms", "head")]
    split = ends[0] if ends else len(ordered)
    ordered = [*ordered[:split], *mixers, *ordered[split:], *model.extra]
    return tuple(matrix for matrix in ordered if matrix.size)


def _iter_part(model: Transformer, part: str) -> Iterator[Matrix]:
    """Yield the matrices of one part of matrices.toml that the model has."""
    layers = tuple(model.attention_layers or ())
    group = AttentionGroup(False, layers, model.kv_heads, model.qk_dim, model.v_head_dim)
    groups: Iterable[AttentionGroup] = (group,)
    if part == "attention" and model.window and (model.window.head_dim or model.window.kv_heads):
        groups = model.attention_groups
    for group in groups:
        yield from _iter_rows(model, part, group)


def _iter_rows(model: Transformer, part: str, group: AttentionGroup) -> Iterator[Matrix]:
    """Yield the matrices of one part; matrices of attention are in the layers of `group`."""
    experts = model.experts
    keys = tuple(layer for layer in group.layers if layer in model.key_layers)
    full = frozenset(group.layers) - model.windowed_layers
    separate_values = tuple(i for i in keys if i not in full) if model.keys_as_values else keys
    names: dict[str, Any] = {
        "m": model,
        "mla": model.mla,
        "low": model.low_rank,
        "experts": experts,
        "d": model.d_model,
        "a": model.attention_width,
        "h": model.heads,
        "g": group.kv_heads,
        "e": model.embedding_dim,
        "qk": group.qk_dim,
        "v": group.v_head_dim,
        "attending": group.layers,
        "keys": keys,
        "unkeyed": tuple(i for i in group.layers if i not in keys),
        "values": () if model.low_rank else separate_values,
        "bias": model.mlp_bias if experts is None or experts.bias is None else experts.bias,
    }
    part_layers = evaluate(_PARTS[part].get("layers"), names)
    for name, rows, columns, split, condition, *more in _PARTS[part]["rows"]:
        options: dict[str, Any] = {"kind": "matrix" if rows else "vector"} | dict(*more)
        layers = evaluate(options.pop("layers"), names) if "layers" in options else part_layers
        if layers == () or not evaluate(condition, names):
            continue
        if options.get("routed") and experts:
            options |= {"copies": experts.count, "chosen": experts.per_token}
            options["routed"] = experts.count > 1
        if part == "attention":
            options["kv_heads"] = group.kv_heads
        if part in ("attention", "mlp"):
            options["shared"] = model.shared_blocks
        options["layers"] = None if layers is None else tuple(layers)
        num_rows = int(evaluate(rows or 1, names))
        num_columns = int(evaluate(columns, names))
        suffix = group.suffix if part == "attention" else ""
        yield Matrix(part, name + suffix, num_rows, num_columns, split, **options)

"""The shape of a transformer: every size that its cost depends on, and nothing else.

Notable: attention with grouped queries or with a compressed latent, recurrent mixers in its place
in some layers, experts in some layers, windows in some layers, biases and norms counted one by one,
an encoder beside the decoder. The defaults describe a Llama-like decoder: RMSNorm, rotary
positions, three MLP matrices, no biases and a head of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from accounting import checks
from accounting.model.records import MLA, Experts, Matrix, Mixer, Window


@checks.named
@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer by its sizes; raises `ValueError` for sizes that cannot be."""

    derived_sizes: ClassVar = ("d_ff", "kv_heads", "head_dim", "v_head_dim", "embedding_dim")

    layers: int
    d_model: int
    heads: int
    """Query heads; 0 describes blocks without attention."""
    vocab_size: int
    """Rows of the embedding; 0 describes the blocks alone, without embedding and head."""
    d_ff: int = 0
    """Width of the MLP; four times `d_model` if not given."""
    kv_heads: int = 0
    """Key and value heads: as many as `heads` (MHA) unless given; 1 is MQA."""
    head_dim: int = 0
    """`d_model / heads` if not given. With MLA, the part of a query that carries no position."""
    v_head_dim: int = 0
    """`head_dim` if not given."""

    gated_mlp: bool = True
    """Three matrices (SwiGLU, GeGLU) or two."""
    activation: str = "silu"
    norm: str = "rmsnorm"
    """`rmsnorm` (a weight), `layernorm` (a weight and a bias), or `none`."""
    norm_bias: bool = True
    """False for a LayerNorm that has a weight alone (Cohere, MPT)."""
    norms_per_layer: int = 2
    parallel_block: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX, Phi, PaLM)."""
    final_norm: bool = True
    qk_norm: bool | str = False
    """A norm of queries and keys: True or `head` over the head dimension with one weight for all
    heads, `heads` with a weight for each head, `all` over all heads together (OLMo 2)."""
    positions: int = 0
    """Rows of a learned position table; rotary positions have none."""
    embedding_dim: int = 0
    """Width of the embedding where it differs from `d_model` and is projected (OPT-350M)."""
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sinks: bool = False
    """One learned logit a head that takes part in the softmax (gpt-oss)."""
    output_gate: bool = False
    """A gate as wide as the attention's output, from the same input (Qwen3-Next)."""

    mla: MLA | None = None
    experts: Experts | None = None
    window: Window | None = None
    attention_layers: tuple[int, ...] | None = None
    """Which layers have attention: all if not given."""
    mlp_layers: tuple[int, ...] | None = None
    """Which layers have a dense MLP: all that have no experts if not given."""
    mixers: tuple[Mixer, ...] = ()
    """Recurrent layers."""
    causal: bool = True
    """False where every token sees every other: encoders."""
    lm_head: bool = True
    """False for a model that ends with its last norm: encoders again."""
    encoder: Shape | None = None
    """What the decoder's cross-attention looks at; each layer of the decoder has one then."""
    extra: tuple[Matrix, ...] = ()
    """What a family has beside all this."""
    name: str = "transformer"

    def __post_init__(self) -> None:
        least = {"heads": 0, "vocab_size": 0, "norms_per_layer": 0}
        for name, value in checks.fields(Shape, vars(self), **least, **_CHOICES).items():
            object.__setattr__(self, name, value)
        for name, (record, listed) in _RECORDS.items():
            self._record(name, record, listed)
        if self.heads and not self.head_dim and self.d_model % self.heads:
            raise ValueError(
                f"heads is {self.heads}, which does not divide d_model={self.d_model}; "
                "give head_dim if the heads are meant to have a width of their own"
            )
        self._fill("head_dim", self.d_model // self.heads if self.heads else 0)
        self._fill("v_head_dim", self.head_dim)
        self._fill("kv_heads", self.heads)
        self._fill("d_ff", 4 * self.d_model)
        self._fill("embedding_dim", self.d_model)
        if self.heads and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which does not divide heads={self.heads}; "
                "each key and value head must serve the same number of query heads"
            )
        everywhere = tuple(range(self.layers))
        if self.experts:
            layers = self._layers("experts.layers", self.experts.layers, everywhere)
            width = self.experts.width or self.d_ff
            object.__setattr__(self, "experts", replace(self.experts, layers=layers, width=width))
        if self.window:
            layers = self._layers("window.layers", self.window.layers, everywhere)
            object.__setattr__(self, "window", replace(self.window, layers=layers))
        attention = self._layers(
            "attention_layers", self.attention_layers, everywhere if self.heads else ()
        )
        object.__setattr__(self, "attention_layers", attention)
        if attention and not self.heads:
            raise ValueError("heads is 0, and attention_layers names some; give heads or no layers")
        if self.window and not {*attention} & {*(self.window.layers or ())}:
            raise ValueError("window has no layer with attention; give window=None")
        sparse = self.expert_layers if not (self.experts and self.experts.beside_mlp) else ()
        dense = tuple(i for i in everywhere if i not in sparse)
        object.__setattr__(self, "mlp_layers", self._layers("mlp_layers", self.mlp_layers, dense))
        for mixer in self.mixers:
            self._layers(f"layers of {mixer.name}", mixer.layers, ())

    def _record(self, name: str, record: type, listed: bool) -> None:
        value = getattr(self, name)
        entries = value if listed else (value,) if value is not None else ()
        if not isinstance(entries, tuple) or not all(isinstance(x, record) for x in entries):
            kind = f"a tuple of {record.__name__}" if listed else f"{record.__name__}(...) or None"
            raise TypeError(f"{name} is {value!r}; it must be {kind}")

    def _fill(self, name: str, value: object) -> None:
        if not getattr(self, name):
            object.__setattr__(self, name, value)

    def _layers(
        self, name: str, layers: Iterable[int] | None, default: tuple[int, ...]
    ) -> tuple[int, ...]:
        return default if layers is None else checks.layers(name, layers, self.layers)

    @cached_property
    def expert_layers(self) -> frozenset[int]:
        """The layers whose MLP is a mixture of experts."""
        return frozenset(self.experts.layers or () if self.experts else ())

    @cached_property
    def windowed_layers(self) -> frozenset[int]:
        """The layers whose attention sees a window only."""
        layers = self.window.layers or () if self.window else ()
        return frozenset(layers) & frozenset(self.attention_layers or ())

    def source_tokens(self, given: int | None, seq: int) -> int:
        """What an encoder sees: what is given, else its table of positions, else `seq`."""
        if self.encoder:
            seen = (self.encoder.positions or seq) if given is None else given
            return checks.whole("encoder_seq", seen)
        if given is not None:
            raise ValueError(f"encoder_seq is {given}; {self.name} has no encoder")
        return 0

    @property
    def qk_dim(self) -> int:
        """Width of one query or key inside the attention."""
        return self.head_dim + (self.mla.rope_head_dim if self.mla else 0)

    @property
    def mlp_matrices(self) -> int:
        """Three with a gate, two without."""
        return 3 if self.gated_mlp else 2

    @property
    def norm_vectors(self) -> int:
        """Weight, and bias where there is one."""
        return {"rmsnorm": 1, "layernorm": 1 + self.norm_bias, "none": 0}[self.norm]


_CHOICES: dict[str, tuple[object, ...]] = {
    "norm": ("rmsnorm", "layernorm", "none"),
    "activation": ("silu", "gelu", "relu"),
    "qk_norm": (False, True, "head", "heads", "all"),
}
_RECORDS: dict[str, tuple[type, bool]] = {
    "mla": (MLA, False),
    "experts": (Experts, False),
    "window": (Window, False),
    "mixers": (Mixer, True),
    "encoder": (Shape, False),
    "extra": (Matrix, True),
}

"""The shape of a decoder-only transformer: every size that its cost depends on, and nothing else.

Notable: attention with grouped queries or with a compressed latent (MLA), explicit head dimensions,
mixtures of experts in some layers and not in others, windows in some layers and not in others,
biases and norms counted one by one. The defaults describe a Llama-like model: RMSNorm, rotary
positions, three MLP matrices, no biases and a head of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting import checks

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer by its sizes; raises `ValueError` for sizes that cannot be."""

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
    norms_per_layer: int = 2
    parallel_block: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX, Phi, PaLM)."""
    final_norm: bool = True
    qk_norm: bool = False
    """A norm over the head dimension of queries and keys."""
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

    q_lora_rank: int = 0
    """With MLA, the width that queries are compressed to; 0: they are not."""
    kv_lora_rank: int = 0
    """Width of the latent that stands for keys and values: this makes the attention MLA."""
    rope_head_dim: int = 0
    """With MLA, the part of a query and of the one shared key that carries the position."""

    experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    """Width of one expert; `d_ff` if not given."""
    d_shared: int = 0
    """Width of the expert that every token visits: all shared experts together."""
    shared_gate: bool = False
    """A gate in front of the shared expert (Qwen2-MoE)."""
    router_bias: bool = False
    moe_layers: tuple[int, ...] | None = None
    """Which layers hold experts: all of them if `experts` is set and this is not."""

    window: int = 0
    """Keys that a token of a windowed layer sees, itself among them."""
    window_layers: tuple[int, ...] | None = None
    """Which layers are windowed: all of them if `window` is set and this is not."""
    name: str = "transformer"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), least=least))
        for name in _FLAGS:
            checks.flag(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            checks.choice(name, getattr(self, name), allowed)
        if self.heads and not self.head_dim and self.d_model % self.heads:
            raise ValueError(
                f"heads is {self.heads}, which does not divide d_model={self.d_model}; "
                "give head_dim if the heads are meant to have a width of their own"
            )
        self._fill("head_dim", self.d_model // self.heads if self.heads else 0)
        self._fill("v_head_dim", self.head_dim)
        self._fill("kv_heads", self.heads)
        self._fill("d_ff", 4 * self.d_model)
        self._fill("d_expert", self.d_ff)
        self._fill("embedding_dim", self.d_model)
        if self.heads and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which does not divide heads={self.heads}; "
                "each key and value head must serve the same number of query heads"
            )
        if self.kv_lora_rank and not self.rope_head_dim:
            raise ValueError("kv_lora_rank is set (MLA), so rope_head_dim must be set as well")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; "
                f"it must lie between 1 and experts={self.experts}"
            )
        self._fill_layers("moe_layers", needs="experts")
        self._fill_layers("window_layers", needs="window")

    def _fill(self, name: str, value: object) -> None:
        if not getattr(self, name):
            object.__setattr__(self, name, value)

    def _fill_layers(self, name: str, *, needs: str) -> None:
        layers = getattr(self, name)
        if layers is None:
            layers = range(self.layers) if getattr(self, needs) else ()
        if layers and not getattr(self, needs):
            raise ValueError(f"{name} is set, so {needs} must be set as well")
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"{name} is {layers!r}; it must list layers, from 0 on")
        for layer in layers:
            checks.whole(name, layer, least=0)
            if not 0 <= layer < self.layers:
                raise ValueError(f"{name} names layer {layer}; there are {self.layers}, from 0 on")
        object.__setattr__(self, name, tuple(sorted(set(layers))))

    @cached_property
    def expert_layers(self) -> frozenset[int]:
        """The layers whose MLP is a mixture of experts."""
        return frozenset(self.moe_layers or ())

    @cached_property
    def windowed_layers(self) -> frozenset[int]:
        """The layers whose attention sees a window only."""
        return frozenset(self.window_layers or ())

    @property
    def mla(self) -> bool:
        """Keys and values live in a latent."""
        return self.kv_lora_rank > 0

    @property
    def qk_dim(self) -> int:
        """Width of one query or key inside the attention."""
        return self.head_dim + (self.rope_head_dim if self.mla else 0)

    @property
    def mlp_matrices(self) -> int:
        """Three with a gate, two without."""
        return 3 if self.gated_mlp else 2

    @classmethod
    def from_hf(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Transformer:
        """Read a Hugging Face `config.json`: its path, the folder it is in, or its content.

        Raises `ValueError` naming the field that is missing or the family that is not known.
        """
        from accounting.huggingface import transformer_arguments

        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not JSON ({error}); give a config.json") from None
        if not isinstance(config, Mapping):
            raise ValueError(f"a model config is a JSON object, not {type(config).__name__}")
        return cls(**transformer_arguments(config))

    @classmethod
    def from_module(cls, module: nn.Module, *, heads: int | None = None) -> Transformer:
        """Read the shape off an `nn.Module`, and accept it only if every parameter is explained.

        `heads` is needed where no submodule has an attribute that says it (`num_heads`, `n_head`,
        ...).
        """
        from accounting.module import transformer_from_module

        return transformer_from_module(module, heads=heads)


_LEAST = {
    **dict.fromkeys(("layers", "d_model"), 1),
    **dict.fromkeys(("heads", "vocab_size", "d_ff", "kv_heads", "head_dim", "v_head_dim"), 0),
    **dict.fromkeys(("norms_per_layer", "positions", "embedding_dim", "window"), 0),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rope_head_dim"), 0),
    **dict.fromkeys(("experts", "experts_per_token", "d_expert", "d_shared"), 0),
}
_FLAGS = (
    *("gated_mlp", "parallel_block", "final_norm", "qk_norm", "tied", "qkv_bias", "out_bias"),
    *("mlp_bias", "head_bias", "sinks", "shared_gate", "router_bias"),
)
_CHOICES = {
    "norm": ("rmsnorm", "layernorm", "none"),
    "activation": ("silu", "gelu", "relu"),
}

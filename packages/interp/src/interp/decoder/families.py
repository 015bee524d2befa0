"""The properties of each family that its Hugging Face configuration does not name or may omit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties that all models of a family share, and defaults of options in configurations."""

    #: True for layer norm, False for RMS norm.
    centered: bool = False
    #: True if norms have no weights.
    bare_norms: bool = False
    #: True if the MLP is parallel to the attention by default.
    parallel: bool = False
    #: The name of the option that overrides `parallel`, or None.
    parallel_option: str | None = None
    #: True if queries and keys are rotated by position.
    rotary: bool = True
    #: The base of the rotary angles if the configuration does not name one.
    default_theta: float = 1e4
    #: The default rotary base of layers with a sliding window, or None if all layers have one base.
    local_theta: float | None = None
    #: The default fraction of rotated dimensions per head. If None, a fraction in the configuration
    #: is ignored, and in latent attention it must be 1.
    rotary_fraction: float | None = None
    #: True if rotated pairs are (2i, 2i + 1); False if they are (i, i + n / 2).
    interleaved: bool = False
    #: True if scores have a linear position bias (ALiBi).
    alibi: bool = False
    #: True if default positions do not count padding.
    positions_skip_padding: bool = False
    #: True if layers may have sliding windows.
    windowed: bool = False
    #: The default activation, or None if the configuration must name it.
    activation: str | None = None
    #: An activation that overrides the configuration, or None.
    fixed_activation: str | None = None
    #: True for the latent attention and the routing of DeepSeek.
    latent: bool = False
    #: The default of `tie_word_embeddings`: True if the unembedding is the embedding.
    tied: bool = False
    #: The epsilon of norms if the configuration does not name one.
    eps: float = 1e-5
    #: Options that transformers fills in if a configuration omits them.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_WINDOW = {"sliding_window": 4096}
_GEMMA_WINDOW = _WINDOW | {"head_dim": 256}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_GPT_OSS = {
    "sliding_window": 128, "head_dim": 64, "num_experts_per_tok": 4,
    "rope_scaling": _YARN_OF_GPT_OSS,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(tied=True, centered=True, rotary=False),
    "llama": Family(eps=1e-6),
    "mistral": Family(windowed=True, eps=1e-6, defaults=_WINDOW),
    "mixtral": Family(windowed=True, default_theta=1e6, defaults={"num_experts_per_tok": 2}),
    "qwen2": Family(windowed=True, eps=1e-6),
    "qwen3": Family(windowed=True, eps=1e-6, defaults={"head_dim": 128}),
    "qwen3_moe": Family(windowed=True, eps=1e-6, defaults={"num_experts_per_tok": 8}),
    "gemma": Family(tied=True, eps=1e-6, defaults={"head_dim": 256}),
    "gemma2": Family(tied=True, windowed=True, eps=1e-6, defaults=_GEMMA_WINDOW | _GEMMA2_CAPS),
    "gemma3_text": Family(tied=True, windowed=True, default_theta=1e6, local_theta=1e4, eps=1e-6,
                          defaults=_GEMMA_WINDOW),
    "phi": Family(centered=True, parallel=True, rotary_fraction=0.5),
    "phi3": Family(windowed=True, rotary_fraction=1.0),
    "gpt_neox": Family(centered=True, parallel=True, parallel_option="use_parallel_residual",
                       rotary_fraction=0.25),
    "gptj": Family(centered=True, parallel=True, interleaved=True, defaults={"rotary_dim": 64}),
    "olmo": Family(centered=True, bare_norms=True),
    "olmo2": Family(),
    "olmo3": Family(windowed=True, default_theta=5e5, defaults=_WINDOW),
    "stablelm": Family(centered=True, parallel_option="use_parallel_residual",
                       rotary_fraction=0.25),
    "starcoder2": Family(tied=True, centered=True, windowed=True),
    "cohere": Family(tied=True, centered=True, parallel=True, interleaved=True, default_theta=5e5),
    "cohere2": Family(tied=True, centered=True, parallel=True, interleaved=True, windowed=True,
                      defaults=_WINDOW),
    "granite": Family(eps=1e-6),
    "opt": Family(tied=True, centered=True, rotary=False, positions_skip_padding=True),
    "bloom": Family(tied=True, centered=True, rotary=False, alibi=True,
                    positions_skip_padding=True, activation="gelu_new"),
    "falcon": Family(tied=True, centered=True, parallel=True, parallel_option="parallel_attn"),
    "gpt_oss": Family(windowed=True, default_theta=1.5e5, fixed_activation="quick_gelu",
                      defaults=_GPT_OSS),
    "deepseek_v2": Family(latent=True, interleaved=True, eps=1e-6),
    "deepseek_v3": Family(latent=True, interleaved=True, eps=1e-6, defaults=_DEEPSEEK_V3),
}  # fmt: skip

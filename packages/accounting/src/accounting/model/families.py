"""Hugging Face configurations: one function a family, from `config.json` to the sizes of a
`Transformer`.

A size that the family's published files always give is required; one that they may leave out takes
the default of the family's configuration class in transformers. The counts that result are tested
against the modules that transformers builds from the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = dict[str, Any]


def transformer_arguments(config: Mapping[str, Any]) -> Arguments:
    """The keyword arguments of the `Transformer` that this configuration describes."""
    family = config.get("model_type")
    if family == "gemma3" and "text_config" in config:
        # A vision model's file: the language model inside it is what is described.
        return transformer_arguments({"model_type": "gemma3_text"} | dict(config["text_config"]))
    if family is None:
        raise ValueError(
            "model_type is missing: this is not a model's config.json; it must be one of "
            + ", ".join(FAMILIES)
        )
    if family not in FAMILIES:
        raise ValueError(
            f"model_type is {family!r}, a family not known here; known are {', '.join(FAMILIES)}; "
            "any other can be described with Transformer(layers=..., d_model=..., ...)"
        )
    arguments = FAMILIES[family](_Config(config, family))
    return {"name": config.get("_name_or_path") or family, **arguments}


class _Config:
    """A configuration that names the field it lacks."""

    def __init__(self, content: Mapping[str, Any], family: str) -> None:
        self.content, self.family = content, family

    def __getitem__(self, field: str) -> Any:
        if self.content.get(field) is None:
            raise ValueError(f"{field} is missing from this {self.family} config.json")
        return self.content[field]

    def get(self, field: str, default: Any = None) -> Any:
        value = self.content.get(field)
        return default if value is None else value


def _llama(config: _Config, *, heads: int = 0, kv_heads: int = 0, tied: bool = False) -> Arguments:
    """What the Llama-like families share."""
    heads = config.get("num_attention_heads", heads) or config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", kv_heads),
        "head_dim": config.get("head_dim", 0),
        "d_ff": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", tied),
        "activation": _activation(config.get("hidden_act", "silu")),
    }


def _plain_llama(config: _Config) -> Arguments:
    bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    return _llama(config) | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": mlp_bias}


def _mistral(config: _Config) -> Arguments:
    # The class has a window by default; published files switch it off with an explicit null.
    window = config.content.get("sliding_window", 4096)
    return _llama(config, kv_heads=8) | {"window": window or 0}


def _mixtral(config: _Config) -> Arguments:
    return _llama(config, kv_heads=8) | {
        "experts": config.get("num_local_experts", 8),
        "experts_per_token": config.get("num_experts_per_tok", 2),
        "window": config.get("sliding_window", 0),
    }


def _phi3(config: _Config) -> Arguments:
    return _llama(config) | {"window": config.get("sliding_window", 0)}


def _qwen2(config: _Config) -> Arguments:
    return _llama(config) | _qwen_windows(config) | {"qkv_bias": True}


def _qwen2_moe(config: _Config) -> Arguments:
    return (
        _qwen2(config)
        | _qwen_experts(config)
        | {
            "qkv_bias": config.get("qkv_bias", True),
            "d_shared": config["shared_expert_intermediate_size"],
            "shared_gate": True,
        }
    )


def _qwen3(config: _Config) -> Arguments:
    bias = config.get("attention_bias", False)
    own = {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}
    return _llama(config) | _qwen_windows(config) | own | {"head_dim": config.get("head_dim", 128)}


def _qwen3_moe(config: _Config) -> Arguments:
    # Here the class derives head_dim from the width, unlike its dense sibling.
    own = {"head_dim": config.get("head_dim", 0)}
    if config.get("use_sliding_window", False):
        own |= {"window": config.get("sliding_window", 4096), "window_layers": None}
    return _qwen3(config) | _qwen_experts(config) | own


def _qwen_experts(config: _Config) -> Arguments:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = config["num_hidden_layers"]
    return {
        # Older files have the first name, newer ones the second.
        "experts": config.get("num_local_experts") or config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "d_expert": config["moe_intermediate_size"],
        "moe_layers": tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    }


def _qwen_windows(config: _Config) -> Arguments:
    if not config.get("use_sliding_window", False):
        return {}
    first = config.get("max_window_layers", 28)
    return _windows(config, 4096, lambda layer: layer >= first)


def _gemma2(config: _Config) -> Arguments:
    return _gemma(config) | _windows(config, 4096, lambda layer: layer % 2 == 0)


def _gemma3(config: _Config) -> Arguments:
    pattern = config.get("sliding_window_pattern", 6)
    sizes = {"vocab_size": 262_208} | dict(config.content)
    own = _Config(sizes, config.family)
    windows = _windows(own, 4096, lambda layer: (layer + 1) % pattern != 0)
    return _gemma(own) | windows | {"qk_norm": True}


def _gemma(config: _Config) -> Arguments:
    bias = config.get("attention_bias", False)
    return _llama(config, heads=8, kv_heads=4, tied=True) | {
        "head_dim": config.get("head_dim", 256),
        "norms_per_layer": 4,
        "activation": "gelu",
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _deepseek(config: _Config) -> Arguments:
    dense = config.get("first_k_dense_replace", 3 if config.family == "deepseek_v3" else 0)
    bias = config.get("attention_bias", False)
    return _llama(config) | {
        "kv_heads": 0,
        "head_dim": config["qk_nope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_head_dim": config["qk_rope_head_dim"],
        "kv_lora_rank": config["kv_lora_rank"],
        # An explicit null means that queries are not compressed (V2-Lite).
        "q_lora_rank": config.content.get("q_lora_rank", 1536) or 0,
        "qkv_bias": bias,
        "out_bias": bias,
        "experts": config["n_routed_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "d_expert": config["moe_intermediate_size"],
        "d_shared": config["n_shared_experts"] * config["moe_intermediate_size"],
        "moe_layers": tuple(range(dense, config["num_hidden_layers"])),
    }


def _gpt_oss(config: _Config) -> Arguments:
    bias = config.get("attention_bias", True)
    return (
        _llama(config, kv_heads=8)
        | _windows(config, 128, lambda layer: layer % 2 == 0)
        | {
            "head_dim": config.get("head_dim", 64),
            "qkv_bias": bias,
            "out_bias": bias,
            "sinks": True,
            "experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "router_bias": True,
            "mlp_bias": True,
        }
    )


def _gpt2(config: _Config) -> Arguments:
    return _GELU_MLP | {
        "layers": config["n_layer"],
        "d_model": config["n_embd"],
        "heads": config["n_head"],
        "d_ff": config.get("n_inner", 0),
        "vocab_size": config["vocab_size"],
        "positions": config["n_positions"],
        "tied": config.get("tie_word_embeddings", True),
        "activation": _activation(config.get("activation_function", "gelu_new")),
    }


def _gpt_neox(config: _Config) -> Arguments:
    bias = config.get("attention_bias", True)
    own = {"qkv_bias": bias, "out_bias": bias, "kv_heads": 0, "head_dim": 0}
    parallel = {"parallel_block": config.get("use_parallel_residual", True)}
    return _llama(config) | _GELU_MLP | own | parallel


def _phi(config: _Config) -> Arguments:
    return (
        _llama(config)
        | _GELU_MLP
        | {
            "norms_per_layer": 1,
            "parallel_block": True,
            "head_bias": True,
            "qk_norm": config.get("qk_layernorm", False),
            "head_dim": 0,
        }
    )


def _opt(config: _Config) -> Arguments:
    bias = config.get("enable_bias", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    before = config.get("do_layer_norm_before", True)
    return _GELU_MLP | {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "d_ff": config["ffn_dim"],
        "vocab_size": config["vocab_size"],
        # Two rows more than positions: the table is read from index 2 on.
        "positions": config["max_position_embeddings"] + 2,
        "embedding_dim": config.get("word_embed_proj_dim", 0),
        "tied": config.get("tie_word_embeddings", True),
        "activation": _activation(config.get("activation_function", "relu")),
        "norm": "layernorm" if affine else "none",
        "final_norm": before and not config.get("_remove_final_layer_norm", False),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }


_GELU_MLP: Arguments = {
    "gated_mlp": False,
    "activation": "gelu",
    "norm": "layernorm",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def _windows(config: _Config, default: int, is_windowed: Callable[[int], bool]) -> Arguments:
    """Which layers see a window: `layer_types` where the file has it, else the family's pattern."""
    window = config.content.get("sliding_window", default)
    if not window:
        return {}
    types: Sequence[str] | None = config.get("layer_types")
    layers = range(config["num_hidden_layers"])
    if types is not None:
        if len(types) != len(layers):
            raise ValueError(f"layer_types has {len(types)} entries for {len(layers)} layers")
        chosen = tuple(i for i in layers if types[i] == "sliding_attention")
    else:
        chosen = tuple(i for i in layers if is_windowed(i))
    return {"window": window, "window_layers": chosen} if chosen else {}


def _activation(name: str) -> str:
    for known in ("silu", "gelu", "relu"):
        if name.startswith(known):
            return known
    if name == "swish":
        return "silu"
    raise ValueError(f"hidden_act is {name!r}; known are silu, gelu and relu in their variants")


FAMILIES: dict[str, Callable[[_Config], Arguments]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "llama": _plain_llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}

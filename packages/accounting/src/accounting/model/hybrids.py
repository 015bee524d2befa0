"""Families with recurrent layers: state spaces, gated delta rules, linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accounting.model import mixers
from accounting.model.config import Arguments, Config, activation
from accounting.model.families import gemma, llama, qwen_experts
from accounting.model.records import Experts, Mixer, Window

_ATTENTION = ("attention", "full_attention", "*")


def _kinds(config: Config, pattern: Callable[[int], bool]) -> tuple[tuple[int, ...], ...]:
    """The layers with attention, and the others: `layer_types`, or the family's pattern."""
    layers = range(config["num_hidden_layers"])
    types = config.get("layer_types") or config.get("layers_block_type")
    found = tuple(i for i in layers if (types[i] in _ATTENTION if types else pattern(i)))
    return found, tuple(i for i in layers if i not in found)


def _mamba_only(config: Config) -> Arguments:
    layers, d = tuple(range(config["num_hidden_layers"])), config["hidden_size"]
    conv = {"conv": config.get("conv_kernel", 4), "conv_bias": config.get("use_conv_bias", True)}
    sizes: dict[str, Any] = conv | {"bias": config.get("use_bias", False)}
    inner = config.get("expand", 2) * d
    if config.family == "mamba2":
        heads = config.get("num_heads", 128)
        sizes |= {"state": config.get("state_size", 128), "groups": config.get("n_groups", 8)}
        mixer = mixers.mamba2(layers, d, inner=inner, heads=heads, **sizes)
    else:
        rank = config.get("time_step_rank", "auto")
        rank = math.ceil(d / 16) if rank == "auto" else rank
        inner = config.get("intermediate_size", inner)
        sizes |= {"state": config.get("state_size", 16), "rank": rank}
        mixer = mixers.mamba(layers, d, inner=inner, **sizes)
    return {
        "layers": len(layers),
        "d_model": d,
        "heads": 0,
        "vocab_size": config["vocab_size"],
        "norms_per_layer": 1,
        "mlp_layers": (),
        "tied": config.get("tie_word_embeddings", config.family != "mamba2"),
        "mixers": (mixer,),
    }


def _jamba(config: Config) -> Arguments:
    base, d = llama(config, num_key_value_heads=8), config["hidden_size"]
    period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
    attention, others = _kinds(config, lambda i: i % period == offset)
    rank = config.get("mamba_dt_rank", "auto")
    mixer = mixers.mamba(
        others,
        d,
        inner=config.get("mamba_expand", 2) * d,
        state=config.get("mamba_d_state", 16),
        conv=config.get("mamba_d_conv", 4),
        rank=math.ceil(d / 16) if rank == "auto" else rank,
        conv_bias=config.get("mamba_conv_bias", True),
        bias=config.get("mamba_proj_bias", False),
        inner_norms=True,
    )
    every, first = config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    count = config.get("num_experts", 16)
    sparse = tuple(i for i in range(base["layers"]) if i % every == first and count > 1)
    experts = None
    if sparse:
        chosen = config.get("num_experts_per_tok", 2)
        experts = Experts(count=count, per_token=chosen, layers=sparse)
    return base | {"attention_layers": attention, "mixers": (mixer,), "experts": experts}


def _state_space(config: Config, layers: tuple[int, ...], **own: Any) -> Mixer:
    """Mamba-2 under the names that Bamba gave its sizes."""
    d = config["hidden_size"]
    sizes: dict[str, Any] = {
        "inner": config.get("mamba_expand", 2) * d,
        "state": config.get("mamba_d_state", 256),
        "heads": config.get("mamba_n_heads", 128),
        "groups": config.get("mamba_n_groups", 1),
        "conv": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "bias": config.get("mamba_proj_bias", False),
    }
    return mixers.mamba2(layers, d, **sizes | own)


def _bamba(config: Config) -> Arguments:
    chosen = config.get("attn_layer_indices") or ()
    attention, others = _kinds(config, lambda i: i in chosen)
    base = llama(config, num_key_value_heads=8)
    return base | {"attention_layers": attention, "mixers": (_state_space(config, others),)}


def _granite_hybrid(config: Config) -> Arguments:
    attention, others = _kinds(config, lambda i: False)
    base, shared = llama(config), config.get("shared_intermediate_size", 1024)
    count = config.get("num_local_experts", 8)
    mixer = (_state_space(config, others),) if others else ()
    base |= {"attention_layers": attention, "mixers": mixer}
    if not count:
        return base | {"d_ff": shared}
    chosen = config.get("num_experts_per_tok", 2)
    return base | {"experts": Experts(count=count, per_token=chosen, shared=shared)}


def _falcon_h1(config: Config) -> Arguments:
    base = llama(config, num_key_value_heads=8)
    everywhere = tuple(range(base["layers"]))
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * base["d_model"]
    mixer = _state_space(
        config,
        everywhere,
        inner=inner,
        norm=config.get("mamba_rms_norm", False),
        out_bias=config.get("projectors_bias", False),
    )
    # Attention and the state space read the same input side by side.
    return base | {"mixers": (mixer,)}


_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba"}


def _nemotron_h(config: Config) -> Arguments:
    types = config.get("layers_block_type") or list(config["hybrid_override_pattern"])
    kinds = [_BLOCKS.get(kind, kind) for kind in types]
    kinds = ["attention" if kind == "full_attention" else kind for kind in kinds]

    def where(kind: str) -> tuple[int, ...]:
        return tuple(i for i, found in enumerate(kinds) if found == kind)

    sized = Config(dict(config.content) | {"num_hidden_layers": len(kinds)}, config.family)
    base = llama(sized, num_key_value_heads=8, head_dim=128)
    base["activation"] = activation(config.get("mlp_hidden_act", "relu2"))
    heads = config.get("mamba_num_heads", 128)
    arguments: Arguments = {
        "gated_mlp": False,
        "norms_per_layer": 1,
        # The class has these switches and does not look at them.
        "tied": False,
        "qkv_bias": False,
        "out_bias": False,
        "attention_layers": where("attention"),
        "mlp_layers": where("mlp"),
    }
    if where("mamba"):
        mixer = mixers.mamba2(
            where("mamba"),
            base["d_model"],
            inner=heads * config.get("mamba_head_dim", 64),
            state=config.get("ssm_state_size", 128),
            heads=heads,
            groups=config.get("n_groups", 8),
            conv=config.get("conv_kernel", 4),
            conv_bias=config.get("use_conv_bias", True),
            bias=config.get("use_bias", False),
        )
        arguments["mixers"] = (mixer,)
    if where("moe"):
        if config.get("moe_latent_size"):
            raise ValueError("moe_latent_size is set; experts in a latent are not described")
        shared = config.get("moe_shared_expert_intermediate_size", 0)
        arguments["experts"] = Experts(
            count=config["n_routed_experts"],
            per_token=config["num_experts_per_tok"],
            width=config["moe_intermediate_size"],
            shared=shared,
            bias=False,
            layers=where("moe"),
        )
    return base | arguments


def _recurrent_gemma(config: Config) -> Arguments:
    layers, pattern = config["num_hidden_layers"], config.get("block_types")
    pattern = pattern or ["recurrent", "recurrent", "attention"]
    kinds = [pattern[i % len(pattern)] for i in range(layers)]
    attention = tuple(i for i, kind in enumerate(kinds) if kind == "attention")
    others = tuple(i for i, kind in enumerate(kinds) if kind != "attention")
    base = gemma(config, norms=2, heads=10, kv=config.get("num_attention_heads", 10))
    width = config.get("lru_width", base["d_model"])
    mixer = mixers.recurrent_gate(
        others,
        base["d_model"],
        width=width,
        heads=base["heads"],
        conv=config.get("conv1d_width", 4),
    )
    return base | {
        # The file gives the two halves of the gated MLP together.
        "d_ff": base["d_ff"] // 2,
        "head_dim": config.get("head_dim", 0),
        "out_bias": True,
        "mlp_bias": True,
        "attention_layers": attention,
        "window": Window(size=config.get("attention_window_size", 2048), layers=attention),
        "mixers": (mixer,),
    }


def _lfm2(config: Config) -> Arguments:
    chosen = config.get("full_attn_idxs") or range(config["num_hidden_layers"])
    attention, others = _kinds(config, lambda i: i in chosen)
    base = llama(config, num_key_value_heads=8, tie_word_embeddings=True)
    if "block_ff_dim" in config.content:
        base["d_ff"] = config["block_ff_dim"]
    if config.family == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        of = config.get("block_multiple_of", 256)
        width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * base["d_ff"] / 3))
        base["d_ff"] = of * ((width + of - 1) // of)
    mixer = mixers.short_convolution(
        others,
        base["d_model"],
        conv=config.get("conv_L_cache", 3),
        bias=config.get("conv_bias", False),
    )
    arguments: Arguments = {"attention_layers": attention, "qk_norm": True}
    arguments["mixers"] = (mixer,) if others else ()
    first = config.get("num_dense_layers", 2)
    if config.family == "lfm2_moe" and first < base["layers"]:
        arguments["experts"] = Experts(
            count=config["num_experts"],
            per_token=config["num_experts_per_tok"],
            width=config["moe_intermediate_size"],
            layers=tuple(range(first, base["layers"])),
        )
    return base | arguments


def _minimax(config: Config) -> Arguments:
    attention, others = _kinds(config, lambda i: i % 2 == 0)
    base = llama(config, num_key_value_heads=8)
    heads = base["heads"]
    width = base["head_dim"] or base["d_model"] // heads
    mixer = mixers.lightning(others, base["d_model"], heads=heads, head_dim=width)
    experts = Experts(
        count=config.get("num_local_experts", 8), per_token=config.get("num_experts_per_tok", 2)
    )
    return base | {"attention_layers": attention, "mixers": (mixer,), "experts": experts}


def _qwen3_next(config: Config) -> Arguments:
    every = config.get("full_attention_interval", 4)
    attention, others = _kinds(config, lambda i: (i + 1) % every == 0)
    moe = config.family in ("qwen3_next", "qwen3_5_moe_text")
    # The mixture's files have no dense layer, and need not give its width.
    content = ({"intermediate_size": 5632} if moe else {}) | dict(config.content)
    base = llama(Config(content, config.family), num_key_value_heads=2, head_dim=256)
    mixer = mixers.gated_delta(
        others,
        base["d_model"],
        key_heads=config.get("linear_num_key_heads", 16),
        value_heads=config.get("linear_num_value_heads", 32),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        conv=config.get("linear_conv_kernel_dim", 4),
    )
    arguments: Arguments = {
        "attention_layers": attention,
        "qk_norm": True,
        "output_gate": True,
        "mixers": (mixer,) if others else (),
    }
    if moe:
        shared = config["shared_expert_intermediate_size"]
        arguments |= qwen_experts(config, shared=shared, shared_gate=True)
    return base | arguments


HYBRIDS: dict[str, Callable[[Config], Arguments]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba_only,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _mamba_only,
    "mamba2": _mamba_only,
    "minimax": _minimax,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
    "recurrent_gemma": _recurrent_gemma,
}

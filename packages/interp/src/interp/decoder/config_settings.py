"""Settings of a decoder from its Hugging Face configuration.

A configuration names sizes and options; the table of `families` adds the properties that all models
of a family share. An unsupported option that changes the function raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interp.decoder.families import FAMILIES, Family
from interp.decoder.modules.settings import Settings
from interp.decoder.rotary import Rotary, build_scaled_rotary, compute_yarn_temperature

#: Options that change the function of the model, with their only supported values.
_REQUIRED: Mapping[str, object] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
    "apply_residual_connection_post_layernorm": False,
    "slow_but_exact": False,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "alibi": False,
    "swiglu_alpha": 1.702,
}

#: The names of the epsilon of norms.
_EPS_OPTIONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
#: Options that are supported only if they equal another option. In OPT, embeddings of another size
#: than the hidden size would need a projection. In DeepSeek, head_dim counts rotated dimensions.
_EQUAL: Mapping[str, str] = {"word_embed_proj_dim": "hidden_size", "head_dim": "qk_rope_head_dim"}


def build_settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings that a Hugging Face configuration determines.

    Raises ValueError for families that are not in `FAMILIES`, for unsupported options that change
    the function, and for missing options.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(
            f"model_type {name!r} is not one of {', '.join(FAMILIES)}; describe() also accepts "
            "modules whose configuration does not name a family"
        )
    family = FAMILIES[name]
    config = {**family.defaults, **config}
    _require_supported(config)
    d_model = _find_option(config, "hidden_size", "n_embd")
    heads = _find_option(config, "num_attention_heads", "n_head")
    layers = _find_option(config, "num_hidden_layers", "n_layer")
    d_head = config.get("head_dim") or d_model // heads
    if family.latent:
        d_head = _find_option(config, "qk_nope_head_dim") + _find_option(config, "qk_rope_head_dim")
    kinds = list_layer_types(config, layers)
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return Settings(
        heads=heads,
        d_head=d_head,
        eps=_find_option(config, *_EPS_OPTIONS, default=family.eps),
        centered=family.centered,
        bare_norms=family.bare_norms,
        activation=_find_activation(config, family),
        scale=_compute_score_scale(config, family, d_head),
        rotary=tuple(_build_rotary(config, family, d_head, kind) for kind in kinds),
        interleaved=family.interleaved and config.get("rope_interleave", True) is not False,
        alibi_slopes=_compute_alibi_slopes(heads) if family.alibi else (),
        positions_skip_padding=family.positions_skip_padding,
        windows=tuple(windows),
        parallel=_is_parallel(config, family),
        # Transformers ignores this option of Gemma 3.
        score_cap=config.get("attn_logit_softcapping") if name == "gemma2" else None,
        logit_cap=config.get("final_logit_softcapping"),
        clip=config.get("clip_qkv") if name == "olmo" else None,
        mlp_clip=config.get("swiglu_limit", 7.0) if name == "gpt_oss" else None,
        experts_used=config.get("num_experts_per_tok") or 0,
        experts_sum_to_one=name in ("mixtral", "gpt_oss")
        or (name != "deepseek_v2" and bool(config.get("norm_topk_prob"))),
        **_build_deepseek_routing(config),
    )


def _build_deepseek_routing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeek's routers, or {} for other families."""
    if not FAMILIES[config["model_type"]].latent:
        return {}
    is_grouped = config["model_type"] == "deepseek_v3"
    if not is_grouped:
        method = config.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method = {method!r} is not 'greedy' or 'group_limited_greedy'")
        is_grouped = method == "group_limited_greedy"
    groups = (config.get("n_group") or 1) if is_grouped else 1
    groups_used = (config.get("topk_group") or 1) if is_grouped else 1
    used = _find_option(config, "num_experts_per_tok")
    visible = _find_option(config, "n_routed_experts") // groups * groups_used
    if visible < used:
        raise ValueError(
            f"expected at least num_experts_per_tok = {used} experts in topk_group = {groups_used} "
            f"groups, got {visible}; increase topk_group"
        )
    return {
        "router": "sigmoid" if config["model_type"] == "deepseek_v3" else "softmax",
        "router_in_float32": True,
        "experts_scale": float(config.get("routed_scaling_factor") or 1.0),
        "expert_groups": groups,
        "expert_groups_used": groups_used,
    }


def _require_supported(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of `_REQUIRED` or `_EQUAL` with another value."""
    for key, value in _REQUIRED.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} = {config[key]!r} is not supported, only {value!r} is")
    for key, other in _EQUAL.items():
        values = config.get(key), config.get(other)
        if None not in values and values[0] != values[1]:
            raise ValueError(
                f"{key} = {values[0]!r} is not supported, only {values[1]!r} is, as {other}"
            )


def _find_option(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the first set option of `names`, or `default`; raise ValueError if it is None too."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ValueError(f"expected the configuration to have {' or '.join(names)}, got none")
    return default


def _find_activation(config: Mapping[str, Any], family: Family) -> str:
    if family.fixed_activation is not None:
        return family.fixed_activation
    options = ("hidden_activation", "hidden_act", "activation_function", "activation")
    activation: str = _find_option(config, *options, default=family.activation)
    if config["model_type"] == "gemma" and activation == "gelu":
        # The first checkpoints of Gemma call the tanh approximation "gelu".
        return "gelu_pytorch_tanh"
    return activation


def _compute_score_scale(config: Mapping[str, Any], family: Family, d_head: int) -> float:
    scale: float = d_head**-0.5
    if family.latent:
        rope = _merge_rope_parameters(config, family, "full_attention")
        method = rope.get("rope_type") or rope.get("type") or "default"
        if method != "default" and rope.get("mscale_all_dim"):
            scale *= compute_yarn_temperature(rope["factor"], rope["mscale_all_dim"]) ** 2
    if config["model_type"] in ("gemma2", "gemma3_text"):
        scale = _find_option(config, "query_pre_attn_scalar") ** -0.5
    elif config["model_type"] == "granite":
        scale = _find_option(config, "attention_multiplier")
    return scale


def _is_parallel(config: Mapping[str, Any], family: Family) -> bool:
    if config.get("new_decoder_architecture"):  # Falcon 40B
        return True
    if family.parallel_option is None:
        return family.parallel
    return bool(config.get(family.parallel_option, family.parallel))


def list_layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer, "full_attention" or "sliding_attention"."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    name = config["model_type"]
    window = config.get("sliding_window")
    if window is None or not FAMILIES[name].windowed:
        return ["full_attention"] * layers
    if name.startswith("qwen"):
        is_full = [not _is_windowed_in_qwen(config, i) for i in range(layers)]
    else:
        # The last layer of each period has full attention.
        period = {
            "gemma2": 2,
            "gpt_oss": 2,
            "gemma3_text": config.get("sliding_window_pattern", 6),
            "cohere2": config.get("sliding_window_pattern", 4),
            "olmo3": 4,
        }.get(name)
        is_full = [period is not None and (i + 1) % period == 0 for i in range(layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _is_windowed_in_qwen(config: Mapping[str, Any], layer: int) -> bool:
    """Return True if the layer has a sliding window; Qwen 3 MoE ignores `max_window_layers`."""
    if not config.get("use_sliding_window"):
        return False
    is_after_limit = bool(layer >= config.get("max_window_layers", 28))
    return config["model_type"] == "qwen3_moe" or is_after_limit


def _compute_alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head's position bias; Press et al. 2022, "ALiBi"."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    # The remaining heads use every second slope of a model with 2 * power heads.
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return tuple(slopes)


def _build_rotary(config: Mapping[str, Any], family: Family, d_head: int, kind: str) -> Rotary:
    """Return the rotary positions of one kind of layer, which may be none."""
    if not family.rotary or (config["model_type"] == "cohere2" and kind == "full_attention"):
        return Rotary()
    rope = _merge_rope_parameters(config, family, kind)
    dims = _count_rotated_dims(config, family, d_head, rope)
    max_length = config.get("max_position_embeddings", 0)
    # The original length may also be among the rotary parameters, which have a lower priority.
    name = "original_max_position_embeddings"
    original_length = config.get(name) or rope.get(name) or max_length
    return build_scaled_rotary(rope, dims, original_length, max_length)


def _count_rotated_dims(
    config: Mapping[str, Any], family: Family, d_head: int, rope: Mapping[str, Any]
) -> int:
    """Return the number of dimensions per head that are rotated."""
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if family.rotary_fraction is not None:
        return int(d_head * (fraction or config.get("rotary_pct") or family.rotary_fraction))
    dims: int | None = None
    if family.latent:
        if fraction not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor = {fraction!r} is not supported with latent attention, "
                "only 1 is; qk_rope_head_dim is the number of rotated dimensions"
            )
        dims = config.get("qk_rope_head_dim")
    elif config["model_type"] == "gptj":
        dims = config.get("rotary_dim")
    return dims or d_head


def _merge_rope_parameters(config: Mapping[str, Any], family: Family, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of one kind of layer, with the base as `rope_theta`.

    Newer configurations have `rope_parameters`, possibly one set per kind of layer. Older
    configurations have `rope_theta` and `rope_scaling`.
    """
    rope = dict(config.get("rope_parameters") or {})
    rope = dict(rope.get(kind, rope))
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.default_theta
    is_local = kind == "sliding_attention" and family.local_theta is not None
    if is_local:
        theta = config.get("rope_local_base_freq") or family.local_theta
    # Layers with a window are not scaled in families that have a base for them, and in OLMo 3.
    is_unscaled = is_local or (config["model_type"], kind) == ("olmo3", "sliding_attention")
    if not rope and not is_unscaled:
        rope = dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", theta)
    return rope

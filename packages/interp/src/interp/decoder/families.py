"""Settings of a decoder from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.modules.settings import Settings
from interp.decoder.names import is_norm_role, roles_of
from interp.decoder.rotary import Rotary, alibi_slopes, scaled_rotary, yarn_temperature


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties that all models of a family share and that their configuration does not name."""

    #: Layer norm instead of RMS norm.
    centered: bool = False
    #: Norms without weights.
    bare_norms: bool = False
    #: The default for the MLP in parallel with the attention, and the option that overrides it.
    parallel: bool = False
    parallel_option: str | None = None
    rotary: bool = True
    #: The base of the angles if the configuration does not name one.
    default_theta: float = 1e4
    #: The same for layers with a window, if they have a separate base.
    local_theta: float | None = None
    #: The default fraction of each head that is rotated. With None, the option is ignored.
    rotary_fraction: float | None = None
    #: Rotated pairs are (2i, 2i + 1).
    interleaved: bool = False
    alibi: bool = False
    #: Default positions do not count padding.
    positions_skip_padding: bool = False
    #: Layers may have sliding windows.
    windowed: bool = False
    #: The activation if the configuration does not name one, and one that overrides it.
    activation: str | None = None
    fixed_activation: str | None = None
    #: Latent attention and routing as in DeepSeek.
    latent: bool = False
    #: The epsilon of norms if the configuration does not name one.
    eps: float = 1e-5
    #: Options that transformers fills in if a configuration omits them.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_WINDOW = {"sliding_window": 4096}
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(centered=True, rotary=False),
    "llama": Family(eps=1e-6),
    "mistral": Family(windowed=True, eps=1e-6, defaults=_WINDOW),
    "mixtral": Family(windowed=True, default_theta=1e6, defaults={"num_experts_per_tok": 2}),
    "qwen2": Family(windowed=True, eps=1e-6),
    "qwen2_moe": Family(windowed=True, eps=1e-6, defaults={"num_experts_per_tok": 4}),
    "qwen3": Family(windowed=True, eps=1e-6, defaults={"head_dim": 128}),
    "qwen3_moe": Family(windowed=True, eps=1e-6, defaults={"num_experts_per_tok": 8}),
    "gemma": Family(eps=1e-6, defaults={"head_dim": 256}),
    "gemma2": Family(
        windowed=True,
        eps=1e-6,
        defaults=_WINDOW
        | {"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        windowed=True,
        default_theta=1e6,
        local_theta=1e4,
        eps=1e-6,
        defaults=_WINDOW | {"head_dim": 256},
    ),
    "phi": Family(centered=True, parallel=True, rotary_fraction=0.5),
    "phi3": Family(windowed=True, rotary_fraction=1.0),
    "gpt_neox": Family(
        centered=True, parallel=True, parallel_option="use_parallel_residual", rotary_fraction=0.25
    ),
    "gptj": Family(centered=True, parallel=True, interleaved=True, defaults={"rotary_dim": 64}),
    "olmo": Family(centered=True, bare_norms=True),
    "olmo2": Family(),
    "olmo3": Family(windowed=True, default_theta=5e5, defaults=_WINDOW),
    "stablelm": Family(
        centered=True, parallel_option="use_parallel_residual", rotary_fraction=0.25
    ),
    "starcoder2": Family(centered=True, windowed=True),
    "cohere": Family(centered=True, parallel=True, interleaved=True, default_theta=5e5),
    "cohere2": Family(
        centered=True, parallel=True, interleaved=True, windowed=True, defaults=_WINDOW
    ),
    "granite": Family(eps=1e-6),
    "opt": Family(centered=True, rotary=False, positions_skip_padding=True),
    "bloom": Family(
        centered=True, rotary=False, alibi=True, positions_skip_padding=True, activation="gelu_new"
    ),
    "falcon": Family(centered=True, parallel=True, parallel_option="parallel_attn"),
    "gpt_oss": Family(
        windowed=True,
        default_theta=1.5e5,
        fixed_activation="quick_gelu",
        defaults={
            "sliding_window": 128,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "rope_scaling": _YARN_OF_GPT_OSS,
        },
    ),
    "deepseek_v2": Family(latent=True, interleaved=True, eps=1e-6),
    "deepseek_v3": Family(
        latent=True,
        interleaved=True,
        eps=1e-6,
        defaults={
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
}

#: Options that change the function, with the only value that is supported.
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
    "alibi": False,
    "swiglu_alpha": 1.702,
}

#: Options that are supported if they equal another option: embeddings of OPT without a projection,
#: and rotated dimensions of DeepSeek.
_EQUAL: Mapping[str, str] = {
    "word_embed_proj_dim": "hidden_size",
    "head_dim": "qk_rope_head_dim",
}

#: OPT's table of positions starts with two rows that its padding selects.
_OPT_OFFSET = 2


def settings_from_config(config: Mapping[str, Any]) -> Settings:
    """Return the settings that a Hugging Face configuration determines.

    Raises ValueError for other families and for options that change the function and are not
    supported.
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
    d_model = _first(config, "hidden_size", "n_embd")
    heads = _first(config, "num_attention_heads", "n_head")
    layers = _first(config, "num_hidden_layers", "n_layer")
    d_head = config.get("head_dim") or d_model // heads
    if family.latent:
        d_head = _first(config, "qk_nope_head_dim") + _first(config, "qk_rope_head_dim")
    kinds = layer_types(config, layers)
    rotary = [_rotary(config, family, d_head, kind) for kind in kinds]
    scales = tuple(angles.scale for angles in rotary)
    is_stretched = any(angles.long_after for angles in rotary)
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return Settings(
        heads=heads,
        d_head=d_head,
        eps=_first(
            config,
            *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
            default=family.eps,
        ),
        centered=family.centered,
        bare_norms=family.bare_norms,
        activation=_activation(config, family),
        scale=_score_scale(config, family, d_head),
        frequencies=tuple(angles.angles for angles in rotary),
        long_frequencies=tuple(angles.long_angles for angles in rotary) if is_stretched else (),
        long_after=max(angles.long_after for angles in rotary),
        rotary_scales=scales if any(scale != 1 for scale in scales) else (),
        interleaved=family.interleaved and config.get("rope_interleave", True) is not False,
        alibi_slopes=alibi_slopes(heads) if family.alibi else (),
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
        **_routing_of_deepseek(config),
    )


def _routing_of_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeek's routers; {} for other families."""
    if not FAMILIES[config["model_type"]].latent:
        return {}
    is_grouped = config["model_type"] == "deepseek_v3"
    if not is_grouped:
        method = config.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method = {method!r} is not 'greedy' or 'group_limited_greedy'")
        is_grouped = method == "group_limited_greedy"
    groups = config.get("n_group") or 1 if is_grouped else 1
    groups_used = config.get("topk_group") or 1 if is_grouped else 1
    used = _first(config, "num_experts_per_tok")
    visible = _first(config, "n_routed_experts") // groups * groups_used
    if visible < used:
        raise ValueError(
            f"expected num_experts_per_tok = {used} experts or more in topk_group = {groups_used} "
            f"groups, got {visible}"
        )
    return {
        "router": "sigmoid" if config["model_type"] == "deepseek_v3" else "softmax",
        "router_in_float32": True,
        "experts_scale": float(config.get("routed_scaling_factor") or 1.0),
        "expert_groups": groups,
        "expert_groups_used": groups_used,
    }


def _require_supported(config: Mapping[str, Any]) -> None:
    for key, value in _REQUIRED.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} = {config[key]!r} is not supported, only {value!r} is")
    for key, other in _EQUAL.items():
        values = config.get(key), config.get(other)
        if None not in values and values[0] != values[1]:
            raise ValueError(
                f"{key} = {values[0]!r} is not supported, only {values[1]!r} is, as {other}"
            )


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the first option of the configuration that is set."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ValueError(f"config.json has no {' or '.join(names)}")
    return default


def _activation(config: Mapping[str, Any], family: Family) -> str:
    if family.fixed_activation is not None:
        return family.fixed_activation
    options = ("hidden_activation", "hidden_act", "activation_function", "activation")
    activation: str = _first(config, *options, default=family.activation)
    if config["model_type"] == "gemma" and activation == "gelu":
        # The first checkpoints of Gemma call the tanh approximation "gelu".
        return "gelu_pytorch_tanh"
    return activation


def _score_scale(config: Mapping[str, Any], family: Family, d_head: int) -> float:
    scale: float = d_head**-0.5
    if family.latent:
        rope = _rope_parameters(config, family, "full_attention")
        method = rope.get("rope_type") or rope.get("type") or "default"
        if method != "default" and rope.get("mscale_all_dim"):
            scale *= yarn_temperature(rope["factor"], rope["mscale_all_dim"]) ** 2
    if config["model_type"] in ("gemma2", "gemma3_text"):
        scale = _first(config, "query_pre_attn_scalar") ** -0.5
    elif config["model_type"] == "granite":
        scale = _first(config, "attention_multiplier")
    return scale


def _is_parallel(config: Mapping[str, Any], family: Family) -> bool:
    if config.get("new_decoder_architecture"):  # Falcon 40B
        return True
    if family.parallel_option is None:
        return family.parallel
    return bool(config.get(family.parallel_option, family.parallel))


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return "full_attention" or "sliding_attention" per layer."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    name, window = config["model_type"], config.get("sliding_window")
    if window is None or not FAMILIES[name].windowed:
        return ["full_attention"] * layers
    if name.startswith("qwen"):
        first_window = layers
        if config.get("use_sliding_window"):
            first_window = config.get("max_window_layers", layers)
        is_full = [i < first_window for i in range(layers)]
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


def _rotary(config: Mapping[str, Any], family: Family, d_head: int, kind: str) -> Rotary:
    """Return the rotary positions of a kind of layer."""
    if not family.rotary or (config["model_type"] == "cohere2" and kind == "full_attention"):
        return Rotary()
    rope = _rope_parameters(config, family, kind)
    dims = _rotated_dims(config, family, d_head, rope)
    max_length = config.get("max_position_embeddings", 0)
    return scaled_rotary(rope, dims, _original_length(config, rope), max_length)


def _rotated_dims(
    config: Mapping[str, Any], family: Family, d_head: int, rope: Mapping[str, Any]
) -> int:
    """Return the number of dimensions per head that are rotated."""
    if family.rotary_fraction is not None:
        fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        fraction = fraction or config.get("rotary_pct") or family.rotary_fraction
        return int(d_head * fraction)
    name = "qk_rope_head_dim" if family.latent else "rotary_dim"
    is_named = family.latent or config["model_type"] == "gptj"
    return (config.get(name) if is_named else None) or d_head


def length_limit(config: Mapping[str, Any]) -> int | None:
    """Return the length beyond which rotary angles depend on earlier calls, or None.

    The "dynamic" method of transformers keeps the angles of the longest text until a short one.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.rotary:
        return None
    rope = _rope_parameters(config, family, "full_attention")
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return int(config["max_position_embeddings"]) if is_dynamic else None


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return the length of the pretraining; that outside of the rotary options has priority."""
    name = "original_max_position_embeddings"
    length: int = config.get(name) or rope.get(name) or config.get("max_position_embeddings", 0)
    return length


def _rope_parameters(config: Mapping[str, Any], family: Family, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layer, from newer or older configurations."""
    rope = dict(config.get("rope_parameters") or {})
    rope = dict(rope.get(kind, rope))
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.default_theta
    is_local = kind == "sliding_attention" and family.local_theta is not None
    if is_local:
        theta = config.get("rope_local_base_freq") or family.local_theta
    # Layers with a window are not scaled in families that have a separate base, and in OLMo 3.
    is_unscaled = is_local or (config["model_type"], kind) == ("olmo3", "sliding_attention")
    if not rope and not is_unscaled:
        rope = dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", theta)
    return rope


@dataclass(frozen=True, eq=False, kw_only=True)
class Constants:
    """Constants that a family applies outside its weights, and that descriptions fold into them."""

    #: Added to the gains of norms (Gemma).
    gain_offset: float = 0.0
    #: The factor of the embedding (Gemma, Granite).
    embed_scale: Tensor | None = None
    #: The factor of outputs that are added to the stream (Granite).
    residual_scale: float = 1.0
    #: The factor of the logits (Cohere, Granite).
    logit_scale: float = 1.0
    #: The number of rows of the position table before position 0 (OPT).
    skipped_positions: int = 0

    def fold_into(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint with the constants folded in."""
        roles = roles_of(tensors)
        folded = dict(tensors)
        for name, role in roles.items():
            folded[name] = self._fold(role, tensors[name])
        is_scaled = self.embed_scale is not None or self.logit_scale != 1
        if is_scaled and "unembed.weight" not in roles.values():
            embed = next(name for name, role in roles.items() if role == "embed.weight")
            folded["lm_head.weight"] = tensors[embed] * self.logit_scale
        return folded

    def _fold(self, role: str, tensor: Tensor) -> Tensor:
        if self.gain_offset and is_norm_role(role):
            return tensor + self.gain_offset
        if self.embed_scale is not None and role == "embed.weight":
            return tensor * self.embed_scale.to(tensor)
        if self.residual_scale != 1 and (".attention.o." in role or ".down." in role):
            return tensor * self.residual_scale
        if self.logit_scale != 1 and role.startswith("unembed."):
            return tensor * self.logit_scale
        if self.skipped_positions and role == "position.weight":
            return tensor[self.skipped_positions :]
        return tensor


def constants_of(model: nn.Module | None, config: Mapping[str, Any]) -> Constants:
    """Return the constants of a model, or of a checkpoint with that configuration."""
    name = str(config.get("model_type"))
    if name.startswith("gemma"):
        # Half precision rounds the buffer, and with it the model's embedding.
        scale = torch.tensor(config["hidden_size"] ** 0.5)
        for buffer_name, buffer in [] if model is None else model.named_buffers():
            if buffer_name.endswith("embed_scale"):
                scale = buffer
        return Constants(gain_offset=1.0, embed_scale=scale)
    if name == "granite":
        return Constants(
            embed_scale=torch.tensor(float(config.get("embedding_multiplier", 1.0))),
            residual_scale=float(config.get("residual_multiplier", 1.0)),
            logit_scale=1 / float(config.get("logits_scaling", 1.0)),
        )
    if name in ("cohere", "cohere2"):
        return Constants(logit_scale=float(config.get("logit_scale", 0.0625)))
    if name == "opt":
        return Constants(skipped_positions=_OPT_OFFSET)
    return Constants()

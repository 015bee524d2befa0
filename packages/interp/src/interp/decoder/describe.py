"""Any decoder as a `Decoder`: from a module in memory, or from a folder of Hugging Face.

    describe(model)         found from the module by structure, sharing its weights
    load_decoder(folder)    config.json and safetensors, without transformers

What weights do not say comes from the configuration or, without one, from attributes and trials.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, Settings
from interp.decoder.names import canonical_weights, features_of_heads, layers_of

FAMILIES = (
    *("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "phi3", "gpt_neox", "olmo2"),
)
# What changes the function and is not read here.
_PLAIN: Mapping[str, object] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
    "clip_qkv": None,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@torch.no_grad()
def describe(model: nn.Module, **settings: Any) -> Decoder:
    """The decoder that `model` is, sharing its weights; fused ones are split, which copies them.

    `settings` are fields of `Settings` that override what was found, and `rope_theta`, the base of
    the rotary angles. Raises ValueError if no description gives the model's logits.
    """
    if isinstance(model, Decoder) and not settings:
        return model
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    theta = settings.pop("rope_theta", None)
    if unknown := settings.keys() - Settings.__dataclass_fields__:
        known = ", ".join(["rope_theta", *Settings.__dataclass_fields__])
        raise ValueError(f"{', '.join(sorted(unknown))}: not among {known}")
    config: Any = getattr(model, "config", None)
    candidates: Iterable[Settings]
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        told = config.to_dict()
        found = settings_from_config(told)
        tensors = _adjusted(tensors, told)
        candidates = [found]
    else:
        candidates = _settings_from_module(model, tensors, theta)
    nearest, best = math.inf, None
    for candidate in candidates:
        chosen = replace(candidate, **settings)
        weights = canonical_weights(tensors, d_head=chosen.d_head, heads=chosen.heads)
        decoder = Decoder(weights, chosen)
        error = _difference(model, decoder)
        if error < nearest:
            nearest, best = error, decoder
        # Two forms of GELU differ by 1e-4 only: go on until the rest is rounding.
        if error <= 0.01 * _tolerance(decoder):
            break
    if best is not None and nearest <= _tolerance(best):
        return best
    raise ValueError(
        f"no description of this {type(model).__name__} gives its logits: the nearest is "
        f"{nearest:.2g} of their size away; give what it does otherwise as settings "
        "(eps=, activation=, rope_theta=, scale=, ...)"
    )


def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    families: Sequence[str] = FAMILIES,
) -> Decoder:
    """Load a decoder from a folder that Hugging Face saved, whole or in shards.

    Raises FileNotFoundError for a missing file, ValueError for another architecture and for tensors
    that are missing, left over or of the wrong shape.
    """
    folder = Path(path)
    _require_file(folder / "config.json")
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in families:
        kind = config.get("model_type")
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(families)}")
    settings = settings_from_config(config)
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for key in opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensors[key] = opened.get_tensor(key).to(dtype)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    if layers_of(tensors) != len(settings.windows):
        held, said = layers_of(tensors), len(settings.windows)
        raise ValueError(f"{folder} holds {held} layers, its config.json says {said}")
    weights = canonical_weights(
        _adjusted(tensors, config), d_head=settings.d_head, heads=settings.heads
    )
    _require_whole_layers(weights, folder)
    if (found := len(weights["embed.weight"])) != config["vocab_size"]:
        said = config["vocab_size"]
        raise ValueError(f"the embedding has {found} tokens, config.json says {said}")
    return Decoder(weights, settings).to(device)


load_gpt2 = partial(load_decoder, families=("gpt2",))


def settings_from_config(config: Mapping[str, Any]) -> Settings:
    """What a Hugging Face configuration says beyond the weights' names and shapes."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model_type {family!r} is not one of {', '.join(FAMILIES)}; describe() takes "
            "a module of your own whose configuration does not name a family"
        )
    for key, value in _PLAIN.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} = {config[key]!r} is not supported, only {value!r} is")

    def first(*names: str) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        raise ValueError(f"config.json says no {' or '.join(names)}")

    d_model, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    layers = first("num_hidden_layers", "n_layer")
    d_head = config.get("head_dim") or d_model // heads
    kinds = _layer_types(config, layers)
    gemma = family in ("gemma2", "gemma3_text")
    activation = first("hidden_activation", "hidden_act", "activation_function")
    if family == "gemma" and activation == "gelu":  # what its first checkpoints say for this one
        activation = "gelu_pytorch_tanh"
    rotated = family != "gpt2"
    return Settings(
        heads=heads,
        d_head=d_head,
        eps=first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        centered=family in ("gpt2", "gpt_neox"),
        activation=activation,
        scale=(first("query_pre_attn_scalar") if gemma else d_head) ** -0.5,
        frequencies=tuple(_angles(config, d_head, k) if rotated else () for k in kinds),
        windows=tuple(
            config["sliding_window"] if k == "sliding_attention" else None for k in kinds
        ),
        parallel=family == "gpt_neox" and config.get("use_parallel_residual", True),
        score_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
        experts_used=config.get("num_experts_per_tok") or 0,
        experts_sum_to_one=family == "mixtral" or bool(config.get("norm_topk_prob")),
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Which layers see a window only; older configurations say it in other ways."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    family, window = config["model_type"], config.get("sliding_window")
    if window is None or family in ("gpt2", "gpt_neox", "olmo2", "gemma", "llama"):
        return ["full_attention"] * layers
    if family.startswith("qwen"):
        start = (
            config.get("max_window_layers", layers) if config.get("use_sliding_window") else layers
        )
        return ["full_attention" if i < start else "sliding_attention" for i in range(layers)]
    every = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}.get(family)
    full = [every is not None and (i + 1) % every == 0 for i in range(layers)]
    return ["full_attention" if f else "sliding_attention" for f in full]


def _angles(config: Mapping[str, Any], d_head: int, kind: str) -> tuple[float, ...]:
    """The angle per position of each rotated pair; Su et al. 2021, and Llama 3's stretching."""
    told = dict(config.get("rope_parameters") or {})
    told = dict(told.get(kind, told))
    if not told:
        local = kind == "sliding_attention" and config.get("rope_local_base_freq")
        told = {} if local else dict(config.get("rope_scaling") or {})
        told["rope_theta"] = local or config.get("rope_theta") or config.get("rotary_emb_base", 1e4)
    share = None
    if config["model_type"] in ("phi3", "gpt_neox"):  # other families turn all, whatever it says
        share = told.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        share = share or config.get("rotary_pct", 0.25 if "neox" in config["model_type"] else None)
    stretch = told.get("rope_type") or told.get("type") or "default"
    angles = rotary_angles(int(d_head * (share or 1)), told["rope_theta"])
    if stretch == "default":
        return angles
    if stretch == "linear":
        return tuple(angle / told["factor"] for angle in angles)
    if stretch == "llama3":
        return tuple(_llama3(angle, told) for angle in angles)
    raise ValueError(f"rope_type {stretch!r} is not one of default, linear, llama3")


def rotary_angles(dims: int, theta: float) -> tuple[float, ...]:
    """theta^(-2i / dims) for the pairs i of `dims` rotated dimensions."""
    # In float32, as every implementation computes them: at position 1,000 the digits count.
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    angles: list[float] = (1.0 / theta**exponents).tolist()
    return tuple(angles)


def _llama3(angle: float, told: Mapping[str, Any]) -> float:
    """Slow angles are divided by the factor, fast ones stay, those between go over smoothly."""
    low, high, factor = told["low_freq_factor"], told["high_freq_factor"], told["factor"]
    turns = told["original_max_position_embeddings"] * angle / (2 * math.pi)
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    stretched: float = (1 - smooth) * angle / factor + smooth * angle
    return stretched


def _adjusted(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gemma's gains are kept less 1, and its embedding grows by sqrt(d_model) on its way in."""
    if not str(config["model_type"]).startswith("gemma"):
        return dict(tensors)
    adjusted = {k: v + 1 if "norm" in k else v for k, v in tensors.items()}
    (embed,) = (k for k in tensors if k.endswith("embed_tokens.weight"))
    adjusted["lm_head.weight"] = tensors.get("lm_head.weight", tensors[embed])
    adjusted[embed] = tensors[embed] * config["hidden_size"] ** 0.5
    return adjusted


def _settings_from_module(
    model: nn.Module, tensors: Mapping[str, Tensor], theta: float | None
) -> Iterable[Settings]:
    """Settings that a module without a configuration may have, the likeliest first."""
    heads = _attribute(model, "num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
    if heads is None:
        name = type(model).__name__
        raise ValueError(f"nothing in this {name} says how many heads; give it num_heads")
    eps = _attribute(model, "eps", "variance_epsilon", "epsilon")
    centered = any("LayerNorm" in type(module).__name__ for module in model.modules())
    d_head, layers = features_of_heads(tensors) // heads, layers_of(tensors)
    some = canonical_weights(tensors, d_head=d_head, heads=heads)
    gated = any(".mlp.gate" in name for name in some)
    likely = ("silu", "gelu", "gelu_new", "relu")
    activations = likely if gated else ("gelu_new", "gelu", "relu", "silu")
    learned = "position.weight" in some
    thetas = [theta] if theta else [None] if learned else [1e4, 5e5, 1e6, None]
    for act, base, small in itertools.product(
        activations, thetas, [1e-5, 1e-6] if eps is None else [eps]
    ):
        yield Settings(
            heads=heads,
            d_head=d_head,
            eps=small,
            centered=centered,
            activation=act,
            scale=d_head**-0.5,
            frequencies=(() if base is None else rotary_angles(d_head, base),) * layers,
            windows=(None,) * layers,
        )


def _attribute(model: nn.Module, *names: str) -> Any:
    for module, name in itertools.product(model.modules(), names):
        if isinstance(value := getattr(module, name, None), int | float):
            return value
    return None


def _difference(model: nn.Module, decoder: Decoder) -> float:
    """How far the logits of a few tokens are apart, relative to their size."""
    vocabulary, device = decoder.embed.num_embeddings, decoder.embed.weight.device
    length = 12 if decoder.position is None else min(12, decoder.position.num_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, length), generator=generator).to(device)
    training = model.training
    try:
        out = model.eval()(tokens)
    finally:
        model.train(training)
    logits = out if isinstance(out, Tensor) else out["logits"] if "logits" in out else out[0]
    ours = decoder(tokens)
    if ours.shape != logits.shape:
        raise ValueError(
            f"the model gives {tuple(logits.shape)} where logits would be {tuple(ours.shape)}; "
            "describe the model that has the unembedding"
        )
    scale = (logits - logits.mean()).abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    errors = (ours - logits).abs().amax(-1) / scale
    # In half precision rounding sends a token to other experts now and then: not most of them.
    rounded = decoder.settings.experts_used and errors.dtype in (torch.bfloat16, torch.float16)
    return float(errors.median() if rounded else errors.max())


def _tolerance(decoder: Decoder) -> float:
    return {torch.float64: 1e-5, torch.float32: 1e-4}.get(decoder.embed.weight.dtype, 0.1)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    for name in names:
        _require_file(folder / name)
    return [folder / name for name in sorted(names)]


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; save the model with save_pretrained()")


def _require_whole_layers(weights: Mapping[str, Tensor], folder: Path) -> None:
    """All layers are built alike: what one has and another lacks is missing, a bias as well."""
    roles: dict[str, set[str]] = {}
    for name in weights:
        if name.startswith("blocks."):
            _, layer, role = name.split(".", 2)
            roles.setdefault(layer, set()).add(role)
    every = set().union(*roles.values())
    for layer, found in roles.items():
        if missing := sorted(every - found):
            lacks = f"{folder}: layer {layer} has no {', '.join(missing)}"
            raise ValueError(f"{lacks}, others have; is a shard missing?")

"""Any decoder as a `Decoder`: from a module in memory, or from a folder of Hugging Face.

    describe(model)         found from the module by structure, sharing its weights
    load_decoder(folder)    config.json and safetensors, without transformers

What weights do not say comes from the configuration or, without one, from attributes and trials.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, Settings
from interp.decoder.names import (
    canonical_parts,
    canonical_weights,
    features_of_heads,
    layers_of,
    roles_of,
)
from interp.decoder.source import Source
from interp.decoder.verify import COPY_BYTES, call, distance, evaluating, matching_settings

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
    """Return the decoder that `model` is, sharing its weights.

    `settings` are fields of `Settings` that override what was found, and `rope_theta`, the base of
    the rotary angles. `context` is the most tokens to verify, and to accept later; by default what
    the model's positions or configuration say, at most 1,024, and less for large models.

    The description is compared with the model under other weights too (see
    `interp.decoder.verify`). Where it has copies of weights, of which the model changes the
    originals later, it raises RuntimeError when it is called.

    Raises ValueError if no description gives the model's logits.
    """
    if isinstance(model, Decoder) and not settings:
        return model
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    theta = settings.pop("rope_theta", None)
    if unknown := settings.keys() - Settings.__dataclass_fields__:
        known = ", ".join(["rope_theta", *Settings.__dataclass_fields__])
        raise ValueError(f"{', '.join(sorted(unknown))}: not among {known}")
    config: dict[str, Any] = {}
    found: Any = getattr(model, "config", None)
    if hasattr(found, "to_dict") and hasattr(found, "model_type"):
        config = found.to_dict()
        candidates = _settings_from_model(model, config)
    else:
        candidates = list(_settings_from_module(model, tensors, theta))
    candidates = [replace(candidate, **settings) for candidate in candidates]

    embed_scale = _embed_scale(model, config)

    def build(weights: Mapping[str, Tensor], chosen: Settings) -> Decoder:
        adjusted = _adjusted(weights, config, embed_scale)
        named = canonical_weights(adjusted, d_head=chosen.d_head, heads=chosen.heads)
        return Decoder(named, chosen)

    chosen = matching_settings(
        model,
        tensors,
        roles_of(tensors),
        candidates,
        build,
        gain_offset=1.0 if _is_gemma(config) else 0.0,
    )
    decoder = build(tensors, chosen)
    with evaluating(model):
        _require_own_logits(model, tensors, partial(build, chosen=chosen), decoder)
    adjusted = _adjusted(tensors, config, embed_scale)
    decoder.source = Source(model, tensors, _copied(tensors, adjusted, chosen))
    return decoder


def _copied(
    tensors: Mapping[str, Tensor], adjusted: Mapping[str, Tensor], chosen: Settings
) -> set[str]:
    """Return the names of the tensors that the decoder does not share in whole."""
    parts = canonical_parts(adjusted, d_head=chosen.d_head, heads=chosen.heads)
    return {
        name
        for name, _, value in parts
        if name in tensors
        and value.untyped_storage().data_ptr() != tensors[name].untyped_storage().data_ptr()
    }


def _require_own_logits(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    build: Callable[[Mapping[str, Tensor]], Decoder],
    decoder: Decoder,
) -> None:
    """Compare under the model's own weights: in float32 if a copy is small, and as they are."""
    length = min(12, decoder.settings.context or 12)
    vocabulary, device = decoder.embed.num_embeddings, decoder.embed.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, length), generator=generator).to(device)
    is_half = decoder.embed.weight.dtype in (torch.bfloat16, torch.float16)
    if is_half and 4 * sum(tensor.numel() for tensor in tensors.values()) <= COPY_BYTES:
        # Tied weights stay tied.
        floats = {id(tensor): tensor.float() for tensor in tensors.values()}
        wide = {name: floats[id(tensor)] for name, tensor in tensors.items()}
        _require_near(model, build(wide), call(model, tokens, weights=wide), tokens, 1e-4)
    _require_near(model, decoder, call(model, tokens), tokens, 0.5 if is_half else 1e-4)


def _require_near(
    model: nn.Module, decoder: Decoder, theirs: Tensor, tokens: Tensor, tolerance: float
) -> None:
    ours = decoder(tokens)
    errors = [distance(ours[:, [i]], theirs[:, [i]]) for i in range(tokens.shape[1])]
    # Rounding sends a token to another expert now and then, but not most of them.
    is_routed = bool(decoder.settings.experts_used)
    error = sorted(errors)[len(errors) // 2] if is_routed else max(errors)
    if not error <= tolerance:
        raise ValueError(
            f"no description of this {type(model).__name__} gives its logits: with its own weights "
            f"the nearest is {error:.2g} of their size away, expected at most {tolerance:.2g}"
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
    adjusted = _adjusted(tensors, config, _embed_scale(None, config))
    weights = canonical_weights(adjusted, d_head=settings.d_head, heads=settings.heads)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
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


def _adjusted(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], embed_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return Gemma's gains plus 1 and its embedding times its scale, others as they are."""
    if embed_scale is None:
        return dict(tensors)
    adjusted = {k: v + 1 if "norm" in k else v for k, v in tensors.items()}
    (embed,) = (k for k in tensors if k.endswith("embed_tokens.weight"))
    adjusted["lm_head.weight"] = tensors.get("lm_head.weight", tensors[embed])
    adjusted[embed] = tensors[embed] * embed_scale.to(tensors[embed])
    return adjusted


def _embed_scale(model: nn.Module | None, config: Mapping[str, Any]) -> Tensor | None:
    """Return the factor of Gemma's embedding; half precision rounds it, as it rounds the model's.

    None for other families.
    """
    if not _is_gemma(config):
        return None
    for name, buffer in [] if model is None else model.named_buffers():
        if name.endswith("embed_scale"):
            return buffer
    return torch.tensor(config["hidden_size"] ** 0.5)


def _is_gemma(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")).startswith("gemma")


def _settings_from_model(model: nn.Module, config: Mapping[str, Any]) -> list[Settings]:
    """Return what the configuration says, and the same with the angles that the model has."""
    said = settings_from_config(config)
    kinds = _layer_types(config, len(said.windows))
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()}
    frequencies = []
    for kind in kinds:
        buffer = buffers.get(f"{kind}_inv_freq", buffers.get("inv_freq"))
        if buffer is None:
            return [said]
        frequencies.append(tuple(buffer.float().tolist()))
    # .bfloat16() rounds the buffer, and with it what the model computes.
    return [said, replace(said, frequencies=tuple(frequencies))]


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

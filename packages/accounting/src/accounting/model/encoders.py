"""Encoders of text, images and sound, and decoders that look at one through cross-attention.

The count is that of the class that `architectures` names; without it, of the bare encoder with its
pooler where the family has one, or of the whole encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accounting.model.config import Arguments, Config, activation
from accounting.model.records import Matrix, Window
from accounting.model.shape import Shape

_ENCODER: Arguments = {
    "gated_mlp": False,
    "activation": "gelu",
    "norm": "layernorm",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "causal": False,
    "lm_head": False,
}


def _outside(name: str, rows: int, columns: int, kind: str = "matrix") -> Matrix:
    return Matrix("ends", name, rows, columns, kind=kind)


def _dense(name: str, rows: int, columns: int) -> tuple[Matrix, Matrix]:
    """A linear layer with its bias."""
    return _outside(name, rows, columns), _outside(f"{name} bias", 1, columns, "vector")


def _once(name: str, rows: int, columns: int) -> tuple[Matrix, ...]:
    """A linear layer with its bias that meets a sequence once."""
    return tuple(
        replace(matrix, part="pooler", meets="sequence") for matrix in _dense(name, rows, columns)
    )


def _labels(config: Config) -> int:
    return config.get("num_labels") or len(config.get("id2label", ())) or 2


def _refuse(config: Config) -> ValueError:
    return ValueError(
        f"architectures is {config.architecture!r}, whose head is not known for {config.family}; "
        "leave it out for the bare encoder"
    )


# Text.


def _bert(config: Config) -> Arguments:
    distilled = config.family == "distilbert"
    d = config["dim"] if distilled else config["hidden_size"]
    types = 0 if distilled else config.get("type_vocab_size", 2)
    extra = (
        _outside("token types", types, d, "table"),
        _outside("embedding norm", 2, d, "vector"),
    )
    arguments = _ENCODER | {
        "layers": config["n_layers"] if distilled else config["num_hidden_layers"],
        "d_model": d,
        "heads": config["n_heads"] if distilled else config["num_attention_heads"],
        "d_ff": config["hidden_dim"] if distilled else config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "positions": config.get("max_position_embeddings", 512),
        "final_norm": False,
        "activation": activation(config.get("hidden_act") or config.get("activation", "gelu")),
    }
    name = config.architecture
    if name.endswith("ForMaskedLM"):
        tied = config.get("tie_word_embeddings", True)
        transform = (*_dense("transform", d, d), _outside("transform norm", 2, d, "vector"))
        head = {"lm_head": True, "tied": tied, "head_bias": True}
        return arguments | head | {"extra": extra + transform}
    if name and not name.endswith("Model"):
        raise _refuse(config)
    pooler = () if distilled else _once("pooler", d, d)
    return arguments | {"extra": extra + pooler}


def _modernbert(config: Config) -> Arguments:
    every = config.get("global_attn_every_n_layers", 3)
    layers, bias = config["num_hidden_layers"], config.get("attention_bias", False)
    types = config.get("layer_types")
    local = tuple(
        i for i in range(layers) if (types[i] != "full_attention" if types else i % every)
    )
    d, mlp_bias = config["hidden_size"], config.get("mlp_bias", False)
    size = config.get("local_attention", 128)
    arguments = _ENCODER | {
        "layers": layers,
        "d_model": d,
        "heads": config["num_attention_heads"],
        "d_ff": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "gated_mlp": True,
        # The norm of the embedding stands for that of the first attention, which is none.
        "norm_bias": config.get("norm_bias", False),
        "window": Window(size=size + 1, layers=local) if local else None,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": mlp_bias,
    }
    name = config.architecture
    if name.endswith("ForMaskedLM"):
        head = {"lm_head": True, "tied": config.get("tie_word_embeddings", True)}
        head["head_bias"] = config.get("decoder_bias", True)
        vectors = 1 + arguments["norm_bias"]
        transform = (_outside("transform", d, d), _outside("transform norm", vectors, d, "vector"))
        return arguments | head | {"extra": transform}
    if name and not name.endswith("Model"):
        raise _refuse(config)
    return arguments


def _clip_text(config: Config) -> Arguments:
    if config.architecture and not config.architecture.endswith("TextModel"):
        raise _refuse(config)
    d = config.get("hidden_size", 512)
    head: tuple[Matrix, ...] = ()
    if config.family == "siglip_text_model":
        head = _once("head", d, config.get("projection_size", d))
    return _ENCODER | {
        "layers": config.get("num_hidden_layers", 12),
        "d_model": d,
        "heads": config.get("num_attention_heads", 8),
        "d_ff": config.get("intermediate_size", 2048),
        "vocab_size": config.get("vocab_size", 49408),
        "positions": config.get("max_position_embeddings", 77),
        # CLIP's text is causal, SigLIP's is not.
        "causal": config.family == "clip_text_model",
        "extra": head,
    }


# Images.


def _vision(config: Config) -> Arguments:
    family, name = config.family, config.architecture
    d = config.get("hidden_size", 768)
    size, patch = config.get("image_size", 224), config.get("patch_size", 16)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    tall, wide = patch if isinstance(patch, list | tuple) else (patch, patch)
    patches = (height // tall) * (width // wide)
    layers = tuple(range(config.get("num_hidden_layers", 12)))
    tokens = {"deit": 2, "siglip_vision_model": 0}.get(family, 1)
    pixels = config.get("num_channels", 3) * tall * wide
    stem = [_outside("patches", pixels, d), _outside("first tokens", tokens, d, "table")]
    if family != "clip_vision_model":
        stem.append(_outside("patches bias", 1, d, "vector"))
    else:
        stem.append(_outside("first norm", 2, d, "vector"))
    bias = config.get("qkv_bias", True)
    arguments = _ENCODER | {
        "layers": len(layers),
        "d_model": d,
        "heads": config.get("num_attention_heads", 12),
        "d_ff": int(config.get("intermediate_size") or config.get("mlp_ratio", 4) * d),
        "vocab_size": 0,
        "positions": patches + tokens,
        "qkv_bias": bias,
    }
    if family == "dinov2":
        scales = Matrix("norms", "layer scales", 2, d, kind="vector", layers=layers)
        stem += [_outside("mask token", config.get("use_mask_token", True), d, "vector"), scales]
        if config.get("use_swiglu_ffn", False):
            hidden = (int(arguments["d_ff"] * 2 / 3) + 7) // 8 * 8
            arguments |= {"gated_mlp": True, "activation": "silu", "d_ff": hidden}
    if family == "siglip_vision_model" and config.get("vision_use_head", True):
        f = arguments["d_ff"]
        stem += [
            _outside("probe", 1, d, "vector"),
            *_dense("pooling projections", d, 3 * d),
            *_once("pooling out", d, d),
            _outside("pooling norm", 2, d, "vector"),
            *_once("pooling up", d, f),
            *_once("pooling down", f, d),
        ]
    if name.endswith("ForImageClassification") and family in ("vit", "deit", "dinov2"):
        stem += _once("classifier", d * (2 if family == "dinov2" else 1), _labels(config))
    elif name and not name.endswith("Model"):
        raise _refuse(config)
    elif family in ("vit", "deit"):
        stem += _once("pooler", d, config.get("pooler_output_size", d))
    return arguments | {"extra": tuple(stem)}


# Encoder and decoder.


def _t5(config: Config) -> Arguments:
    name, family = config.architecture, config.family
    kind = config.get("feed_forward_proj", "relu" if family == "t5" else "gated-gelu")
    d, layers = config["d_model"], config["num_layers"]
    buckets, heads = config.get("relative_attention_num_buckets", 32), config["num_heads"]
    both: Arguments = {
        "d_model": d,
        "heads": heads,
        "head_dim": config["d_kv"],
        "d_ff": config["d_ff"],
        "gated_mlp": kind.startswith("gated"),
        "activation": activation(kind.split("-")[-1]),
    }
    # T5 shares one table of distances among the layers of a stack; UMT5 has one in each.
    deep = config.get("num_decoder_layers", layers)

    def distances(count: int) -> tuple[Matrix, ...]:
        where = tuple(range(count)) if family == "umt5" else (0,)
        return (Matrix("attention", "distances", buckets, heads, "columns", "table", where),)

    encoder: Arguments = both | {
        "layers": layers,
        "vocab_size": 0,
        "causal": False,
        "lm_head": False,
        "extra": distances(layers),
    }
    if name.endswith("EncoderModel"):
        return encoder | {"vocab_size": config["vocab_size"]}
    arguments = both | {
        "layers": deep,
        "vocab_size": config["vocab_size"],
        "norms_per_layer": 3,
        "encoder": Shape(**encoder, name="encoder"),
        "extra": distances(deep),
        "tied": config.get("tie_word_embeddings", family == "t5"),
    }
    return _generating(config, arguments)


def _generating(config: Config, arguments: Arguments) -> Arguments:
    name = config.architecture
    if not name or name.endswith(("ForConditionalGeneration", "MTModel")):
        return arguments
    if name.endswith("Model"):
        return arguments | {"lm_head": False, "head_bias": False}
    raise _refuse(config)


def _bart(config: Config) -> Arguments:
    family, d = config.family, config["d_model"]
    # Which have a norm on the embedding, a last norm, a table of positions and its first rows.
    on_embedding = family in ("bart", "mbart")
    last = family in ("mbart", "pegasus", "m2m_100", "blenderbot")
    rows = config.get("max_position_embeddings", 1024)
    rows = {"bart": rows + 2, "mbart": rows + 2, "m2m_100": 0}.get(family, rows)
    norm = (_outside("embedding norm", 2, d, "vector"),) if on_embedding else ()

    def stack(side: str, more: Arguments) -> Arguments:
        return (
            _ENCODER
            | {
                "layers": config[f"{side}_layers"],
                "d_model": d,
                "heads": config[f"{side}_attention_heads"],
                "d_ff": config[f"{side}_ffn_dim"],
                "positions": rows,
                "final_norm": last,
                "activation": activation(config.get("activation_function", "gelu")),
                "extra": norm,
            }
            | more
        )

    encoder = Shape(**stack("encoder", {"vocab_size": 0}), name="encoder")
    tied = config.get("tie_word_embeddings", True)
    if not config.get("share_encoder_decoder_embeddings", True):
        raise ValueError(
            "share_encoder_decoder_embeddings is false; two vocabularies are not known"
        )
    if not tied:
        # Each stack has a table of its own then, beside the shared one.
        tables = _outside("tables of the stacks", 2 * config["vocab_size"], d, "table")
        norm = (*norm, tables)
    more: Arguments = {
        "vocab_size": config["vocab_size"],
        "norms_per_layer": 3,
        "causal": True,
        "lm_head": True,
        "encoder": encoder,
        "tied": tied,
    }
    return _generating(config, stack("decoder", more))


def _whisper(config: Config) -> Arguments:
    d = config["d_model"]

    def stack(side: str, attentions: int, more: Arguments) -> Arguments:
        layers = tuple(range(config[f"{side}_layers"]))
        # Keys have no bias.
        biases = Matrix(
            "attention", "biases of queries and values", 1, 2 * attentions * d, "columns",
            "vector", layers,
        )  # fmt: skip
        extra = (biases, *more.pop("extra", ()))
        return (
            _ENCODER
            | {
                "layers": len(layers),
                "d_model": d,
                "heads": config[f"{side}_attention_heads"],
                "d_ff": config[f"{side}_ffn_dim"],
                "qkv_bias": False,
                "extra": extra,
            }
            | more
        )

    stem = (
        # Before the second convolution's stride there are twice as many positions.
        replace(_outside("first convolution", 3 * config.get("num_mel_bins", 80), d), chosen=2),
        _outside("first convolution bias", 1, d, "vector"),
        *_dense("second convolution", 3 * d, d),
    )
    positions = config.get("max_source_positions", 1500)
    encoder = stack("encoder", 1, {"vocab_size": 0, "positions": positions, "extra": stem})
    more: Arguments = {
        "vocab_size": config["vocab_size"],
        "positions": config.get("max_target_positions", 448),
        "norms_per_layer": 3,
        "causal": True,
        "lm_head": True,
        "encoder": Shape(**encoder, name="encoder"),
        "tied": config.get("tie_word_embeddings", True),
    }
    return _generating(config, stack("decoder", 2, more))


Family = Callable[[Config], dict[str, Any]]
ENCODERS: dict[str, Family] = {
    "bart": _bart,
    "bert": _bert,
    "blenderbot": _bart,
    "camembert": _bert,
    "clip_text_model": _clip_text,
    "clip_vision_model": _vision,
    "deit": _vision,
    "dinov2": _vision,
    "distilbert": _bert,
    "m2m_100": _bart,
    "marian": _bart,
    "mbart": _bart,
    "modernbert": _modernbert,
    "mt5": _t5,
    "pegasus": _bart,
    "roberta": _bert,
    "siglip_text_model": _clip_text,
    "siglip_vision_model": _vision,
    "t5": _t5,
    "umt5": _t5,
    "vit": _vision,
    "whisper": _whisper,
    "xlm-roberta": _bert,
}

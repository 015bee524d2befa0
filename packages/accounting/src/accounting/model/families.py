"""Decoders of the Hugging Face hub: a function a family, from `config.json` to sizes.

A size that the family's published files always give is required; one that they may leave out takes
the default of the family's configuration class. The counts that result are tested against the
modules that transformers builds from the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accounting.model.config import Arguments, Config, activation, windows
from accounting.model.records import MLA, Experts, Matrix, Window

Family = Callable[[Config], Arguments]


def llama(config: Config, **defaults: Any) -> Arguments:
    """What the Llama-like families share; `defaults` are those of the family's class."""

    def get(field: str, default: Any = None) -> Any:
        return config.get(field, defaults.get(field, default))

    bias = get("attention_bias", False)
    return {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": get("num_key_value_heads", 0),
        "head_dim": get("head_dim", 0),
        "d_ff": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "tied": get("tie_word_embeddings", False),
        "activation": activation(get("hidden_act") or get("hidden_activation", "silu")),
        "qkv_bias": bias,
        "out_bias": defaults.get("out_bias", bias),
        "mlp_bias": get("mlp_bias", False),
    }


def like_llama(more: Arguments | None = None, **defaults: Any) -> Family:
    """A family that is Llama but for constants."""

    def family(config: Config) -> Arguments:
        return llama(config, **defaults) | (more or {})

    return family


GELU_MLP: Arguments = {
    "gated_mlp": False,
    "activation": "gelu",
    "norm": "layernorm",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def _windowed(base: Family, default: int, is_windowed: Callable[[int], bool]) -> Family:
    """A family with windows in some layers: `layer_types` where the file has it."""
    return lambda config: base(config) | windows(config, default, is_windowed)


# Llama and those that differ from it by a switch.


def _mistral(config: Config) -> Arguments:
    # The class has a window by default; published files switch it off with an explicit null.
    window = config.content.get("sliding_window", 4096)
    return llama(config, num_key_value_heads=8) | {
        "window": Window(size=window) if window else None
    }


def _optional_window(base: Arguments, config: Config) -> Arguments:
    window = config.get("sliding_window", 0)
    return base | {"window": Window(size=window) if window else None}


def _mixtral(config: Config) -> Arguments:
    experts = Experts(
        count=config.get("num_local_experts", 8), per_token=config.get("num_experts_per_tok", 2)
    )
    base = _optional_window(llama(config, num_key_value_heads=8), config)
    return base | {"experts": experts}


def _phimoe(config: Config) -> Arguments:
    experts = Experts(
        count=config.get("num_local_experts", 16), per_token=config.get("num_experts_per_tok", 2)
    )
    base = _optional_window(llama(config, num_key_value_heads=8), config)
    head = config.get("lm_head_bias", False)
    return base | {"experts": experts, "norm": "layernorm", "head_bias": head}


def _olmo_experts(config: Config) -> Arguments:
    experts = Experts(count=config["num_experts"], per_token=config["num_experts_per_tok"])
    return llama(config) | {"qk_norm": "all", "experts": experts}


def _granite_experts(config: Config) -> Arguments:
    experts = Experts(
        count=config.get("num_local_experts", 8),
        per_token=config.get("num_experts_per_tok", 2),
        shared=config.get("shared_intermediate_size", 0),
    )
    return llama(config) | {"experts": experts}


def _cohere(config: Config) -> Arguments:
    base = llama(config, tie_word_embeddings=True)
    norm = {"norm": "layernorm", "norm_bias": False, "norms_per_layer": 1, "parallel_block": True}
    return base | norm | {"qk_norm": "heads" if config.get("use_qk_norm", False) else False}


def _starcoder2(config: Config) -> Arguments:
    bias = config.get("use_bias", True)
    base = llama(config, num_key_value_heads=2, tie_word_embeddings=True, hidden_act="gelu")
    own = {"gated_mlp": False, "norm": "layernorm"}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    return _optional_window(base | own | biases, config)


def _stablelm(config: Config) -> Arguments:
    parallel = config.get("use_parallel_residual", False)
    base = llama(config)
    layers = tuple(range(base["layers"]))
    own = {
        "norm": "layernorm",
        "norms_per_layer": 1 if parallel else 2,
        "parallel_block": parallel,
        "qkv_bias": config.get("use_qkv_bias", False),
    }
    if config.get("qk_layernorm", False):
        kv = base["kv_heads"] or base["heads"]
        width = base["d_model"] // base["heads"] * (base["heads"] + kv)
        norms = Matrix("attention", "qk norms", 1, width, "heads", "vector", layers)
        own |= {"extra": (norms,)}
    return base | own


def _helium(config: Config) -> Arguments:
    base = llama(config, head_dim=128, out_bias=False)
    if base["heads"] * base["head_dim"] != base["d_model"]:
        raise ValueError(
            f"head_dim is {base['head_dim']}; in helium the {base['heads']} heads must be as wide "
            f"together as hidden_size={base['d_model']}"
        )
    return base


def _nemotron(config: Config) -> Arguments:
    return llama(config, hidden_act="relu2") | {"gated_mlp": False, "norm": "layernorm"}


def _persimmon(config: Config) -> Arguments:
    norm = config.get("qk_layernorm", True)
    return llama(config, hidden_act="relu2") | GELU_MLP | {"activation": "relu", "qk_norm": norm}


def _seed_oss(config: Config) -> Arguments:
    base = llama(config, attention_bias=True, num_key_value_heads=8, head_dim=128)
    return base | {"out_bias": config.get("attention_out_bias", False)}


def _apertus(config: Config) -> Arguments:
    base = llama(config, hidden_act="xielu")
    layers = tuple(range(base["layers"]))
    slopes = Matrix("mlp", "slopes of xIELU", 1, 2, kind="vector", layers=layers)
    return base | {"gated_mlp": False, "qk_norm": True, "extra": (slopes,)}


def _bitnet(config: Config) -> Arguments:
    base = llama(config, num_key_value_heads=5, hidden_act="relu2")
    layers = tuple(range(base["layers"]))
    inner = Matrix("norms", "inner", 1, base["d_model"] + base["d_ff"], "columns", "vector", layers)
    return base | {"extra": (inner,)}


def _diffllama(config: Config) -> Arguments:
    base = llama(config)
    width = base["head_dim"] or base["d_model"] // base["heads"]
    layers = tuple(range(base["layers"]))
    scales = Matrix("attention", "lambdas", 1, 4 * width, kind="vector", layers=layers)
    return base | {"extra": (scales,)}


def _ernie(config: Config) -> Arguments:
    bias = config.get("use_bias", False)
    base = llama(config, tie_word_embeddings=True)
    return base | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)


def _ernie_moe(config: Config) -> Arguments:
    width, layers = config["moe_intermediate_size"], config["num_hidden_layers"]
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    every = config.get("moe_layer_interval", 1)
    last = last if last >= 0 else layers - 1
    sparse = tuple(i for i in range(layers) if (i + 1) % every == 0 and first <= i <= last)
    base = _ernie(config)
    experts = Experts(
        count=config["moe_num_experts"],
        per_token=config["moe_k"],
        width=width,
        shared=width * config.get("moe_num_shared_experts", 0),
        bias=False,
        layers=sparse,
    )
    statics = Matrix("experts", "correction of scores", 1, experts.count, kind="vector",
                     layers=sparse)  # fmt: skip
    return base | {"experts": experts, "extra": (statics,), "head_bias": base["mlp_bias"]}


def _hunyuan(config: Config) -> Arguments:
    return llama(config) | {"qk_norm": True}


def _hunyuan_moe(config: Config) -> Arguments:
    def one(field: str) -> int:
        value = config.get(field, 1)
        return int(max(value) if isinstance(value, list) else value)

    experts = Experts(
        count=one("num_experts"), per_token=one("moe_topk"), shared=config["intermediate_size"]
    )
    return _hunyuan(config) | {"experts": experts}


def _minimax_m2(config: Config) -> Arguments:
    experts = Experts(
        count=config.get("num_local_experts", 256), per_token=config.get("num_experts_per_tok", 8)
    )
    base = llama(config, num_key_value_heads=8, head_dim=128)
    return base | {"qk_norm": "all", "experts": experts}


def _llama4(config: Config) -> Arguments:
    layers = config["num_hidden_layers"]
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers") or list(range(step - 1, layers, step))
    base = llama(config, num_key_value_heads=8, head_dim=128)
    width = base["d_ff"]
    experts = Experts(
        count=config.get("num_local_experts", 16),
        per_token=config.get("num_experts_per_tok", 1),
        width=width,
        shared=width,
        layers=tuple(sparse),
    )
    types = config.get("layer_types")
    if types is None:
        types = ["full_attention" if (i + 1) % 4 == 0 else "chunked" for i in range(layers)]
    local = tuple(i for i, kind in enumerate(types) if kind != "full_attention")
    window = Window(size=config.get("attention_chunk_size", 8192), layers=local) if local else None
    dense = config.get("intermediate_size_mlp", 16384)
    return base | {"d_ff": dense, "experts": experts, "window": window}


# DeepSeek's experts, which GLM, dots and Solar have taken over.


def _deepseek_experts(config: Config, *, first_dense: int) -> Arguments:
    first, width = config.get("first_k_dense_replace", first_dense), config["moe_intermediate_size"]
    layers = config["num_hidden_layers"]
    if not config.get("n_routed_experts", 0) or first >= layers:
        return {}
    experts = Experts(
        count=config["n_routed_experts"],
        # The class of DeepSeek-V2 leaves it out; its published files say 6.
        per_token=config.get("num_experts_per_tok", 6),
        width=width,
        bias=False,
        shared=(config.get("n_shared_experts", 0) or 0) * width,
        layers=tuple(range(first, layers)),
    )
    return {"experts": experts}


def _latent(config: Config, q_rank: int | None = 1536) -> Arguments:
    return {
        "kv_heads": 0,
        "head_dim": config["qk_nope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "mla": MLA(
            kv_rank=config["kv_lora_rank"],
            rope_head_dim=config["qk_rope_head_dim"],
            # An explicit null means that queries are not compressed (V2-Lite).
            q_rank=config.content.get("q_lora_rank", q_rank) or 0,
        ),
    }


def _deepseek(config: Config) -> Arguments:
    first = 3 if config.family == "deepseek_v3" else 0
    return llama(config) | _latent(config) | _deepseek_experts(config, first_dense=first)


def _glm4_moe(config: Config) -> Arguments:
    base = llama(config, num_key_value_heads=8, out_bias=False)
    base["head_dim"] = base["head_dim"] or base["d_model"] // base["heads"]
    norm = config.get("use_qk_norm", False)
    return base | {"qk_norm": norm} | _deepseek_experts(config, first_dense=1)


def _dots1(config: Config) -> Arguments:
    base = _qwen_windows(config, 62)
    return llama(config) | base | {"qk_norm": True} | _deepseek_experts(config, first_dense=0)


def _solar(config: Config) -> Arguments:
    # Every layer has experts, and no file gives the width of a dense one.
    full = Config({"intermediate_size": 1} | dict(config.content), config.family)
    base = llama(full, num_key_value_heads=8, head_dim=128, out_bias=False)
    return base | _deepseek_experts(config, first_dense=0)


# Qwen.


def _qwen2(config: Config) -> Arguments:
    return llama(config) | _qwen_windows(config) | {"qkv_bias": True}


def _qwen2_moe(config: Config) -> Arguments:
    shared = {"shared": config["shared_expert_intermediate_size"], "shared_gate": True}
    bias = {"qkv_bias": config.get("qkv_bias", True)}
    return _qwen2(config) | qwen_experts(config, **shared) | bias


def _qwen3(config: Config) -> Arguments:
    return llama(config, head_dim=128) | _qwen_windows(config) | {"qk_norm": True}


def _qwen3_moe(config: Config) -> Arguments:
    # Here the class derives head_dim from the width, unlike its dense sibling.
    own: Arguments = {"head_dim": config.get("head_dim", 0)}
    if config.get("use_sliding_window", False):
        own |= {"window": Window(size=config.get("sliding_window", 4096))}
    return _qwen3(config) | qwen_experts(config) | own


def qwen_experts(config: Config, **more: Any) -> Arguments:
    """Qwen's experts: in every so many layers, but for those that are named dense."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = config["num_hidden_layers"]
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not sparse:
        return {}
    experts = Experts(
        # Older files have the first name, newer ones the second.
        count=config.get("num_local_experts") or config["num_experts"],
        per_token=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        layers=sparse,
        **more,
    )
    return {"experts": experts}


def _qwen_windows(config: Config, first: int = 28) -> Arguments:
    if not config.get("use_sliding_window", False) and config.family != "dots1":
        return {}
    first = config.get("max_window_layers", first)
    return windows(config, 4096, lambda layer: layer >= first)


# Gemma.


def gemma(config: Config, *, norms: int = 4, heads: int = 8, kv: int = 4) -> Arguments:
    """Gemma's wide heads, tied embedding and GeGLU."""
    given = Config({"num_attention_heads": heads} | dict(config.content), config.family)
    base = llama(given, num_key_value_heads=kv, tie_word_embeddings=True, head_dim=256)
    return base | {"norms_per_layer": norms, "activation": "gelu"}


def _gemma2(config: Config) -> Arguments:
    norms = 2 if config.family == "vaultgemma" else 4
    return gemma(config, norms=norms) | windows(config, 4096, lambda layer: layer % 2 == 0)


def _gemma3(config: Config) -> Arguments:
    pattern = config.get("sliding_window_pattern", 6)
    own = Config({"vocab_size": 262_208} | dict(config.content), config.family)
    local = windows(own, 4096, lambda layer: (layer + 1) % pattern != 0)
    return gemma(own) | local | {"qk_norm": True}


# GPT and what came out of it.


def _gpt_oss(config: Config) -> Arguments:
    base = llama(config, num_key_value_heads=8, head_dim=64, attention_bias=True)
    local = windows(config, 128, lambda layer: layer % 2 == 0)
    experts = Experts(
        count=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        router_bias=True,
    )
    return base | local | {"sinks": True, "mlp_bias": True, "experts": experts}


def _gpt2(config: Config) -> Arguments:
    # GPT-J and CodeGen have rotary positions, one norm a layer, and biases outside attention alone.
    rotary = config.family in ("gptj", "codegen")
    kv = {"kv_heads": 1} if config.get("multi_query", False) else {}
    arguments = GELU_MLP | {
        "layers": config["n_layer"],
        "d_model": config["n_embd"],
        "heads": config["n_head"],
        "d_ff": config.get("n_inner", 0),
        "vocab_size": config["vocab_size"],
        "positions": 0 if rotary else config["n_positions"],
        "tied": config.get("tie_word_embeddings", not rotary),
        "activation": activation(config.get("activation_function", "gelu_new")),
    }
    if rotary:
        parallel = {"norms_per_layer": 1, "parallel_block": True, "head_bias": True}
        arguments |= {"qkv_bias": False, "out_bias": False} | parallel
    if config.family == "openai-gpt":
        arguments |= {"final_norm": False}
    return arguments | kv


def _gpt_neo(config: Config) -> Arguments:
    layers = config["num_layers"]
    kinds = config.get("attention_layers") or [
        kind
        for pattern, times in config["attention_types"]
        for _ in range(times)
        for kind in pattern
    ]
    local = tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "local")
    return GELU_MLP | {
        "layers": layers,
        "d_model": config["hidden_size"],
        "heads": config["num_heads"],
        "d_ff": config.get("intermediate_size", 0),
        "vocab_size": config["vocab_size"],
        "positions": config.get("max_position_embeddings", 2048),
        "tied": config.get("tie_word_embeddings", True),
        "qkv_bias": False,
        "activation": activation(config.get("activation_function", "gelu_new")),
        "window": Window(size=config.get("window_size", 256), layers=local) if local else None,
    }


def _gpt_neox(config: Config) -> Arguments:
    bias = config.get("attention_bias", True)
    own = {"qkv_bias": bias, "out_bias": bias, "kv_heads": 0, "head_dim": 0}
    parallel = {"parallel_block": config.get("use_parallel_residual", True)}
    return llama(config, hidden_act="gelu") | GELU_MLP | own | parallel


def _phi(config: Config) -> Arguments:
    own = {"norms_per_layer": 1, "parallel_block": True, "head_bias": True, "head_dim": 0}
    norm = {"qk_norm": config.get("qk_layernorm", False)}
    return llama(config, hidden_act="gelu") | GELU_MLP | own | norm


def _opt(config: Config) -> Arguments:
    bias = config.get("enable_bias", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    before = config.get("do_layer_norm_before", True)
    return GELU_MLP | {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "d_ff": config["ffn_dim"],
        "vocab_size": config["vocab_size"],
        # Two rows more than positions: the table is read from index 2 on.
        "positions": config["max_position_embeddings"] + 2,
        "embedding_dim": config.get("word_embed_proj_dim", 0),
        "tied": config.get("tie_word_embeddings", True),
        "activation": activation(config.get("activation_function", "relu")),
        "norm": "layernorm" if affine else "none",
        "final_norm": before and not config.get("_remove_final_layer_norm", False),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }


def _bloom(config: Config) -> Arguments:
    width = config.get("hidden_size") or config["n_embed"]
    norm = Matrix("embedding", "norm", 1, 2 * width, kind="vector")
    return GELU_MLP | {
        "layers": config.get("n_layer") or config["num_hidden_layers"],
        "d_model": width,
        "heads": config.get("n_head") or config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", True),
        "extra": (norm,),
    }


def _falcon(config: Config) -> Arguments:
    heads, new = config["num_attention_heads"], config.get("new_decoder_architecture", False)
    bias, parallel = config.get("bias", False), config.get("parallel_attn", True)
    kv = (
        config.get("num_kv_heads", heads)
        if new
        else 1
        if config.get("multi_query", True)
        else heads
    )
    norms = config.get("num_ln_in_parallel_attn", 2) if new else 1
    return GELU_MLP | {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "heads": heads,
        "kv_heads": kv,
        "d_ff": config.get("ffn_hidden_size", 0),
        "vocab_size": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", True),
        "parallel_block": parallel or new,
        "norms_per_layer": norms if parallel or new else 2,
        "activation": activation(config.get("activation", "gelu")),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }


def _mpt(config: Config) -> Arguments:
    attention: Mapping[str, Any] = config.get("attn_config", {})
    if attention.get("qk_ln"):
        raise ValueError("attn_config.qk_ln is true; an mpt with norms of queries is not described")
    return {
        "layers": config["n_layers"],
        "d_model": config["d_model"],
        "heads": config["n_heads"],
        "d_ff": int(config.get("expansion_ratio", 4) * config["d_model"]),
        "vocab_size": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", True),
        "gated_mlp": False,
        "activation": "gelu",
        "norm": "layernorm",
        "norm_bias": False,
    }


def _dbrx(config: Config) -> Arguments:
    attention, mlp = config.get("attn_config", {}), config.get("ffn_config", {})
    experts = Experts(
        count=mlp.get("moe_num_experts", 4),
        per_token=mlp.get("moe_top_k", 1),
        width=mlp.get("ffn_hidden_size", 3584),
    )
    return {
        "layers": config["n_layers"],
        "d_model": config["d_model"],
        "heads": config["n_heads"],
        "kv_heads": attention.get("kv_n_heads", 1),
        "vocab_size": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
        "norm": "layernorm",
        "norm_bias": False,
        "experts": experts,
    }


def _xglm(config: Config) -> Arguments:
    # XGLM's positions are computed, BioGPT's are a table that is read from index 2 on.
    learned = config.family == "biogpt"
    return GELU_MLP | {
        "layers": config.get("num_layers") or config["num_hidden_layers"],
        "d_model": config.get("d_model") or config["hidden_size"],
        "heads": config.get("attention_heads") or config["num_attention_heads"],
        "d_ff": config.get("ffn_dim") or config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "positions": config.get("max_position_embeddings", 1024) + 2 if learned else 0,
        "tied": config.get("tie_word_embeddings", True),
    }


def _ctrl(config: Config) -> Arguments:
    return GELU_MLP | {
        "layers": config["n_layer"],
        "d_model": config["n_embd"],
        "heads": config["n_head"],
        "d_ff": config["dff"],
        "vocab_size": config["vocab_size"],
        "activation": "relu",
        "tied": config.get("tie_word_embeddings", True),
        "head_bias": True,
    }


_UNGATED = {"gated_mlp": False}
DECODERS: dict[str, Family] = {
    "apertus": _apertus,
    "arcee": like_llama(_UNGATED, hidden_act="relu2"),
    "biogpt": _xglm,
    "bitnet": _bitnet,
    "bloom": _bloom,
    "codegen": _gpt2,
    "cohere": _cohere,
    "cohere2": _windowed(_cohere, 4096, lambda layer: (layer + 1) % 4 != 0),
    "ctrl": _ctrl,
    "cwm": _windowed(
        like_llama(num_key_value_heads=8, head_dim=128), 8192, lambda layer: layer % 4 != 0
    ),
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "diffllama": _diffllama,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "exaone4": _windowed(like_llama({"qk_norm": True}), 4096, lambda layer: (layer + 1) % 4 != 0),
    "falcon": _falcon,
    "flex_olmo": _olmo_experts,
    "gemma": lambda config: gemma(config, norms=2, heads=16, kv=16),
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": like_llama(num_key_value_heads=2, head_dim=128, attention_bias=True, out_bias=False),
    "glm4": like_llama(
        {"norms_per_layer": 4},
        num_key_value_heads=2,
        head_dim=128,
        attention_bias=True,
        out_bias=False,
    ),
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_bigcode": lambda config: _gpt2(config) | {"kv_heads": config.get("multi_query", True) * 1},
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gpt2,
    "granite": like_llama(),
    "granitemoe": _granite_experts,
    "granitemoeshared": _granite_experts,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "iquestcoder": like_llama(num_key_value_heads=8, head_dim=128),
    "jais2": like_llama(
        _UNGATED | {"norm": "layernorm"}, attention_bias=True, mlp_bias=True, hidden_act="relu2"
    ),
    "llama": like_llama(),
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "ministral": _mistral,
    "ministral3": lambda config: _optional_window(
        llama(config, num_key_value_heads=8, head_dim=128), config
    ),
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "nanochat": like_llama(_UNGATED | {"norm": "none"}, hidden_act="relu2"),
    "nemotron": _nemotron,
    "olmo": like_llama({"norm": "none"}),
    "olmo2": like_llama({"qk_norm": "all"}),
    "olmo3": _windowed(like_llama({"qk_norm": "all"}), 4096, lambda layer: (layer + 1) % 4 != 0),
    "olmoe": _olmo_experts,
    "openai-gpt": _gpt2,
    "opt": _opt,
    "persimmon": _persimmon,
    "phi": _phi,
    "phi3": lambda config: _optional_window(llama(config), config),
    "phimoe": _phimoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "seed_oss": _seed_oss,
    "smollm3": like_llama(num_key_value_heads=4, tie_word_embeddings=True),
    "solar_open": _solar,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "vaultgemma": _gemma2,
    "xglm": _xglm,
    "youtu": lambda config: llama(config, tie_word_embeddings=True) | _latent(config),
}

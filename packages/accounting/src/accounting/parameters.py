"""How many parameters a transformer has, in all and for one token, to the integer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.transformer import Transformer

if TYPE_CHECKING:
    from torch import nn

UNIT = "parameters"


def parameters(model: Transformer | nn.Module, *, active: bool = False) -> Breakdown:
    """Count every parameter; with `active`, only those that one token meets.

    Active means all of them but the experts that the router did not choose. A tied head is counted
    once, as torch does. An `nn.Module` (also on the meta device) is counted as it is, by submodule.
    """
    if not isinstance(model, Transformer):
        from accounting.module import count_module

        return count_module(model)
    blocks = [attention_parameters(model), dense_mlp(model), experts(model, active=active)]
    name = "active parameters" if active else "parameters"
    return total(
        f"{name} of {model.name}", UNIT, embedding(model), *blocks, norms(model), head(model)
    )


def block_parameters(model: Transformer, *, active: bool = False) -> int:
    """Parameters of all blocks with their norms, without embedding, final norm and head."""
    outside = 0 if not model.final_norm else _norm_width(model) * model.d_model
    parts = (attention_parameters(model), dense_mlp(model), experts(model, active=active))
    return int(sum(part.total for part in parts) + norms(model).total - outside)


def embedding(model: Transformer) -> Breakdown:
    """Token and position tables, and the projections of an embedding narrower than the model."""
    wide = model.embedding_dim != model.d_model
    twice = 2 if wide and model.vocab_size else 0
    return total(
        "embedding",
        UNIT,
        product("tokens", UNIT, vocabulary=model.vocab_size, width=model.embedding_dim),
        product("positions", UNIT, rows=model.positions, d_model=model.d_model),
        product(
            "projections",
            UNIT,
            "in and out",
            projections=twice,
            width=model.embedding_dim,
            d_model=model.d_model,
        ),
    )


def attention_parameters(model: Transformer) -> Breakdown:
    """Projections of all layers, with their biases, inner norms and sinks."""
    matrices = [
        product(name, UNIT, layers=model.layers, inputs=rows, outputs=columns)
        for name, rows, columns in attention_matrices(model)
    ]
    d, h, g = model.d_model, model.heads, model.kv_heads
    qk, v = model.qk_dim, model.v_head_dim
    if model.mla:
        # The biases sit on the way down into the latents and on the way out.
        down = model.q_lora_rank + model.kv_lora_rank + model.rope_head_dim
        biased = down if model.qkv_bias else 0
        normed = (model.q_lora_rank + model.kv_lora_rank) * (1 if model.norm != "none" else 0)
    else:
        biased = h * qk + g * (qk + v) if model.qkv_bias else 0
        normed = 2 * qk * _norm_width(model) if model.qk_norm and h else 0
    out = d if model.out_bias and h else 0
    sinks = h if model.sinks else 0
    return total(
        "attention",
        UNIT,
        *matrices,
        product("input biases", UNIT, layers=model.layers, width=biased),
        product("out bias", UNIT, layers=model.layers, width=out),
        product("inner norms", UNIT, layers=model.layers, width=normed),
        product("sinks", UNIT, layers=model.layers, heads=sinks),
    )


def attention_matrices(model: Transformer) -> list[tuple[str, int, int]]:
    """The matrices of one layer's attention: name, inputs, outputs."""
    d, h, g = model.d_model, model.heads, model.kv_heads
    if not h:
        return []
    out = ("out", h * model.v_head_dim, d)
    if not model.mla:
        return [
            ("query", d, h * model.qk_dim),
            ("key", d, g * model.qk_dim),
            ("value", d, g * model.v_head_dim),
            out,
        ]
    rank, latent = model.q_lora_rank, model.kv_lora_rank
    query = (
        [("query down", d, rank), ("query up", rank, h * model.qk_dim)]
        if rank
        else [("query", d, h * model.qk_dim)]
    )
    return [
        *query,
        ("latent down", d, latent + model.rope_head_dim),
        ("latent up", latent, h * (model.head_dim + model.v_head_dim)),
        out,
    ]


def dense_mlp(model: Transformer) -> Breakdown:
    """The MLPs of the layers without experts."""
    layers = model.layers - len(model.expert_layers)
    wide, out = _mlp_biases(model, model.d_ff)
    return total(
        "mlp",
        UNIT,
        product(
            "matrices",
            UNIT,
            layers=layers,
            matrices=model.mlp_matrices,
            d_model=model.d_model,
            d_ff=model.d_ff,
        ),
        product("input biases", UNIT, layers=layers, width=wide),
        product("out bias", UNIT, layers=layers, width=out),
    )


def experts(model: Transformer, *, active: bool = False) -> Breakdown:
    """Router, routed and shared experts of the layers that have them."""
    layers, d = len(model.expert_layers), model.d_model
    count = model.experts_per_token if active else model.experts
    wide, out = _mlp_biases(model, model.d_expert)
    return total(
        "experts",
        UNIT,
        product("router", UNIT, layers=layers, d_model=d, experts=model.experts),
        product("router bias", UNIT, layers=layers, experts=model.router_bias * model.experts),
        product(
            "routed",
            UNIT,
            layers=layers,
            experts=count,
            matrices=model.mlp_matrices,
            d_model=d,
            d_expert=model.d_expert,
        ),
        product("routed input biases", UNIT, layers=layers, experts=count, width=wide),
        product("routed out biases", UNIT, layers=layers, experts=count, width=out),
        product(
            "shared",
            UNIT,
            layers=layers,
            matrices=model.mlp_matrices,
            d_model=d,
            d_shared=model.d_shared,
        ),
        product("shared gate", UNIT, layers=layers, d_model=d * model.shared_gate),
    )


def norms(model: Transformer) -> Breakdown:
    """The norms on the residual stream."""
    width = _norm_width(model)
    return total(
        "norms",
        UNIT,
        product(
            "in layers",
            UNIT,
            layers=model.layers,
            norms=model.norms_per_layer,
            vectors=width,
            d_model=model.d_model,
        ),
        product("final", UNIT, norms=int(model.final_norm), vectors=width, d_model=model.d_model),
    )


def head(model: Transformer) -> Breakdown:
    """The language-model head, where it is not the embedding."""
    rows = 0 if model.tied else model.vocab_size
    return total(
        "head",
        UNIT,
        product("matrix", UNIT, vocabulary=rows, width=model.embedding_dim),
        product("bias", UNIT, vocabulary=model.vocab_size if model.head_bias else 0),
    )


def lora_parameters(inputs: int, outputs: int, rank: int) -> int:
    """A low-rank update of one matrix, `A` (inputs, rank) and `B` (rank, outputs): r(m + l)."""
    checks.whole("inputs", inputs)
    checks.whole("outputs", outputs)
    return checks.whole("rank", rank) * (inputs + outputs)


def soft_prompt_parameters(model: Transformer, *, tokens: int) -> int:
    """A soft prompt trains one vector of the embedding's width a token, and nothing else."""
    return checks.whole("tokens", tokens) * model.embedding_dim


def _mlp_biases(model: Transformer, width: int) -> tuple[int, int]:
    """Bias entries inside an MLP of that width, and on its way out."""
    if not model.mlp_bias:
        return 0, 0
    return (model.mlp_matrices - 1) * width, model.d_model


def _norm_width(model: Transformer) -> int:
    return {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm]

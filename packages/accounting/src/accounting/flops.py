"""Floating-point operations of matrix multiplications: a multiply and an add are two.

A matrix of `m` by `n` costs `2mn` a token forward and twice that backward. Attention costs `2(qk +
v)` a head and a pair of query and key that may see each other; how many pairs there are is what
most counters get wrong: full attention has S², causal S(S+1)/2, and a window w(w+1)/2 + (S-w)w.
What is not a matrix multiplication (norms, activations, softmax) is not counted, as in
`torch.utils.flop_counter`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.hardware import Hardware, find
from accounting.parameters import attention_matrices
from accounting.transformer import Transformer

Phase = Literal["forward", "training", "prefill", "decode"]
Attention = Literal["causal", "full"]
Recompute = Literal["none", "selective", "full"]
UNIT = "FLOP"


def flops(
    model: Transformer,
    *,
    seq: int,
    batch: int = 1,
    phase: Phase = "training",
    attention: Attention = "causal",
    recompute: Recompute = "none",
    flash: bool = False,
) -> Breakdown:
    """Operations for `batch` sequences of `seq` tokens, by part.

    - `forward` and `training` (three times forward) give logits for every token; `prefill` for the
      last one.
    - `decode` is one new token a sequence that attends to `seq` keys, itself included. MLA decodes
      on the latent: its up-projection is absorbed into queries and outputs.
    - `attention="full"` counts every pair, as torch's counter does; `causal` only those that the
      masks of the model (causal, windows) let through.
    - `recompute` and `flash` add what is computed again, so that the total is what the hardware
      runs: `selective` the attention, `full` a second forward of the blocks, `flash` the scores
      in the backward.
    """
    seq, batch = checks.whole("seq", seq), checks.whole("batch", batch)
    checks.choice("phase", phase, ("forward", "training", "prefill", "decode"))
    checks.choice("attention", attention, ("causal", "full"))
    checks.choice("recompute", recompute, ("none", "selective", "full"))
    tokens = batch if phase == "decode" else batch * seq
    heads = batch if phase == "prefill" else tokens
    passes = 3 if phase == "training" else 1
    absorbed = model.mla and phase == "decode"
    blocks = (
        *_projections(model, tokens, passes, absorbed=absorbed),
        *_attention(model, batch, seq, passes, attention, decode=phase == "decode"),
        *_mlps(model, tokens, passes),
    )
    again = []
    if phase == "training":
        again = _recomputed(model, batch, seq, attention, recompute, flash, blocks)
    return total(
        f"{phase} of {model.name}",
        UNIT,
        *blocks,
        _embedding_projections(model, tokens, passes),
        product(
            "head",
            UNIT,
            passes=passes,
            tokens=heads,
            ops=2,
            vocabulary=model.vocab_size,
            width=model.embedding_dim,
        ),
        total("recomputed", UNIT, *again),
        note=f"{batch} x {seq} tokens, {attention} attention",
    )


def pairs(model: Transformer, seq: int, attention: Attention = "causal") -> tuple[int, int]:
    """Pairs of query and key in one sequence: in a layer that sees all, and in a windowed one."""
    seq = checks.whole("seq", seq)
    checks.choice("attention", attention, ("causal", "full"))
    if attention == "full":
        return seq * seq, seq * seq
    window = min(model.window or seq, seq)
    causal = seq * (seq + 1) // 2
    return causal, window * (window + 1) // 2 + (seq - window) * window


def mfu(
    model: Transformer,
    *,
    tokens_per_second: float,
    seq: int,
    devices: int = 1,
    hardware: str | Hardware | None = None,
    dtype: str = "bf16",
    peak_flops: float | None = None,
    attention: Attention = "causal",
    include_attention: bool = True,
) -> float:
    """Model FLOPs utilisation: the share of the peak that useful operations account for.

    The convention matters more than the digits: PaLM counts full attention, and prints one figure
    with and one without attention (Chowdhery et al. 2022, appendix B).
    """
    checks.number("tokens_per_second", tokens_per_second)
    checks.whole("devices", devices)
    work = flops(model, seq=seq, attention=attention)
    useful = sum(part.total for part in work if include_attention or part.name != "attention")
    return utilisation(
        useful / seq * tokens_per_second / devices,
        hardware=hardware,
        dtype=dtype,
        peak_flops=peak_flops,
    )


def hfu(
    model: Transformer,
    *,
    tokens_per_second: float,
    seq: int,
    devices: int = 1,
    hardware: str | Hardware | None = None,
    dtype: str = "bf16",
    peak_flops: float | None = None,
    attention: Attention = "causal",
    recompute: Recompute = "none",
    flash: bool = True,
) -> float:
    """Hardware FLOPs utilisation: like `mfu`, with the operations that are run a second time."""
    checks.number("tokens_per_second", tokens_per_second)
    checks.whole("devices", devices)
    work = flops(model, seq=seq, attention=attention, recompute=recompute, flash=flash)
    return utilisation(
        work.total / seq * tokens_per_second / devices,
        hardware=hardware,
        dtype=dtype,
        peak_flops=peak_flops,
    )


def utilisation(
    achieved_flops: float,
    *,
    hardware: str | Hardware | None = None,
    dtype: str = "bf16",
    peak_flops: float | None = None,
) -> float:
    """Achieved operations a second and device, as a share of the device's dense peak."""
    if (hardware is None) == (peak_flops is None):
        raise ValueError("give either hardware or peak_flops")
    peak = peak_flops if hardware is None else find(hardware).peak(dtype)
    return checks.number("achieved_flops", achieved_flops) / checks.number("peak_flops", peak)


def _projections(
    model: Transformer, tokens: int, passes: int, *, absorbed: bool
) -> tuple[Breakdown, ...]:
    matrices = attention_matrices(model)
    if absorbed:
        # Queries go into the latent and outputs come out of it: the same matrix, read per token.
        keep = [m for m in matrices if m[0] != "latent up"]
        up = [
            ("query into latent", model.heads * model.head_dim, model.kv_lora_rank),
            ("output out of latent", model.heads * model.kv_lora_rank, model.v_head_dim),
        ]
        matrices = keep + up
    parts = [
        product(
            name,
            UNIT,
            passes=passes,
            tokens=tokens,
            layers=model.layers,
            ops=2,
            inputs=rows,
            outputs=columns,
        )
        for name, rows, columns in matrices
    ]
    return (total("projections", UNIT, *parts),)


def _attention(
    model: Transformer,
    batch: int,
    seq: int,
    passes: int | Fraction,
    attention: Attention,
    *,
    decode: bool,
) -> tuple[Breakdown, ...]:
    everywhere, windowed = pairs(model, seq, attention)
    if decode:
        everywhere = seq
        windowed = seq if attention == "full" else min(model.window or seq, seq)
    qk, v = model.qk_dim, model.v_head_dim
    if decode and model.mla:
        qk, v = model.kv_lora_rank + model.rope_head_dim, model.kv_lora_rank
    parts = []
    few = len(model.windowed_layers)
    for kind, layers, count in (
        ("", model.layers - few, everywhere),
        (" in windows", few, windowed),
    ):
        for name, width in (("scores", qk), ("values", v)):
            parts.append(
                product(
                    name + kind,
                    UNIT,
                    passes=passes,
                    sequences=batch,
                    layers=layers,
                    ops=2,
                    heads=model.heads,
                    width=width,
                    pairs=count,
                )
            )
    return (total("attention", UNIT, *parts),)


def _mlps(model: Transformer, tokens: int, passes: int) -> tuple[Breakdown, ...]:
    d, sparse = model.d_model, len(model.expert_layers)

    def part(name: str, layers: int, **sizes: int) -> Breakdown:
        return product(name, UNIT, passes=passes, tokens=tokens, layers=layers, ops=2, **sizes)

    matrices = model.mlp_matrices
    return (
        part("mlp", model.layers - sparse, matrices=matrices, d_model=d, d_ff=model.d_ff),
        total(
            "experts",
            UNIT,
            part("router", sparse, d_model=d, experts=model.experts),
            part(
                "routed",
                sparse,
                experts=model.experts_per_token,
                matrices=matrices,
                d_model=d,
                d_expert=model.d_expert,
            ),
            part("shared", sparse, matrices=matrices, d_model=d, d_shared=model.d_shared),
            part("shared gate", sparse, d_model=d * model.shared_gate),
        ),
    )


def _embedding_projections(model: Transformer, tokens: int, passes: int) -> Breakdown:
    wide = 2 if model.embedding_dim != model.d_model and model.vocab_size else 0
    return product(
        "embedding projections",
        UNIT,
        passes=passes,
        tokens=tokens,
        ops=2,
        projections=wide,
        width=model.embedding_dim,
        d_model=model.d_model,
    )


def _recomputed(
    model: Transformer,
    batch: int,
    seq: int,
    attention: Attention,
    recompute: Recompute,
    flash: bool,
    blocks: tuple[Breakdown, ...],
) -> list[Breakdown]:
    (core,) = _attention(model, batch, seq, 1, attention, decode=False)
    again: list[Breakdown] = []
    if recompute == "full":
        forward = [part for part in blocks if part.total]
        again.append(
            product("blocks", UNIT, "a second forward", forward=sum(p.total for p in forward) // 3)
        )
    elif recompute == "selective":
        again.append(total("attention", UNIT, *core.parts))
    if flash:
        scores = tuple(part for part in core.parts if part.name.startswith("scores"))
        again.append(total("scores in the flash backward", UNIT, *scores))
    return again

"""Floating-point operations of matrix multiplications: a multiply and an add are two.

A matrix of `m` by `n` costs `2mn` a token forward and twice that backward. Attention costs `2(qk +
v)` a head and a pair of query and key that may see each other; how many pairs there are is what
most counters get wrong: full attention has S², causal S(S+1)/2, and a window w(w+1)/2 + (S-w)w.
What is not a matrix multiplication (norms, activations, softmax) is not counted, as in
`torch.utils.flop_counter`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.hardware import Hardware, find
from accounting.model.matrices import matrices
from accounting.model.records import Matrix
from accounting.model.shape import Shape
from accounting.parameters import by_part

Phase = Literal["forward", "training", "prefill", "decode"]
Attention = Literal["causal", "full"]
Recompute = Literal["none", "selective", "full"]
UNIT = "FLOP"


@checks.entry()
def flops(
    model: Shape,
    *,
    seq: int,
    batch: int = 1,
    phase: Phase = "training",
    attention: Attention = "causal",
    recompute: Recompute = "none",
    flash: bool = False,
    encoder_seq: int | None = None,
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
    - An encoder sees `encoder_seq` tokens: its table of positions, else `seq`, if not given.
    """
    tokens = batch if phase == "decode" else batch * seq
    passes = 3 if phase == "training" else 1
    if recompute != "none" and phase != "training":
        raise ValueError(f"recompute is {recompute!r} in {phase!r}; only training computes again")
    if phase in ("decode", "prefill") and not model.causal:
        raise ValueError(f"phase is {phase!r}; {model.name} is an encoder, which makes no tokens")
    source = model.source_tokens(encoder_seq, seq)
    meet = {
        "tokens": tokens,
        "last": batch if phase == "prefill" else tokens,
        "sequence": batch,
        # Keys and values of the encoder are made once.
        "source": 0 if phase == "decode" else batch * source,
    }
    core = _attention(model, batch, seq, passes, attention, decode=phase == "decode")
    parts = [*_parts(model, meet, passes), core]
    if model.mla and model.mla.index_heads:
        # Every key that a query may see is weighed, head by head, before the few are chosen.
        seen = seq if phase == "decode" else pairs(replace(model, mla=None), seq, attention)[0]
        sizes = {"sequences": batch, "layers": len(model.attention_layers or ()), "ops": 2}
        sizes |= {"heads": model.mla.index_heads, "width": model.mla.index_head_dim + 1}
        parts.append(product("index", UNIT, passes=passes, **sizes, pairs=seen))
    again: Iterable[Breakdown] = ()
    if phase == "training":
        once = _attention(model, batch, seq, 1, attention)
        again = _recomputed(model, once, recompute, flash, meet)
    if model.encoder:
        sizes = {"layers": model.layers, "ops": 2, "heads": model.heads}
        sizes["width"] = model.qk_dim + model.v_head_dim
        looks = product("pairs", UNIT, passes=passes, **sizes, pairs=tokens * source)
        parts.append(total("attention to the encoder", UNIT, looks))
    if model.encoder and phase != "decode":
        like: dict[str, Any] = {"attention": attention, "recompute": recompute, "flash": flash}
        once_more: Phase = "training" if passes == 3 else "forward"
        inside = flops(model.encoder, seq=source, batch=batch, phase=once_more, **like)
        parts.append(total("encoder", UNIT, *inside.parts))
    return total(
        f"{phase} of {model.name}",
        UNIT,
        *parts,
        total("recomputed", UNIT, *again),
        note=f"{batch} x {seq} tokens, {attention} attention",
    )


@checks.entry()
def pairs(model: Shape, seq: int, attention: Attention = "causal") -> tuple[int, int]:
    """Pairs of query and key in one sequence: in a layer that sees all, and in a windowed one."""
    if attention == "full" or not model.causal:
        # An encoder's windows look both ways; every pair is counted without them.
        band = seq * seq
        if attention == "causal" and model.window:
            side = min(model.window.size // 2, seq - 1)
            band = seq * (2 * side + 1) - side * (side + 1)
        return seq * seq, band

    def nearest(keys: int) -> int:
        return keys * (keys + 1) // 2 + (seq - keys) * keys

    top = model.mla.index_top if model.mla else 0
    return nearest(min(top or seq, seq)), nearest(
        min(model.window.size, seq) if model.window else seq
    )


@checks.entry("hardware", "dtype", "peak_flops")
def mfu(
    model: Shape,
    *,
    tokens_per_second: float,
    seq: int,
    devices: int = 1,
    attention: Attention = "causal",
    include_attention: bool = True,
    encoder_seq: int | None = None,
    **of: Any,
) -> float:
    """Model FLOPs utilization: the share of the peak that useful operations account for.

    `of` says whose peak: `hardware` with a `dtype` (bf16), or `peak_flops`. The convention matters
    more than the digits: PaLM counts full attention, and prints one figure with and one without
    attention (Chowdhery et al. 2022, appendix B).
    """
    work = flops(model, seq=seq, attention=attention, encoder_seq=encoder_seq)
    useful = work.total
    if not include_attention and "attention" in work:
        useful -= work["attention"].total
    return _at_rate(useful / seq, tokens_per_second, devices, of)


@checks.entry("hardware", "dtype", "peak_flops")
def hfu(
    model: Shape,
    *,
    tokens_per_second: float,
    seq: int,
    devices: int = 1,
    attention: Attention = "causal",
    recompute: Recompute = "none",
    flash: bool = True,
    **of: Any,
) -> float:
    """Hardware FLOPs utilization: like `mfu`, with the operations that are run a second time."""
    work = flops(model, seq=seq, attention=attention, recompute=recompute, flash=flash)
    return _at_rate(work.total / seq, tokens_per_second, devices, of)


def _at_rate(each: float, tokens_per_second: float, devices: int, of: Mapping[str, Any]) -> float:
    return utilization(each * tokens_per_second / devices, **of)


@checks.entry()
def utilization(
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
    return achieved_flops / checks.number("peak_flops", peak)


def _parts(model: Shape, meet: Mapping[str, int], passes: int) -> Iterator[Breakdown]:
    """Every matrix times what it meets, under the headings of the parameters."""
    for part, listed in by_part(model):
        leaves = []
        for matrix in listed:
            sizes = _times(matrix, meet) | {"ops": 2, "rows": matrix.rows}
            if matrix.kind == "matrix":
                leaf = product(matrix.name, UNIT, passes=passes, **sizes, columns=matrix.columns)
                leaves.append(leaf)
        for mixer in model.mixers:
            if mixer.name == part:
                seen = {"tokens": meet["tokens"], "layers": len(mixer.layers)}
                leaves.append(product("scan", UNIT, passes=passes, **seen, ops=mixer.scan))
        # `attention` is what becomes of queries and keys; the matrices before it are projections.
        yield total("projections" if part == "attention" else part, UNIT, *leaves)
    if model.lm_head and model.tied:
        sizes = {"ops": 2, "rows": model.embedding_dim, "columns": model.vocab_size}
        leaf = product("matrix", UNIT, passes=passes, tokens=meet["last"], **sizes)
        yield total("head", UNIT, leaf)


def _times(matrix: Matrix, meet: Mapping[str, int]) -> dict[str, int]:
    """How many rows a matrix multiplies: tokens, layers, experts."""
    seen = {"tokens": meet[matrix.meets] - matrix.skips * meet["sequence"]}
    if matrix.layers is not None:
        seen["layers"] = len(matrix.layers)
    if matrix.chosen > 1 or matrix.routed:
        seen["experts" if matrix.routed else "times"] = matrix.chosen
    return seen


def _attention(
    model: Shape, batch: int, seq: int, passes: int, attention: Attention, decode: bool = False
) -> Breakdown:
    everywhere, windowed = pairs(model, seq, attention)
    qk, v = model.qk_dim, model.v_head_dim
    if decode:
        everywhere = min(seq, model.mla.index_top or seq) if model.mla else seq
        windowed = seq if attention == "full" or not model.window else min(model.window.size, seq)
    if decode and model.mla:
        # Queries go into the latent and outputs come out of it: the up-projection, read per token.
        qk, v = model.mla.kv_rank + model.mla.rope_head_dim, model.mla.kv_rank
    few = len(model.windowed_layers)
    kinds = (
        ("", len(model.attention_layers or ()) - few, everywhere),
        (" in windows", few, windowed),
    )
    parts = []
    for kind, layers, count in kinds:
        sizes = {"sequences": batch, "layers": layers, "ops": 2, "heads": model.heads}
        for name, width in (("scores", qk), ("values", v)):
            leaf = product(name + kind, UNIT, passes=passes, **sizes, width=width, pairs=count)
            parts.append(leaf)
    return total("attention", UNIT, *parts)


def _recomputed(
    model: Shape, core: Breakdown, recompute: Recompute, flash: bool, meet: Mapping[str, int]
) -> Iterator[Breakdown]:
    if recompute == "full":
        forward = int(core.total) + sum(
            2 * matrix.one * math.prod(_times(matrix, meet).values())
            for matrix in matrices(model)
            if matrix.kind == "matrix" and matrix.layers is not None
        )
        forward += sum(meet["tokens"] * len(mixer.layers) * mixer.scan for mixer in model.mixers)
        yield product("blocks", UNIT, "a second forward", forward=forward)
    elif recompute == "selective":
        yield core
    if flash:
        yield total("scores in the flash backward", UNIT, *core.parts[::2])

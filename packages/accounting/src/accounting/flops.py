"""Floating-point operations (FLOPs) of matrix products: one multiply and one add count as two.

An `m` by `n` matrix costs `2mn` per token in the forward pass and `4mn` in the backward pass.
Attention costs `2(qk + v)` per head and unmasked pair of query and key in the forward pass, and
twice that in the backward pass. Here `qk` is the width of a query and `v` that of a value. S tokens
have S² pairs for full attention, S(S+1)/2 for causal attention, and w(w+1)/2 + (S-w)w for a sliding
window of w keys. The operations that write and read the state of recurrent layers also count. As in
`torch.utils.flop_counter`, norms, activation functions and softmax are not counted.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.hardware import Hardware, find
from accounting.model.records import Compressed, Matrix
from accounting.model.transformer import Transformer, list_matrices
from accounting.parameters import group_by_part

Phase = Literal["forward", "training", "prefill", "decode"]
Attention = Literal["causal", "full"]
Recompute = Literal["none", "selective", "full"]
UNIT = "FLOP"


@checks.validate()
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
    """Return the FLOPs for `batch` sequences of `seq` tokens, by part.

    - `phase="forward"` and `"training"` compute logits for every token, `"prefill"` only for the
      last token. Training takes three times the FLOPs of the forward pass.
    - `phase="decode"` computes one new token per sequence, which attends to `seq` keys including
      its own. Latent attention (MLA) attends to the cached latent vectors themselves. The matrices
      that expand latents to keys and values multiply the queries and the outputs instead.
    - `attention="full"` counts every pair, as torch's counter does. `"causal"` counts only the
      pairs that the model's mask, windows and sparse-attention index admit.
    - `recompute` and `flash` add the recomputed operations of training, so the total includes all
      operations that the hardware executes. `recompute="selective"` repeats the attention, `"full"`
      repeats the forward of the blocks, and `flash` repeats the scores in the backward.

    Raises `ValueError` for a decode or prefill of an encoder, if `seq` exceeds the learned
    positions, or if `recompute` is set in a phase other than training.
    """
    tokens = batch if phase == "decode" else batch * seq
    passes = 3 if phase == "training" else 1
    if recompute != "none" and phase != "training":
        raise ValueError(
            f"expected recompute='none' for phase={phase!r}, got {recompute!r}; "
            "only training recomputes"
        )
    if phase in ("decode", "prefill") and not model.causal:
        raise ValueError(
            f"expected phase 'forward' or 'training' for the encoder {model.name}, got {phase!r}"
        )
    model.check_positions(seq)
    # The number of vectors that a matrix multiplies, keyed by `Matrix.applies_to`.
    inputs = {
        "tokens": tokens,
        "last": batch if phase == "prefill" else tokens,
        "sequence": batch,
    }

    def build_attention_parts(num_passes: int) -> list[Breakdown]:
        decode = phase == "decode"
        cores = [_count_attention(model, batch, seq, num_passes, attention, decode)]
        if model.mla and model.mla.index_heads:
            # Every index head scores every unmasked key before keys are selected.
            num_pairs = seq if decode else count_pairs(replace(model, mla=None), seq, attention)[0]
            sizes = {"sequences": batch, "layers": len(model.attention_layers or ()), "ops": 2}
            sizes |= {"heads": model.mla.index_heads, "width": model.mla.index_head_dim + 1}
            cores.append(multiply("index", UNIT, passes=num_passes, **sizes, pairs=num_pairs))
        return cores + list(_iter_entry_indexes(model, batch, seq, num_passes, attention, decode))

    parts = [*_iter_parts(model, inputs, passes), *build_attention_parts(passes)]
    recomputed: Iterable[Breakdown] = ()
    if phase == "training":
        recomputed = _iter_recomputed(model, build_attention_parts(1), recompute, flash, inputs)
    return sum_parts(
        f"{phase} of {model.name}",
        UNIT,
        *parts,
        sum_parts("recomputed", UNIT, *recomputed),
        note=f"{batch} x {seq} tokens, {attention} attention",
    )


@checks.validate()
def count_pairs(model: Transformer, seq: int, attention: Attention = "causal") -> tuple[int, int]:
    """Return the numbers of (query, key) pairs per sequence in a full and in a windowed layer.

    With causal attention, a sparse-attention index leaves only the pairs with selected keys in a
    full layer. Without windows, the second number ignores the index.
    """
    if attention == "full" or not model.causal:
        # An encoder's windows extend to both sides; its other layers have all pairs.
        windowed_pairs = seq * seq
        if attention == "causal" and model.window:
            side = min(model.window.size // 2, seq - 1)
            windowed_pairs = seq * (2 * side + 1) - side * (side + 1)
        return seq * seq, windowed_pairs

    def count_nearest_pairs(keys: int) -> int:
        return keys * (keys + 1) // 2 + (seq - keys) * keys

    max_selected_keys = model.mla.index_top if model.mla else 0
    full_pairs = count_nearest_pairs(min(max_selected_keys or seq, seq))
    if not model.window:
        return full_pairs, count_nearest_pairs(seq)
    size = min(model.window.size, seq)
    if model.window.chunked:
        chunks, remainder = divmod(seq, size)
        return full_pairs, (chunks * size * (size + 1) + remainder * (remainder + 1)) // 2
    return full_pairs, count_nearest_pairs(size)


@checks.validate()
def mfu(
    model: Transformer,
    *,
    tokens_per_second: float,
    seq: int,
    devices: int = 1,
    attention: Attention = "causal",
    include_attention: bool = True,
    **peak: Any,
) -> float:
    """Return the model FLOPs utilization of training: useful operations divided by the peak.

    Pass the peak per device as `hardware` with a `dtype` (default bf16), or as `peak_flops` in
    FLOP/s. `tokens_per_second` is the rate of all `devices`. Conventions differ: PaLM counts full
    attention and reports one value with and one without attention (Chowdhery et al. 2022, appendix
    B). For the hardware FLOPs utilization, call `compute_utilization` with the FLOP/s per device
    that follow from `flops` with `recompute` and `flash`.

    Raises `ValueError` if the utilization without masked pairs exceeds 1. Full attention counts
    masked pairs too, so with `attention="full"` the result itself may exceed 1.
    """
    work = flops(model, seq=seq, attention=attention)
    useful = work.total if include_attention else work.total - count_attention_operations(work)
    utilization = compute_utilization(useful / seq * tokens_per_second / devices, **peak)
    executed = utilization * flops(model, seq=seq).total / work.total
    if executed > 1:
        raise ValueError(
            f"expected a utilization <= 1, got {executed:.4g} for {tokens_per_second=} of"
            f" {devices=}; pass the number of all devices that reach this rate, the peak of one"
            " device in FLOP/s, and the dtype of the matrix products"
        )
    return utilization


def count_attention_operations(work: Breakdown) -> int | float:
    """Return the operations of the parts "attention" and "index" of `work`, a result of `flops`.

    Operations in the part "recomputed" are not included.
    """
    return sum(part.total for part in work if part.name in ("attention", "index"))


@checks.validate()
def compute_utilization(
    achieved_flops: float,
    *,
    hardware: str | Hardware | None = None,
    dtype: str = "bf16",
    peak_flops: float | None = None,
) -> float:
    """Return the achieved operations per second and device as a fraction of the dense peak.

    Raises `ValueError` unless exactly one of `hardware` and `peak_flops` is passed.
    """
    if (hardware is None) == (peak_flops is None):
        raise ValueError(
            f"expected exactly one of hardware and peak_flops, got {hardware=} and {peak_flops=}"
        )
    peak = peak_flops if hardware is None else find(hardware).peak(dtype)
    return achieved_flops / checks.require_number("peak_flops", peak)


def _iter_parts(model: Transformer, inputs: Mapping[str, int], passes: int) -> Iterator[Breakdown]:
    """Yield the operations of the weight matrices and scans, grouped as in `parameters`."""
    for part, listed in group_by_part(model):
        leaves = []
        for matrix in listed:
            sizes = _collect_multiplicities(matrix, inputs) | {"ops": 2, "rows": matrix.rows}
            if matrix.kind == "matrix":
                leaf = multiply(matrix.name, UNIT, passes=passes, **sizes, columns=matrix.columns)
                leaves.append(leaf)
        for mixer in model.mixers:
            if mixer.name == part:
                factors = {"tokens": inputs["tokens"], "layers": len(mixer.layers)}
                leaves.append(multiply("scan", UNIT, passes=passes, **factors, ops=mixer.scan))
        # The part `attention` contains the products of queries, keys and values, so its weight
        # matrices are listed as `projections`.
        yield sum_parts("projections" if part == "attention" else part, UNIT, *leaves)
    if model.lm_head and model.tied:
        sizes = {"ops": 2, "rows": model.embedding_dim, "columns": model.vocab_size}
        leaf = multiply("matrix", UNIT, passes=passes, tokens=inputs["last"], **sizes)
        yield sum_parts("head", UNIT, leaf)


def _collect_multiplicities(matrix: Matrix, inputs: Mapping[str, int]) -> dict[str, int]:
    """Return the factors that multiply a matrix's operations: tokens, layers, experts per token."""
    factors = {"tokens": inputs[matrix.applies_to] - matrix.skips * inputs["sequence"]}
    if matrix.layers is not None:
        factors["layers"] = len(matrix.layers)
    if matrix.routed:
        factors["experts"] = matrix.chosen
    return factors


def _count_attention(
    model: Transformer,
    batch: int,
    seq: int,
    passes: int,
    attention: Attention,
    decode: bool = False,
) -> Breakdown:
    full_pairs, windowed_pairs = count_pairs(model, seq, attention)
    if decode and attention == "full":
        full_pairs = windowed_pairs = seq
    elif decode:
        full_pairs = min(seq, model.mla.index_top or seq) if model.mla else seq
        windowed_pairs = _count_windowed_keys(model, seq)
    parts = []
    for group in model.attention_groups:
        widths = {"scores": group.qk_dim, "values": group.v_head_dim}
        if decode and model.mla:
            # A query is projected to the latent's width, and the weighted latent to the output. So
            # the up-projection multiplies only the new token.
            latent = model.mla.kv_rank
            widths = {"scores": latent + model.mla.rope_head_dim, "values": latent}
        sizes = {"sequences": batch, "layers": len(group.layers), "ops": 2, "heads": model.heads}
        num_pairs = windowed_pairs if group.is_windowed else full_pairs
        for name, width in widths.items():
            name += group.suffix
            leaf = multiply(name, UNIT, passes=passes, **sizes, width=width, pairs=num_pairs)
            parts.append(leaf)
    for mixer in model.mixers:
        if mixer.compressed:
            sizes = {"sequences": batch, "layers": len(mixer.layers), "ops": 2}
            sizes |= {"heads": model.heads, "width": model.head_dim}
            num_pairs = count_entry_pairs(mixer.compressed, seq, attention, decode)
            for name in ("scores", "values"):
                name += f" of {mixer.name}"
                parts.append(multiply(name, UNIT, passes=passes, **sizes, pairs=num_pairs))
    return sum_parts("attention", UNIT, *parts)


def _iter_entry_indexes(
    model: Transformer, batch: int, seq: int, passes: int, attention: Attention, decode: bool
) -> Iterator[Breakdown]:
    """Yield the operations of the indexes that score all compressed entries of earlier tokens."""
    for mixer in model.mixers:
        entries = mixer.compressed
        if entries and entries.index_heads:
            num_pairs = count_entry_pairs(replace(entries, index_top=seq), seq, attention, decode)
            sizes = {"sequences": batch, "layers": len(mixer.layers), "ops": 2}
            sizes |= {"heads": entries.index_heads, "width": entries.index_head_dim}
            yield multiply("index", UNIT, passes=passes, **sizes, pairs=num_pairs)


def count_entry_pairs(
    entries: Compressed, seq: int, attention: Attention = "causal", decode: bool = False
) -> int:
    """Return the number of pairs of a query and a compressed entry per sequence and layer.

    With causal attention, a query attends to the entries whose tokens are all at or before its own
    position, and an index selects at most `index_top` of these. With `decode`, only the last of
    `seq` tokens is a query.
    """
    rate = entries.rate
    stored = seq // rate
    if attention == "full":
        return stored if decode else seq * stored
    top = min(entries.index_top or stored, stored)
    if decode:
        return top
    # The token at position p, counted from 1, sees p // rate entries, until this number is `top`.
    return rate * top * (top - 1) // 2 + top * (seq - rate * top + 1)


def _count_windowed_keys(model: Transformer, seq: int) -> int:
    """Return the number of keys that the last of `seq` tokens attends to in a windowed layer."""
    if not model.window:
        return seq
    if model.window.chunked:
        return (seq - 1) % model.window.size + 1
    return min(model.window.size, seq)


def _iter_recomputed(
    model: Transformer,
    cores: list[Breakdown],
    recompute: Recompute,
    flash: bool,
    inputs: Mapping[str, int],
) -> Iterator[Breakdown]:
    """Yield the operations that the backward pass recomputes, by part.

    `cores` are the parts "attention" and "index" of one forward pass. A `flash` kernel recomputes
    the scores even without activation checkpointing.
    """
    if recompute == "full":
        forward = sum(int(core.total) for core in cores) + sum(
            2 * matrix.entries * math.prod(_collect_multiplicities(matrix, inputs).values())
            for matrix in list_matrices(model)
            if matrix.kind == "matrix" and matrix.layers is not None
        )
        forward += sum(inputs["tokens"] * len(mixer.layers) * mixer.scan for mixer in model.mixers)
        yield multiply("blocks", UNIT, "a second forward", forward=forward)
    elif recompute == "selective":
        yield from (core for core in cores if core.name != "index")
    if flash:
        scores = [part for core in cores for part in core.parts if part.name.startswith("scores")]
        yield sum_parts("scores in the flash backward", UNIT, *scores)

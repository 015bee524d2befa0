"""What a decoder costs, by hand: parameters, FLOPs, memory, bytes on the wire.

A Llama-like decoder: RMSNorm, grouped queries, a gated MLP, an embedding and a head of its own.
This page is the specification: the package gives these numbers and knows more kinds of models.
"""

from math import ceil


def parameters(layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int) -> int:
    """Query and out are (d, d), key and value narrower by kv_heads / heads; an MLP has three."""
    attention = 2 * d * d + 2 * d * (d // heads * kv_heads)
    mlp = 3 * d * d_ff
    norms = 2 * d
    return layers * (attention + mlp + norms) + 2 * vocab * d + d


def flops(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int, batch: int, seq: int
) -> int:
    """Of a training step: a multiply and an add an entry and token forward, twice that backward.

    Attention multiplies each query with the keys before it and itself, s(s+1)/2 pairs, and each
    probability with a value: two products of width d over all heads.
    """
    matrices = layers * (2 * d * d + 2 * d * (d // heads * kv_heads) + 3 * d * d_ff) + vocab * d
    pairs = batch * seq * (seq + 1) // 2
    forward = 2 * matrices * batch * seq + 2 * 2 * layers * d * pairs
    return 3 * forward


def states(count: int, ranks: int, zero: int) -> int:
    """Weights, gradients and Adam in mixed precision: 2 + 2 + 12 bytes a parameter.

    ZeRO shards the optimizer from stage 1 on, gradients from 2, weights from 3 (Rajbhandari et al.
    2020, section 5).
    """
    share = ceil(count / ranks)
    weights = 2 * (share if zero >= 3 else count)
    gradients = 2 * (share if zero >= 2 else count)
    optimizer = 12 * (share if zero >= 1 else count)
    return weights + gradients + optimizer


def activations(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, tokens: int, bytes: int = 2
) -> int:
    """What the blocks keep for the backward, each tensor once, with flash attention.

    A norm keeps its input and one number a token, a linear layer its input, the gated product its
    two factors and the gate's activation its input, attention q, k, v, the output and a number a
    head.
    """
    narrow = d // heads * kv_heads
    norms = 2 * (bytes * d + 4)
    attention = bytes * (d + d + 2 * narrow + d) + 4 * heads  # its input, q, k and v, the output
    mlp = bytes * (d + 4 * d_ff)  # its input; gate, its activation, up, and their product
    return layers * tokens * (norms + attention + mlp)


def cache(layers: int, d: int, heads: int, kv_heads: int, tokens: int, bytes: int = 2) -> int:
    """Keys and values of every token in every layer."""
    return 2 * layers * (d // heads * kv_heads) * tokens * bytes


def ring(payload: float, ranks: int) -> float:
    """Bytes that one device sends in a ring all-reduce: each half sends (n-1)/n of the payload."""
    return 2 * (ranks - 1) * payload / ranks


def data_parallel(count: int, ranks: int, zero: int) -> float:
    """Bytes that one device sends a step, in 16 bits, where nothing is accumulated."""
    half = (ranks - 1) * 2 * count / ranks
    if zero == 0:
        return ring(2 * count, ranks)  # all-reduce of the gradients
    if zero < 3:
        return half + half  # reduce-scatter of the gradients, all-gather of the new weights
    return 3 * half  # weights gathered for the forward and for the backward, gradients scattered


def bubble(stages: int, microbatches: int) -> float:
    """Idle share of a pipeline's work (Narayanan et al. 2021, section 2.2)."""
    return (stages - 1) / microbatches


def days(
    step_flops: float,
    tokens_a_step: float,
    tokens: float,
    devices: int,
    peak: float,
    utilization: float,
) -> float:
    """How long a run takes at a share of the peak."""
    return step_flops * tokens / tokens_a_step / (devices * peak * utilization) / 86_400

"""The cost of a decoder by textbook formulas: parameters, FLOPs, memory and communication.

The model is a Llama-like decoder with RMSNorm, grouped-query attention, a gated MLP, and an untied
embedding and head. Tests compare the package with these formulas.
"""

from math import ceil


def parameters(layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int) -> int:
    """Return the number of parameters.

    Query and output projections are (d, d). Key and value projections are narrower by a factor of
    kv_heads / heads. A gated MLP has three matrices.
    """
    attention = 2 * d * d + 2 * d * (d // heads * kv_heads)
    mlp = 3 * d * d_ff
    norms = 2 * d
    return layers * (attention + mlp + norms) + 2 * vocab * d + d


def flops(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int, batch: int, seq: int
) -> int:
    """Return the FLOPs of one training step with causal attention.

    Each matrix entry costs one multiply and one add per token in the forward pass, and twice that
    in the backward pass. Attention multiplies each query with the keys up to its position, which
    makes s(s + 1)/2 pairs, and then each probability with a value. Each product has
    width d over all heads.
    """
    matrices = layers * (2 * d * d + 2 * d * (d // heads * kv_heads) + 3 * d * d_ff) + vocab * d
    pairs = batch * seq * (seq + 1) // 2
    forward = 2 * matrices * batch * seq + 2 * 2 * layers * d * pairs
    return 3 * forward


def states(count: int, ranks: int, zero: int) -> int:
    """Return the bytes per rank of weights, gradients and Adam states in mixed precision.

    Without sharding, these are 2, 2 and 12 bytes per parameter. ZeRO shards the optimizer from
    stage 1, gradients from stage 2 and weights from stage 3 (Rajbhandari et al. 2020, section 5).
    """
    shard = ceil(count / ranks)
    weights = 2 * (shard if zero >= 3 else count)
    gradients = 2 * (shard if zero >= 2 else count)
    optimizer = 12 * (shard if zero >= 1 else count)
    return weights + gradients + optimizer


def activations(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, tokens: int, bytes: int = 2
) -> int:
    """Return the bytes that the blocks save for the backward with flash attention.

    Each tensor counts once. A norm saves its input and one fp32 statistic per token. A linear layer
    saves its input. The gated product saves its two factors, and the gate's activation saves its
    input. Attention saves q, k, v, the output, and one fp32 number per head and token.
    """
    narrow = d // heads * kv_heads
    norms = 2 * (bytes * d + 4)
    attention = bytes * (d + d + 2 * narrow + d) + 4 * heads  # its input, q, k and v, the output
    mlp = bytes * (d + 4 * d_ff)  # its input; gate, its activation, up, and their product
    return layers * tokens * (norms + attention + mlp)


def cache(layers: int, d: int, heads: int, kv_heads: int, tokens: int, bytes: int = 2) -> int:
    """Return the bytes of the KV cache for all layers."""
    return 2 * layers * (d // heads * kv_heads) * tokens * bytes


def ring(payload: float, ranks: int) -> float:
    """Return the bytes that one device sends in a ring all-reduce of `payload` bytes.

    Each of the two phases sends (n-1)/n of the payload.
    """
    return 2 * (ranks - 1) * payload / ranks


def data_parallel(count: int, ranks: int, zero: int, ends: int = 0) -> float:
    """Return the bytes of 16-bit gradients and weights that one device sends per step.

    The step is assumed to have one micro-batch. FSDP keeps the `ends`, which are the weights
    outside the blocks, gathered between the forward and the backward pass.
    """
    half = (ranks - 1) * 2 * count / ranks
    if zero == 0:
        return ring(2 * count, ranks)  # all-reduce of the gradients
    if zero < 3:
        return half + half  # reduce-scatter of the gradients, all-gather of the new weights
    # Weights are gathered for the forward and for the backward, and gradients are scattered.
    return 3 * half - (ranks - 1) * 2 * ends / ranks


def bubble(stages: int, microbatches: int) -> float:
    """Return the idle time of a pipeline as a fraction of its work.

    See Narayanan et al. 2021, section 2.2.
    """
    return (stages - 1) / microbatches

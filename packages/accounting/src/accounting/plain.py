"""The cost of a decoder by textbook formulas: parameters, FLOPs, memory and communication.

The model is a Llama-like decoder with RMSNorm, grouped-query attention, a gated MLP, and an untied
embedding and head. Tests compare the package with these formulas.
"""

from math import ceil


def parameters(layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int) -> int:
    """Return the number of parameters.

    Query and output projections are (d, d). Key and value projections are (d, d kv_heads / heads).
    A gated MLP has three (d, d_ff) matrices. Each block has two norms, and the model a final norm.
    """
    attention = 2 * d * d + 2 * d * (d // heads * kv_heads)
    mlp = 3 * d * d_ff
    norms = 2 * d
    return layers * (attention + mlp + norms) + 2 * vocab * d + d


def flops(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, vocab: int, batch: int, seq: int
) -> int:
    """Return the FLOPs of one training step with causal attention.

    In the forward pass, each matrix entry costs one multiply and one add per token. A sequence of s
    tokens has s(s + 1)/2 pairs of a query and a key up to its position. Over all heads, each pair
    costs d multiply-adds for the score and d for the weighted value. The backward pass costs twice
    the forward pass.
    """
    entries = layers * (2 * d * d + 2 * d * (d // heads * kv_heads) + 3 * d * d_ff) + vocab * d
    pairs = batch * seq * (seq + 1) // 2
    forward = 2 * entries * batch * seq + 2 * 2 * layers * d * pairs
    return 3 * forward


def count_state_bytes(num_parameters: int, ranks: int, zero: int) -> int:
    """Return the bytes per rank of weights, gradients and Adam states in mixed precision.

    Without sharding, these are 2, 2 and 12 bytes per parameter: Adam has an fp32 copy of the
    weights and two moments. ZeRO shards the optimizer from stage 1, gradients from stage 2 and
    weights from stage 3 (Rajbhandari et al. 2020, section 5).
    """
    shard = ceil(num_parameters / ranks)
    weights = 2 * (shard if zero >= 3 else num_parameters)
    gradients = 2 * (shard if zero >= 2 else num_parameters)
    optimizer = 12 * (shard if zero >= 1 else num_parameters)
    return weights + gradients + optimizer


def count_activation_bytes(
    layers: int, d: int, heads: int, kv_heads: int, d_ff: int, tokens: int
) -> int:
    """Return the bytes that the blocks save for the backward pass in 16 bits with flash attention.

    Each tensor counts once. A norm saves its input and one fp32 statistic per token. A linear layer
    saves its input. The gated product saves its two factors, and the gate's activation saves its
    input. Attention saves q, k, v, the output, and one fp32 number per head and token.
    """
    d_kv = d // heads * kv_heads
    norms = 2 * (2 * d + 4)
    attention = 2 * (d + d + 2 * d_kv + d) + 4 * heads  # its input; q, k and v; the output
    mlp = 2 * (d + 4 * d_ff)  # its input; the gate, its activation, up, and their product
    return layers * tokens * (norms + attention + mlp)


def count_kv_cache_bytes(layers: int, d: int, heads: int, kv_heads: int, tokens: int) -> int:
    """Return the bytes of the KV cache of all layers in 16 bits."""
    d_kv = d // heads * kv_heads
    return 2 * 2 * layers * d_kv * tokens  # keys and values, 2 bytes per number


def count_ring_all_reduce_bytes(payload: float, ranks: int) -> float:
    """Return the bytes that one device sends in a ring all-reduce of `payload` bytes.

    Each of the two phases, reduce-scatter and all-gather, sends (n-1)/n of the payload.
    """
    return 2 * (ranks - 1) * payload / ranks


def count_data_parallel_bytes(num_parameters: int, ranks: int, zero: int, ends: int = 0) -> float:
    """Return the bytes of 16-bit gradients and weights that one device sends per step.

    The step is assumed to have one micro-batch. `ends` is the number of parameters outside the
    blocks. FSDP keeps them gathered between the forward and the backward pass.
    """
    if zero == 0:
        return count_ring_all_reduce_bytes(2 * num_parameters, ranks)  # all-reduce of the gradients
    phase_bytes = 2 * num_parameters * (ranks - 1) / ranks  # one all-gather or reduce-scatter
    if zero < 3:
        return 2 * phase_bytes  # reduce-scatter of the gradients, all-gather of the new weights
    # Weights are gathered for the forward and for the backward, and gradients are scattered.
    return 3 * phase_bytes - 2 * ends * (ranks - 1) / ranks


def bubble_fraction(stages: int, microbatches: int) -> float:
    """Return the idle time of a pipeline divided by its compute time (Narayanan et al. 2021)."""
    return (stages - 1) / microbatches

"""Attention heads as functions of their circuits.

W_QK determines the attention pattern A of a head, and W_OV determines the vectors that the head
moves. The output of an attention is the sum of A x W_OV^T over its heads (Elhage et al. 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank


def compute_circuit_pattern(
    x: Tensor, qk: LowRank | Tensor, *, scale: float = 1.0, causal: bool = True
) -> Tensor:
    """Return softmax(x W_QK x^T scale), (..., seq, seq), for streams `x` (..., seq, d_model).

    The leading dimensions of `qk`, such as heads, broadcast against the leading dimensions of `x`.
    """
    scores = (x @ qk.a) @ (qk.b @ x.mT) if isinstance(qk, LowRank) else x @ qk @ x.mT
    scores = scores * scale
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(future.triu(keys - queries + 1), float("-inf"))
    return scores.softmax(dim=-1)


def apply_attention_head(
    x: Tensor, qk: LowRank | Tensor, ov: LowRank | Tensor, *, scale: float = 1.0
) -> Tensor:
    """Return A (x W_OV^T) of a causal head, (..., seq, d_model); A is its pattern."""
    moved = ov.apply(x) if isinstance(ov, LowRank) else x @ ov.mT
    return compute_circuit_pattern(x, qk, scale=scale) @ moved

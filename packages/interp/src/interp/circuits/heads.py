"""Attention heads as plain functions of their circuits, by increasing complexity.

A head is where it looks (W_QK, through a softmax) and what it moves from there (W_OV). Heads add:
the concatenation in front of W_O is the sum of one W_O W_V product a head. Elhage et al. 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank, require_alike


def circuit_pattern(
    x: Tensor, qk: LowRank | Tensor, *, scale: float = 1.0, causal: bool = True
) -> Tensor:
    """softmax(x W_QK x^T scale), (..., seq, seq), for stream vectors `x` (..., seq, d_model).

    A batch of circuits (heads) broadcasts against the leading dimensions of `x`.
    """
    require_alike("the stream and W_QK", x, qk.a if isinstance(qk, LowRank) else qk)
    scores = (x @ qk.a) @ (qk.b @ x.mT) if isinstance(qk, LowRank) else x @ qk @ x.mT
    return _softmax(scores * scale, causal)


def attention_head(
    x: Tensor,
    qk: LowRank | Tensor,
    ov: LowRank | Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
) -> Tensor:
    """What one head adds to the stream, A (x W_OV^T), (..., seq, d_model)."""
    require_alike("the stream and W_OV", x, ov.a if isinstance(ov, LowRank) else ov)
    moved = ov.apply(x) if isinstance(ov, LowRank) else x @ ov.mT
    return circuit_pattern(x, qk, scale=scale, causal=causal) @ moved


def heads_by_addition(
    x: Tensor, qk: LowRank, ov: LowRank, *, scale: float = 1.0, causal: bool = True
) -> Tensor:
    """Attention as a sum over heads of circuits with batch (heads,); `x` is (..., seq, d_model)."""
    return attention_head(x.unsqueeze(-3), qk, ov, scale=scale, causal=causal).sum(dim=-3)


def heads_by_concatenation(pattern: Tensor, x: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """The same as implementations do it: mix the values by head, concatenate, project once.

    `pattern` (..., heads, seq, seq), `x` (..., seq, d_model), `w_v` and `w_o` weights of
    `nn.Linear`.
    """
    values = (x @ w_v.mT).reshape(*x.shape[:-1], pattern.shape[-3], -1).transpose(-3, -2)
    return (pattern @ values).transpose(-3, -2).flatten(-2) @ w_o.mT


def _softmax(scores: Tensor, causal: bool) -> Tensor:
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(future.triu(keys - queries + 1), float("-inf"))
    return scores.softmax(dim=-1)

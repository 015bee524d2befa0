"""Minimal implementation of FlashAttention-2 in PyTorch.

`attention` computes attention from its definition. `forward_pass` and `backward_pass` are
Algorithms 1 and 2 of Dao, "FlashAttention-2" (2023, arXiv 2307.08691), with the paper's names. They
never store the score matrix. `PlainAttention.apply(Q, K, V, is_causal)` is differentiable. Tests
compare the backends "torch" and "auto" with this file.

Shapes: Q is `[batch, N, d]`, K and V are `[batch, M, d]`, with N = M for causal attention. A tile
has at most B rows of Q or of K.
"""

from typing import Any

import torch
from torch import Tensor

B = 64


def attention(Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
    """Return softmax(QK^T / sqrt(d)) V from its definition, with all N x M scores in memory."""
    S = Q @ K.mT / Q.shape[-1] ** 0.5
    if is_causal:
        S = S.masked_fill(make_mask(0, S.shape[-2], 0, S.shape[-1]), -torch.inf)
    return S.softmax(-1) @ V


def make_mask(i: int, i_end: int, j: int, j_end: int) -> Tensor:
    """Return a mask `[i_end - i, j_end - j]` that is True where the key comes after the query."""
    return torch.arange(j, j_end) > torch.arange(i, i_end)[:, None]


def list_tile_ranges(length: int) -> list[tuple[int, int]]:
    """Return the row range `(start, stop)` of each tile."""
    return [(start, min(start + B, length)) for start in range(0, length, B)]


def compute_scores(Q_i: Tensor, K_j: Tensor, i: int, j: int, is_causal: bool) -> Tensor:
    """Return one tile of S, at most `[batch, B, B]`."""
    S_ij = Q_i @ K_j.mT / Q_i.shape[-1] ** 0.5
    if is_causal:
        S_ij = S_ij.masked_fill(make_mask(i, i + Q_i.shape[-2], j, j + K_j.shape[-2]), -torch.inf)
    return S_ij


def forward_pass(Q: Tensor, K: Tensor, V: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output O `[batch, N, d]` and the log-sum-exp L `[batch, N]`: Algorithm 1."""
    O = torch.empty_like(Q)
    L = Q.new_empty(Q.shape[:-1])
    for i, i_end in list_tile_ranges(Q.shape[-2]):
        Q_i = Q[:, i:i_end]
        O_i = torch.zeros_like(Q_i)  # running sum of exp(S - m) V
        l_i = Q_i.new_zeros(Q_i.shape[:-1])  # running sum of exp(S - m)
        m_i = torch.full_like(l_i, -torch.inf)  # running maximum of S
        for j, j_end in list_tile_ranges(K.shape[-2]):
            if is_causal and j >= i_end:
                break  # all later tiles are hidden; skipping them saves half of the work
            S_ij = compute_scores(Q_i, K[:, j:j_end], i, j, is_causal)
            m_new = torch.maximum(m_i, S_ij.amax(-1))
            P_ij = torch.exp(S_ij - m_new[..., None])
            # The running sums are relative to the old maximum: rescale them to the new one.
            rescale = torch.exp(m_i - m_new)
            l_i = rescale * l_i + P_ij.sum(-1)
            O_i = rescale[..., None] * O_i + P_ij @ V[:, j:j_end]
            m_i = m_new
        O[:, i:i_end] = O_i / l_i[..., None]  # normalized once, after the loop
        L[:, i:i_end] = m_i + l_i.log()  # the backward pass recomputes P from L
    return O, L


def backward_pass(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, L: Tensor, dO: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV: Algorithm 2, which recomputes each tile of P from L."""
    dQ = torch.zeros_like(Q)
    dK = torch.zeros_like(K)
    dV = torch.zeros_like(V)
    D = (dO * O).sum(-1)  # = rowsum(P * dP), subtracted from dP by the derivative of softmax
    for j, j_end in list_tile_ranges(K.shape[-2]):
        K_j = K[:, j:j_end]
        V_j = V[:, j:j_end]
        for i, i_end in list_tile_ranges(Q.shape[-2]):
            if is_causal and j >= i_end:
                continue
            Q_i = Q[:, i:i_end]
            dO_i = dO[:, i:i_end]
            S_ij = compute_scores(Q_i, K_j, i, j, is_causal)
            P_ij = torch.exp(S_ij - L[:, i:i_end, None])
            dV[:, j:j_end] += P_ij.mT @ dO_i
            dP_ij = dO_i @ V_j.mT
            dS_ij = P_ij * (dP_ij - D[:, i:i_end, None]) / Q.shape[-1] ** 0.5
            dQ[:, i:i_end] += dS_ij @ K_j
            dK[:, j:j_end] += dS_ij.mT @ Q_i
    return dQ, dK, dV


class PlainAttention(torch.autograd.Function):
    """Attention as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """Return the output, and save O and L instead of the N x M probabilities."""
        O, L = forward_pass(Q, K, V, is_causal)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of Q, K and V."""
        Q, K, V, O, L = ctx.saved_tensors
        return *backward_pass(Q, K, V, O, L, dO, ctx.is_causal), None

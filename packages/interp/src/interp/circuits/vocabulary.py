"""Circuits from token to token, for any vocabulary, without a vocabulary-squared matrix.

    zero layers      W_U W_E            what follows a token (bigrams)
    a head, OV       W_U W_OV W_E       what attending to a token adds to the logits
    a head, QK       W_E^T W_QK W_E     which token attends to which

All are `LowRank`; column t belongs to the source token t. `embed` and `unembed` are (vocabulary,
d_model), as `nn.Embedding` and `nn.Linear` hold them. Elhage et al. 2021, "Detecting Copying".
"""

from __future__ import annotations

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank, decomposable, require_alike

# Entries of a block of columns that exist at once: 32 MiB in float32.
_BLOCK_NUMBERS = 1 << 23


def bigrams(embed: Tensor, unembed: Tensor) -> LowRank:
    """The zero-layer transformer, W_U W_E: column t holds the logits after token t."""
    return LowRank(unembed, embed.mT)


def full_ov(ov: LowRank, embed: Tensor, unembed: Tensor) -> LowRank:
    """W_U W_OV W_E of every head: entry (s, t) is what attending to t adds to the logit of s."""
    return unembed @ ov @ embed.mT


def full_qk(qk: LowRank, embed: Tensor) -> LowRank:
    """W_E^T W_QK W_E of every head: entry (s, t) is the score of query token s on key token t."""
    return embed @ qk @ embed.mT


def copying_eigenvalues(ov: LowRank, embed: Tensor, unembed: Tensor) -> Tensor:
    """The eigenvalues of W_U W_OV W_E that can differ from 0, complex (..., d_head).

    W_U (A B) W_E shares them with B (W_E W_U) A, and the d_model x d_model matrix W_E W_U is the
    same for all heads: the vocabulary is summed over once, not once per head. Half precision is
    computed in float32.
    """
    require_alike("the circuits and the embeddings", ov.a, embed, unembed)
    through: Tensor = decomposable(embed).mT @ decomposable(unembed)
    values: Tensor = torch.linalg.eigvals(decomposable(ov.b) @ through @ decomposable(ov.a))
    return values


def copying_scores(ov: LowRank, embed: Tensor, unembed: Tensor) -> Tensor:
    """sum(eigenvalues) / sum(|eigenvalues|) of W_U W_OV W_E, in [-1, 1]; 1 for pure copying."""
    values = copying_eigenvalues(ov, embed, unembed)
    return values.real.sum(-1) / values.abs().sum(-1)


def top_entries(matrix: LowRank, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(values, rows, columns)` of each matrix's largest entries, (..., count), largest first."""
    rows, columns = matrix.shape[-2:]
    if not 0 < count <= rows * columns:
        raise ValueError(f"count {count} is not within 1 and the {rows * columns} entries")
    best = matrix.a.new_full((*matrix.batch_shape, 0), 0)
    where = torch.zeros_like(best, dtype=torch.long)
    width = max(1, _BLOCK_NUMBERS // (matrix.batch_shape.numel() * rows))
    for chosen in torch.arange(columns, device=matrix.a.device).split(width):
        flat = (matrix.a @ matrix.b[..., chosen]).flatten(-2)
        values, places = flat.topk(min(count, flat.shape[-1]), dim=-1)
        places = places // len(chosen) * columns + chosen[places % len(chosen)]
        best, where = torch.cat([best, values], -1), torch.cat([where, places], -1)
        best, kept = best.topk(min(count, best.shape[-1]), dim=-1)
        where = where.gather(-1, kept)
    return best, where // columns, where % columns

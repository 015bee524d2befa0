"""Token-to-token circuits that never materialize a (vocabulary, vocabulary) matrix.

    zero layers      W_U W_E            LowRank(unembed, embed.mT)
    a head, OV       W_U W_OV W_E       unembed @ ov @ embed.mT
    a head, QK       W_E^T W_QK W_E     embed @ qk @ embed.mT

Entry (s, t) of the first matrix is the logit of token s after token t (bigrams). In the second
matrix, it is the term that the head adds to the logit of s if it attends to t only. In the third
matrix, it is the attention score of query s and key t, before the scale 1 / sqrt(d_head). The
matrices are `LowRank`; `embed` and `unembed` are weights (vocabulary, d_model). Elhage et al. 2021.
"""

from __future__ import annotations

from torch import Tensor

from interp.circuits.low_rank import LowRank, as_decomposable, compute_eigenvalues


def copying_eigenvalues(ov: LowRank, embed: Tensor, unembed: Tensor) -> Tensor:
    """Return the eigenvalues of W_U W_OV W_E that can be nonzero, complex (..., d_head).

    They are the eigenvalues of B (W_E W_U) A with W_OV = A B. W_E W_U (d_model, d_model) is
    computed once for all heads, in float32 for half precision. Raises ValueError for nan and inf.
    """
    through: Tensor = as_decomposable(embed).mT @ as_decomposable(unembed)
    return compute_eigenvalues(as_decomposable(ov.b) @ through @ as_decomposable(ov.a))


def copying_scores(ov: LowRank, embed: Tensor, unembed: Tensor) -> Tensor:
    """Return sum(eigenvalues) / sum(|eigenvalues|) of W_U W_OV W_E, (...), one number per head.

    The score of a head that only copies is 1. It is nan if all eigenvalues are 0.
    """
    eigenvalues = copying_eigenvalues(ov, embed, unembed)
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)

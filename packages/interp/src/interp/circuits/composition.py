"""Q-, K- and V-composition scores of all pairs of heads.

    score(1 -> 2) = ||W_2 W_1|| / (||W_2|| ||W_1||)          Elhage et al. 2021

Here W_1 = W_OV of the earlier head, and W_2 = W_QK^T (queries), W_QK (keys) or W_OV (values) of the
later head. Let W_i = a_i b_i, with the QR decompositions a_2 = Q_2 R_2 and b_1^T = Q_1 R_1.
Orthonormal factors do not change the Frobenius norm, so ||W_2 W_1|| = ||(R_2 b_2) (a_1 R_1^T)||.
One matrix product multiplies the two factors in parentheses for all heads of an earlier layer and
several heads of later layers.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank, as_decomposable

Kind = Literal["q", "k", "v"]

#: Maximum number of entries per matrix product (2 MiB in float32); larger products are not faster.
#: It is exceeded only if a single later head needs more.
_MAX_PRODUCT_ENTRIES = 1 << 19


def composition_scores(ov: LowRank, qk: LowRank | None = None, *, kind: Kind) -> Tensor:
    """Return the score of each pair of heads, (layer_1, head_1, layer_2, head_2).

    Scores are 0 unless layer_1 < layer_2. `ov` and `qk` contain the circuits of all heads, with
    batch shape (layers, heads); `qk` is not needed for `kind="v"`. The score of two random circuits
    is about 1 / sqrt(d_model). Half precision is converted to float32. Raises ValueError for an
    unknown `kind`, a missing `qk`, and circuits whose shapes do not multiply, and TypeError for
    other objects than `LowRank`.
    """
    reader = _select_reader(ov, qk, kind)
    layers, heads = ov.batch_shape
    reads, writes = _fold(reader.mT).mT, _fold(ov)
    scores = writes.new_zeros(layers, heads, layers, heads)
    for layer in range(layers - 1):
        scores[layer, :, layer + 1 :] = _compute_pair_norms(reads[layer + 1 :], writes[layer])
    # Folding also preserves the ratios between the norms of products and of circuits.
    writer_norms = torch.linalg.matrix_norm(writes)
    norms: Tensor = writer_norms[:, :, None, None] * torch.linalg.matrix_norm(reads)
    return scores / norms.clamp_min(torch.finfo(scores.dtype).tiny)


def _select_reader(ov: LowRank, qk: LowRank | None, kind: Kind) -> LowRank:
    if kind not in ("q", "k", "v"):
        raise ValueError(f"expected kind 'q', 'k' or 'v', got {kind!r}")
    for name, circuits in (("ov", ov), ("qk", qk)):
        if circuits is not None and not isinstance(circuits, LowRank):
            raise TypeError(
                f"expected a LowRank as {name}, got a {type(circuits).__name__}; pass decoder.ov() "
                "and decoder.qk()"
            )
    if kind == "v":
        reader = ov
    elif qk is None:
        raise ValueError(f"expected the QK circuits for kind {kind!r}, got None; pass qk=")
    else:
        reader = qk if kind == "k" else qk.mT
    if len(ov.batch_shape) != 2 or ov.batch_shape != reader.batch_shape:
        shapes = f"{tuple(ov.batch_shape)} and {tuple(reader.batch_shape)}"
        raise ValueError(f"circuits have batch shapes {shapes}; both must be (layers, heads)")
    if ov.shape[-2] != reader.shape[-1]:
        raise ValueError(
            f"earlier heads write {ov.shape[-2]} dimensions, later heads read {reader.shape[-1]}; "
            "pass circuits of one model"
        )
    return reader


def _fold(matrix: LowRank) -> Tensor:
    """Return `a R^T` with b^T = Q R: `a b` is the result times Q^T, which has orthonormal rows.

    The result is also multiplied by a positive factor, which does not change scores.
    """
    a, b = _normalize(as_decomposable(matrix.a)), _normalize(as_decomposable(matrix.b))
    triangle: Tensor = torch.linalg.qr(b.mT, mode="r").R
    return (a @ triangle.mT).expand(*matrix.batch_shape, -1, -1)


def _normalize(x: Tensor) -> Tensor:
    """Return matrices with a largest absolute entry of 1, to avoid overflow and underflow."""
    largest = torch.linalg.vector_norm(x, ord=math.inf, dim=(-2, -1), keepdim=True)
    return x / largest.where(largest > 0, 1)


def _compute_pair_norms(reads: Tensor, writes: Tensor) -> Tensor:
    """Return ||reads[l, i] @ writes[h]||, (h, l, i), of reads (l, i, r, d) and writes (h, d, s)."""
    layers, heads, rank, d_model = reads.shape
    columns = writes.movedim(0, 1).reshape(d_model, -1)
    heads_per_product = max(1, _MAX_PRODUCT_ENTRIES // (rank * columns.shape[1]))
    norms = []
    for block in torch.split(reads.reshape(-1, rank, d_model), heads_per_product):
        product = (block.reshape(-1, d_model) @ columns).view(len(block), rank, len(writes), -1)
        norms.append(torch.linalg.vector_norm(product, dim=(1, 3)))
        del product  # The next product reuses this memory.
    return torch.cat(norms).T.reshape(len(writes), layers, heads)

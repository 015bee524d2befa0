"""Q-, K- and V-composition scores of all pairs of heads.

    score(1 -> 2) = ||W_2 W_1|| / (||W_2|| ||W_1||)          Elhage et al. 2021

Here W_1 = W_OV of the earlier head, and W_2 = W_QK^T (queries), W_QK (keys) or W_OV (values) of the
later head. The norm follows from Gram matrices, because the trace of a product does not depend on
the order of its factors:

    ||W_2 W_1||^2 = tr(W_1^T W_2^T W_2 W_1) = <W_2^T W_2, W_1 W_1^T>

A pair then needs the inner product of two symmetric d_model x d_model matrices, which has a sixth
of the FLOPs of a product of factors in GPT-2. With W_2 = a_2 b_2, the Gram matrix of a later head
is b_2^T (a_2^T a_2) b_2. A few of its rows are computed at a time, for all heads. The inner product
needs only the upper triangle.

If ||W_2 W_1|| is much smaller than the matrices allow, the terms of the inner product cancel, and
rounding errors remain. The norms of these pairs are computed directly. With the QR decompositions
a_2 = Q_2 R_2 and b_1^T = Q_1 R_1, the orthonormal factors do not change the norm, so
||W_2 W_1|| = ||(R_2 b_2) (a_1 R_1^T)||.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank, as_decomposable

Kind = Literal["q", "k", "v"]

#: The smallest inner product of two Gram matrices, relative to a bound of its terms, that is not
#: computed directly. In float32, the relative errors of scores above it are below 1e-5.
_MIN_INNER_PRODUCT = 1e-5
#: Number of pairs whose products are computed directly in one batch.
_DIRECT_PAIRS = 64


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
    scores = as_decomposable(ov.a).new_zeros(layers, heads, layers, heads)
    if layers > 1:
        # The last layer has no later heads, and the first layer has no earlier heads.
        pairs = _compute_pair_scores(_flatten(ov[:-1]), _flatten(reader.mT[1:]), heads)
        scores[:-1, :, 1:] = pairs.view(layers - 1, heads, layers - 1, heads)
    return scores


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


def _compute_pair_scores(writes: LowRank, reads: LowRank, heads: int) -> Tensor:
    """Return the scores of circuits W_1 = `writes` and W_2^T = `reads`, (n, n).

    Rows and columns are heads of successive layers. Entries below the diagonal of layers are 0.
    """
    write_grams, read_grams = _GramMatrices.build(writes), _GramMatrices.build(reads)
    products = writes.a.new_zeros(len(writes.a), len(reads.a))
    # Blocks of this many rows are not larger than a factor of the circuits.
    rows = min(writes.rank, reads.rank)
    for start in range(0, writes.a.shape[-2], rows):
        write_block = write_grams.compute_block(start, rows)
        read_block = read_grams.compute_block(start, rows)
        # Right of the square on the diagonal, each entry also stands for its mirror image.
        write_block[:, :, rows:] *= 2
        products.addmm_(write_block.flatten(1), read_block.flatten(1).T)
        del write_block, read_block  # The next blocks reuse this memory.
    norms = (write_grams.traces[:, None] * read_grams.traces).sqrt()
    scores = products.clamp_min(0).sqrt() / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    layers = torch.arange(len(writes.a), device=products.device) // heads
    is_pair = layers[:, None] <= layers
    is_accurate = products >= _MIN_INNER_PRODUCT * write_grams.bounds[:, None] * read_grams.bounds
    inaccurate = (is_pair & ~is_accurate).nonzero()
    if len(inaccurate):
        scores[tuple(inaccurate.T)] = _compute_directly(writes, reads, inaccurate)
    return scores.where(is_pair, 0)


@dataclass(frozen=True, eq=False)
class _GramMatrices:
    """The Gram matrices W W^T = a (b b^T) a^T of circuits W = a b with one batch dimension."""

    #: The factor a.
    a: Tensor
    #: The product a (b b^T).
    weighted: Tensor
    #: The trace of each Gram matrix, which is ||W||^2.
    traces: Tensor
    #: A bound of the norm of each Gram matrix and of the terms that are added for it. It is the
    #: norm of a^T a, times the largest absolute row sum of b b^T.
    bounds: Tensor

    @classmethod
    def build(cls, circuits: LowRank) -> _GramMatrices:
        a, b = circuits.a, circuits.b
        outer, inner = a.mT @ a, b @ b.mT
        traces = (outer * inner).sum((-2, -1)).clamp_min(0)
        row_sums: Tensor = torch.linalg.matrix_norm(inner, ord=math.inf)
        return cls(a, a @ inner, traces, torch.linalg.matrix_norm(outer) * row_sums)

    def compute_block(self, start: int, rows: int) -> Tensor:
        """Return `rows` rows of each Gram matrix, from the diagonal to the last column."""
        return self.weighted[:, start : start + rows] @ self.a[:, start:].mT


def _flatten(matrix: LowRank) -> LowRank:
    """Return the circuits with one batch dimension and factors of a size near 1.

    The positive factors by which circuits are scaled do not change scores.
    """
    a, b = (_normalize(as_decomposable(factor)) for factor in (matrix.a, matrix.b))
    a, b = (x.expand(*matrix.batch_shape, *x.shape[-2:]).flatten(0, 1) for x in (a, b))
    return LowRank(a, b)


def _normalize(x: Tensor) -> Tensor:
    """Return matrices with a largest absolute entry of 1, to avoid overflow and underflow."""
    largest = x.abs().amax((-2, -1), keepdim=True)
    return x / largest.where(largest > 0, 1)


def _compute_directly(writes: LowRank, reads: LowRank, pairs: Tensor) -> Tensor:
    """Return the scores of `pairs`, (n, 2), from products of their factors."""
    write_factors, read_factors = _fold(writes), _fold(reads)
    write_norms, read_norms = map(torch.linalg.matrix_norm, (write_factors, read_factors))
    scores = []
    for earlier, later in (chunk.unbind(1) for chunk in pairs.split(_DIRECT_PAIRS)):
        products = read_factors[later].mT @ write_factors[earlier]
        norms = (write_norms[earlier] * read_norms[later]).clamp_min(
            torch.finfo(products.dtype).tiny
        )
        scores.append(torch.linalg.matrix_norm(products) / norms)
    return torch.cat(scores)


def _fold(matrix: LowRank) -> Tensor:
    """Return `a R^T` with b^T = Q R: `a b` is the result times Q^T, which has orthonormal rows."""
    triangle: Tensor = torch.linalg.qr(matrix.b.mT, mode="r").R
    return matrix.a @ triangle.mT

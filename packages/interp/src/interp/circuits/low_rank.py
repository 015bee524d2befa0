"""Low-rank matrices that are stored as two thin factors.

A head reads the residual stream through one thin matrix and writes to it through another. Its
circuits are therefore products `A B` of rank d_head in d_model dimensions. A `LowRank` may store
the circuits of all heads of all layers; only `dense()` creates m x n matrices. Vectors are columns,
as in the paper: W_QK = W_Q^T W_K scores a query x and a key y by x^T W_QK y, and W_OV = W_O W_V
maps x to W_OV x.

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix `a @ b`, with any number of batch dimensions.

    Factors in float16 or bfloat16 are decomposed in float32, which is also the dtype of the
    results. LAPACK does not support half precision, whose rounding errors would also be too large
    for an orthonormal basis. Raises ValueError for factors whose shapes do not multiply.
    """

    #: The left factor, (..., m, r).
    a: Tensor
    #: The right factor, (..., r, n).
    b: Tensor

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"factors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply; "
                "pass (..., m, r) and (..., r, n)"
            )

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions, (layers, heads) for a model's circuits."""
        return torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        """The shape of `dense()`."""
        return torch.Size((*self.batch_shape, self.a.shape[-2], self.b.shape[-1]))

    @property
    def rank(self) -> int:
        """The number of columns of `a`, an upper bound of the rank."""
        return self.a.shape[-1]

    @property
    def mT(self) -> LowRank:
        """The transpose of each matrix."""
        return LowRank(self.b.mT, self.a.mT)

    def dense(self) -> Tensor:
        """Return the matrices, (..., m, n)."""
        return self.a @ self.b

    def apply(self, x: Tensor) -> Tensor:
        """Return the images (..., m) of the rows of `x` (..., n), or of one vector (n,)."""
        if x.ndim == 1:
            return self.apply(x[None])[..., 0, :]
        return (x @ self.b.mT) @ self.a.mT

    def __getitem__(self, index: Any) -> LowRank:
        """Index the batch dimensions; raise IndexError for an index that exceeds them."""
        batch = self.batch_shape
        indices = index if isinstance(index, tuple) else (index,)
        # Two slices of the matrix dimensions let "..." stand for batch dimensions only.
        full_index = (*indices, slice(None), slice(None))
        try:
            a, b = (f.expand(*batch, *f.shape[-2:])[full_index] for f in (self.a, self.b))
        except IndexError as error:
            raise IndexError(
                f"index {index!r} exceeds the batch dimensions {tuple(batch)}"
            ) from error
        return LowRank(a, b)

    def __matmul__(self, other: LowRank | Tensor) -> LowRank:
        """Return the product with another `LowRank` or a dense matrix.

        The product of two `LowRank` has the smaller of the two ranks.
        """
        if isinstance(other, Tensor):
            return LowRank(self.a, self.b @ other)
        middle = self.b @ other.a
        if self.rank <= other.rank:
            return LowRank(self.a, middle @ other.b)
        return LowRank(self.a @ middle, other.b)

    def __rmatmul__(self, other: Tensor) -> LowRank:
        return LowRank(other @ self.a, self.b)

    def norm(self) -> Tensor:
        """Return the Frobenius norm of each matrix, (...)."""
        wide = self._as_decomposable()
        # R b has the same norm as a b with a = Q R. Gram matrices would lose half of the digits.
        norm: Tensor = torch.linalg.matrix_norm(torch.linalg.qr(wide.a, mode="r").R @ wide.b)
        return norm

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(U, S, Vh)` of shapes (..., m, k), (..., k), (..., k, n), k = min(m, r, n).

        With the QR of both factors, a b = Q_a (R_a R_b^T) Q_b^T, and only the r x r matrix in
        parentheses needs an SVD.
        """
        wide = self._as_decomposable()
        q_a, r_a = torch.linalg.qr(wide.a)
        q_b, r_b = torch.linalg.qr(wide.b.mT)
        u, s, vh = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
        return q_a @ u, s, vh @ q_b.mT

    def eigenvalues(self) -> Tensor:
        """Return the complex eigenvalues of `b a`, (..., r), with all nonzero eigenvalues of `a b`.

        Raises ValueError for matrices `a b` that are not square, and for nan and inf.
        """
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"expected square matrices for eigenvalues, got {tuple(self.shape)}")
        wide = self._as_decomposable()
        return compute_eigenvalues(wide.b @ wide.a)

    def _as_decomposable(self) -> LowRank:
        """Return this matrix with half-precision factors in float32, as `torch.linalg` requires."""
        return LowRank(as_decomposable(self.a), as_decomposable(self.b))


def qk_circuit(w_q: Tensor, w_k: Tensor, *, heads: int, kv_heads: int | None = None) -> LowRank:
    """Return W_QK = W_Q^T W_K of every head, (..., heads, d_model, d_model).

    `w_q` (..., heads * d_head, d_model) and `w_k` (..., kv_heads * d_head, d_model) are weights of
    `nn.Linear`; leading dimensions (layers) are preserved. Scores are not divided by sqrt(d_head).
    Raises ValueError if the rows of a weight are not whole heads.
    """
    q = _split(w_q, heads, "w_q")
    k = _repeat_for_query_heads(_split(w_k, heads if kv_heads is None else kv_heads, "w_k"), heads)
    return LowRank(q.mT, k)


def ov_circuit(w_v: Tensor, w_o: Tensor, *, heads: int, kv_heads: int | None = None) -> LowRank:
    """Return W_OV = W_O W_V of every head, (..., heads, d_model, d_model).

    `w_v` (..., kv_heads * d_head, d_model) and `w_o` (..., d_model, heads * d_head) are weights of
    `nn.Linear`; leading dimensions (layers) are preserved. Errors are those of `qk_circuit`.
    """
    v = _repeat_for_query_heads(_split(w_v, heads if kv_heads is None else kv_heads, "w_v"), heads)
    return LowRank(_split(w_o.mT, heads, "w_o.mT").mT, v)


def synthesize(matrix: Tensor, rank: int) -> LowRank:
    """Return the circuit of rank `rank` that is nearest to `matrix` (..., m, n).

    The result is the truncated SVD; each factor contains the roots of the singular values. No other
    matrix of this rank is nearer in the Frobenius norm (Eckart and Young 1936), and a matrix of
    this rank is reproduced up to rounding. Raises ValueError unless 1 <= rank <= min(m, n).
    """
    max_rank = min(matrix.shape[-2:]) if matrix.ndim >= 2 else 0
    if not 0 < rank <= max_rank:
        raise ValueError(f"expected 1 <= rank <= {max_rank}, got {rank} for {tuple(matrix.shape)}")
    u, s, vh = torch.linalg.svd(as_decomposable(matrix), full_matrices=False)
    root = s[..., :rank].sqrt()
    return LowRank(u[..., :rank] * root[..., None, :], root[..., None] * vh[..., :rank, :])


def as_decomposable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that supports factorizations: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def compute_eigenvalues(matrix: Tensor) -> Tensor:
    """Return the eigenvalues of square matrices (..., r, r), complex (..., r).

    Raises ValueError for nan and inf.
    """
    if not bool(matrix.isfinite().all()):
        # With nan or inf, LAPACK may crash with a segmentation fault.
        raise ValueError(
            "expected finite factors for eigenvalues, got a product with nan or inf; check the "
            "weights with isfinite()"
        )
    eigenvalues: Tensor = torch.linalg.eigvals(matrix)
    return eigenvalues


def _split(weight: Tensor, heads: int, name: str) -> Tensor:
    """Split (..., heads * d_head, d_model) into (..., heads, d_head, d_model)."""
    if heads < 1 or weight.shape[-2] % heads:
        raise ValueError(
            f"{name} has {weight.shape[-2]} rows, which are not a multiple of {heads} heads; "
            "pass the number of heads of this weight (kv_heads for w_k and w_v)"
        )
    return weight.reshape(*weight.shape[:-2], heads, -1, weight.shape[-1])


def _repeat_for_query_heads(weight: Tensor, heads: int) -> Tensor:
    """Repeat each key-value head for all query heads that share it (grouped-query attention)."""
    kv_heads = weight.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} key-value heads evenly; check kv_heads="
        )
    return weight.repeat_interleave(heads // kv_heads, dim=-3)


def stack_layers(layers: list[LowRank]) -> LowRank:
    """Return the circuits of all layers as one `LowRank` with batch shape (layers, heads)."""
    return LowRank(torch.stack([c.a for c in layers]), torch.stack([c.b for c in layers]))

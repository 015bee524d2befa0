"""TransformerLens's class of low-rank matrices, over `LowRank`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from interp.circuits.low_rank import LowRank


class FactoredMatrix:
    """The product `A @ B` of (..., ldim, mdim) and (..., mdim, rdim), for row vectors.

    `shape` is the shape of the product. A product with a tensor of one dimension is a tensor, and a
    product with a matrix is a `FactoredMatrix`.
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:
        product = LowRank(A, B)
        self.A = A.expand(*product.batch_shape, *A.shape[-2:])
        self.B = B.expand(*product.batch_shape, *B.shape[-2:])
        self.shape, self.ndim = product.shape, len(product.shape)
        self.ldim, self.mdim = A.shape[-2:]
        self.rdim = B.shape[-1]
        self._product = product

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"

    @property
    def AB(self) -> Tensor:
        """The matrices, (..., ldim, rdim)."""
        return self._product.dense()

    @property
    def BA(self) -> Tensor:
        """The product in the other order, (..., mdim, mdim)."""
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The transpose of each matrix."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (U, S, V), so that each matrix is U @ S.diag_embed() @ V.mT."""
        u, s, vh = self._product.svd()
        return u, s, vh.mT

    @property
    def U(self) -> Tensor:
        """The left singular vectors, the columns of (..., ldim, k), k = min(ldim, mdim, rdim)."""
        return self.svd()[0]

    @property
    def S(self) -> Tensor:
        """The singular values, (..., k), k = min(ldim, mdim, rdim)."""
        return self.svd()[1]

    @property
    def V(self) -> Tensor:
        """The right singular vectors, the columns of (..., rdim, k), k = min(ldim, mdim, rdim)."""
        return self.svd()[2]

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of BA, which contain all nonzero eigenvalues of AB, (..., mdim)."""
        return self._product.eigenvalues()

    def norm(self) -> Tensor:
        """Return the Frobenius norm of each matrix."""
        return self._product.norm()

    def __matmul__(self, other: FactoredMatrix | Tensor) -> Any:
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim == 1:
            return self._product.apply(other)
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Tensor) -> Any:
        transposed = self.T @ other.mT if other.ndim > 1 else self.T @ other
        return transposed.T if isinstance(transposed, FactoredMatrix) else transposed

    def __mul__(self, scalar: float | Tensor) -> FactoredMatrix:
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Index the leading dimensions, rows and columns; one row or column stays a dimension."""
        index = index if isinstance(index, tuple) else (index,)
        batch = self.ndim - 2
        inner = [slice(i, i + 1 or None) if isinstance(i, int) else i for i in index[batch:]]
        rows, columns = (*inner, slice(None), slice(None))[:2]
        a, b = self.A[index[:batch]], self.B[index[:batch]]
        return FactoredMatrix(a[..., rows, :], b[..., columns])

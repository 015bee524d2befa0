"""TransformerLens's class of low-rank matrices, over `LowRank`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank


class FactoredMatrix:
    """The product `A @ B` of (..., ldim, mdim) and (..., mdim, rdim), which acts on row vectors.

    `shape` is the shape of the product. `matrix @ x` and `x @ matrix` are tensors if `x` has one
    dimension, and a `FactoredMatrix` otherwise.
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:
        product = LowRank(A, B)
        self.A = A.expand(*product.batch_shape, *A.shape[-2:])
        self.B = B.expand(*product.batch_shape, *B.shape[-2:])
        self.shape = product.shape
        self.ndim = len(product.shape)
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
        if isinstance(scalar, Tensor):
            if scalar.numel() != 1:
                raise ValueError(
                    f"expected a number or a tensor of one element, got {tuple(scalar.shape)}; "
                    "multiply `.AB`, or `A` or `B`"
                )
            scalar = scalar.reshape(())
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Index the leading dimensions, rows and columns; an integer keeps one row or column.

        Rows and columns are selected independently of each other and of the leading dimensions.
        Raises IndexError for indices that are out of range, and for new dimensions.
        """
        items = list(index) if isinstance(index, tuple) else [index]
        ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
        num_omitted = self.ndim - len(items) + len(ellipses)
        if num_omitted < 0 or len(ellipses) > 1 or any(map(_is_changing_dimensions, items)):
            raise IndexError(
                f"expected at most {self.ndim} integers, slices and vectors of indices, and at "
                f"most one ellipsis, got {index!r}; index `.AB` for new dimensions"
            )
        for position in ellipses:
            items[position : position + 1] = [slice(None)] * num_omitted
        leading, inner = tuple(items[: self.ndim - 2]), items[self.ndim - 2 :]
        rows, columns = (*inner, slice(None), slice(None))[:2]
        return FactoredMatrix(
            self.A[leading][..., _as_slice(rows, self.ldim), :],
            self.B[leading][..., _as_slice(columns, self.rdim)],
        )


def _is_changing_dimensions(item: Any) -> bool:
    """Return True if an index does not stand for exactly one dimension, such as None or a mask."""
    if isinstance(item, Tensor):
        return item.ndim > 1 or (item.ndim == 0 and item.dtype == torch.bool)
    return item is None or isinstance(item, bool)


def _as_slice(item: Any, size: int) -> Any:
    """Return an integer as a slice of one row or column, and other indices unchanged."""
    try:
        position = operator.index(item)
    except TypeError:
        return item
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of range for {size} rows or columns")
    return slice(position % size, position % size + 1)

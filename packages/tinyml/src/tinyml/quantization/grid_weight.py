"""Weights on a uniform grid, stored as packed codes of r = S (q - Z)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyml.compressed_weight import CompressedWeight
from tinyml.quantization.grid import Grid
from tinyml.quantization.pack import pack, unpack


class GridWeight(CompressedWeight):
    """A weight as packed codes, scales and zero points."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(
        self,
        form: Sequence[int],
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        transposed: bool,
    ) -> None:
        """Create a weight from its `format()` and its tensors.

        `scale` and `zero` are (rows, 1), and `codes` are packed. If `transposed`, the shape of the
        weight is (in, out), as for a `Conv1D`.
        """
        super().__init__()
        self.bits, self.low, *shape = form
        self.shape = torch.Size(shape)
        #: The shape (rows, n) of the codes; each row has one scale.
        self.rows = torch.Size((len(scale), self.shape.numel() // len(scale)))
        self.transposed = transposed
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    @staticmethod
    def from_codes(
        codes: Tensor, grid: Grid, weight: Tensor, bits: int, *, transposed: bool = False
    ) -> GridWeight:
        """Return a weight of the shape and dtype of `weight` with these codes (rows, n) on `grid`.

        Raise `ValueError` if a value is too large for this dtype.
        """
        scale = grid.scale.to(weight.dtype)
        zero = grid.zero.to(torch.int8) if grid.zero.any() else None
        form = [bits, grid.low, *weight.shape]
        stored = GridWeight(form, pack(codes - grid.low, bits), scale, zero, transposed)
        most_steps = torch.maximum(grid.high - grid.zero, grid.zero - grid.low)
        limit = scale * most_steps.to(scale)
        # Computing all values takes longer, so it is done only if a code of the grid overflows.
        if not limit.isfinite().all() and not stored(scale).isfinite().all():
            raise ValueError(
                f"expected weights whose {bits}-bit grid fits in {weight.dtype}, got values of "
                "the grid that overflow; scale the weights down, or exclude the layer with protect"
            )
        return stored

    def format(self) -> list[int]:
        """Return [bits per code, lowest code, *shape], the first argument of `__init__`."""
        return [self.bits, self.low, *self.shape]

    def unpack_signed_codes(self) -> Tensor:
        """Return the codes q as int16, (rows, n)."""
        codes = unpack(self.codes, self.bits, self.shape.numel())
        return (codes.to(torch.int16) + self.low).view(self.rows)

    def forward(self, _: Tensor) -> Tensor:
        """Return the dense weight."""
        codes = self.unpack_signed_codes()
        if self.zero is not None:
            codes = codes - self.zero.to(torch.int16)
        dense = (self.scale * codes).view(self.shape[::-1] if self.transposed else self.shape)
        return dense.t() if self.transposed else dense

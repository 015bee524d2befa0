"""Weights on an even grid, stored as packed codes of r = S (q - Z).

The layer itself is unchanged. Its weight becomes a parametrization that unpacks the codes whenever
the weight is read, so any layer with a parameter `weight` can be compressed.
"""

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
        codes: Tensor,
        grid: Grid,
        weight: Tensor,
        bits: int,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed  # the weight is (in, out), as that of a Conv1D
        self.bits = bits
        self.shape = weight.shape
        self.rows = codes.shape
        self.low = grid.low
        self.register_buffer("codes", pack(codes - grid.low, bits))
        self.register_buffer("scale", grid.scale.to(weight.dtype))
        self.register_buffer("zero", grid.zero.to(torch.int8) if grid.zero.any() else None)
        furthest = torch.maximum(grid.high - grid.zero, grid.zero - grid.low)
        largest = self.scale * furthest.to(self.scale)
        if not largest.isfinite().all() and not self(self.scale).isfinite().all():
            raise ValueError(
                f"expected weights whose {bits}-bit grid fits in {weight.dtype}, got values of "
                "the grid that overflow; scale the weights down, or exclude the layer with protect"
            )

    @staticmethod
    def restore(
        form: Sequence[int], codes: Tensor, scale: Tensor, zero: Tensor | None, transposed: bool
    ) -> GridWeight:
        """Return a saved weight, given its `format()`."""
        bits, low, *shape = form
        weight = torch.empty(shape, dtype=scale.dtype, device="meta")
        width = weight.numel() // len(scale)
        no_codes = torch.full((len(scale), width), low, device=scale.device)
        # The range of the grid was checked when the codes were made.
        unscaled = torch.zeros_like(scale)
        grid = Grid(unscaled, unscaled if zero is None else zero, low, low)
        restored = GridWeight(no_codes, grid, weight, bits, transposed=transposed)
        restored.codes, restored.scale = codes, scale
        return restored

    def format(self) -> list[int]:
        """Return the bits, the lowest code and the shape of the weight."""
        return [self.bits, self.low, *self.shape]

    def whole_numbers(self) -> Tensor:
        """Return the codes q as int16 rows."""
        count = self.shape.numel()
        return (unpack(self.codes, self.bits, count).to(torch.int16) + self.low).view(self.rows)

    def forward(self, _: Tensor) -> Tensor:
        """Return the dense weight."""
        codes = self.whole_numbers()
        if self.zero is not None:
            codes = codes - self.zero.to(torch.int16)
        dense = (self.scale * codes).view(self.shape[::-1] if self.transposed else self.shape)
        return dense.t() if self.transposed else dense

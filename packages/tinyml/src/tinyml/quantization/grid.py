"""Uniform quantization: r = S (q - Z), with integers q, a scale S and a zero point Z.

Each output channel or group of inputs has a scale, computed from the extremes of its values. The
formulas are those of Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyml.validation import check_bits


@dataclass(frozen=True)
class Grid:
    """The grid of each row: `scale` and `zero` (rows, 1), and codes from `low` to `high`."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def quantize(self, rows: Tensor) -> Tensor:
        """Return the codes q = round(r / S) + Z, clamped to `low` and `high`, as int32."""
        codes = (rows / self.scale).round() + self.zero
        return codes.clamp(self.low, self.high).to(torch.int32)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return r = S (q - Z)."""
        return self.scale * (codes - self.zero)

    def round_scales(self, dtype: torch.dtype) -> Grid:
        """Return the grid with scales that `dtype` represents exactly.

        Scales are rounded to the nearest number of `dtype`. Subnormal scales have few digits and
        are rounded up, so that codes reach the largest value of their row.
        """
        rounded = self.scale.to(dtype).to(self.scale.dtype)
        limits = torch.finfo(dtype)
        spacing = limits.tiny * limits.eps
        up = ((self.scale.double() / spacing).ceil() * spacing).to(self.scale.dtype)
        scale = torch.where(self.scale < limits.tiny, up, rounded)
        return Grid(scale, self.zero, self.low, self.high)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor of at most 16 bits as float32, so that later results are rounded once."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def compute_grid(rows: Tensor, bits: int, *, symmetric: bool = True) -> Grid:
    """Return the grids of the rows of a (rows, n) tensor of finite values.

    If symmetric, Z = 0 and codes range from -(2^(b-1) - 1) to 2^(b-1) - 1, so -q is also a code. If
    not symmetric, S = (rmax - rmin) / (qmax - qmin) and Z = round(qmin - rmin / S). The range from
    rmin to rmax is widened to include zero, which then has a code.
    """
    check_grid_bits(bits, symmetric)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    minimum, maximum = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    if symmetric:
        scale = _compute_step(torch.maximum(minimum.abs(), maximum.abs()), high)
        return Grid(scale, torch.zeros_like(scale), -high, high)
    minimum, maximum = minimum.clamp(max=0), maximum.clamp(min=0)
    # The difference of two large numbers overflows, and the half of a subnormal number is rounded.
    extent, half = maximum - minimum, maximum / 2 - minimum / 2
    step = _compute_step(extent, high - low)
    scale = torch.where(extent.isinf(), 2 * (half / (high - low)), step)
    zero = (low - minimum / scale).round().clamp(low, high)
    return Grid(scale, zero, low, high)


def check_grid_bits(bits: int, symmetric: bool) -> None:
    """Raise `ValueError` unless a grid can have this number of bits.

    One bit has two codes, and a symmetric grid needs at least three: -1, 0 and 1.
    """
    check_bits(bits, f"a grid with {symmetric=}", least=2 if symmetric else 1)


def _compute_step(extent: Tensor, steps: int) -> Tensor:
    """Return `extent / steps`, rounded up if it is subnormal, and 1 if the extent is zero."""
    step = extent / steps
    limits = torch.finfo(step.dtype)
    spacing = limits.tiny * limits.eps
    up = ((extent.double() / spacing / steps).ceil() * spacing).to(step.dtype)
    return torch.where(step < limits.tiny, up, step).where(extent != 0, 1)


def as_rows(weight: Tensor, group_size: int | None = None) -> Tensor:
    """Return a weight (out, ...) as rows (rows, n), which have one scale each.

    A row has all inputs of one output, or `group_size` of them. Raise `ValueError` if `group_size`
    does not divide the number of inputs.
    """
    if group_size is None:
        return weight.reshape(weight.shape[0], -1)
    width = weight[0].numel()
    if not isinstance(group_size, int) or group_size < 1 or width % group_size:
        raise ValueError(
            f"expected an int as group_size that divides the {width} inputs of an output, got "
            f"{group_size!r}"
        )
    return weight.reshape(-1, group_size)

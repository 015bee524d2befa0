"""Even grids on tensors: r = S (q - Z), with integers q, a scale S and a zero point Z.

There is one scale per tensor, per output channel, or per group of inputs. The range is given by the
extremes, by a percentile, or by the least squared error. The formulas are those of Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
2018, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinyml.validation import check_bits, check_finite

Observer = Literal["minmax", "percentile", "mse"]
Granularity = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class Grid:
    """The grid of rows: `scale` and `zero` (rows, 1), and codes from `low` to `high`."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def quantize(self, rows: Tensor) -> Tensor:
        """Return q = round(r / S) + Z, clamped to the range, as int32."""
        codes = (rows / self.scale).round() + self.zero
        return codes.clamp(self.low, self.high).to(torch.int32)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return r = S (q - Z)."""
        return self.scale * (codes - self.zero)

    def stored_as(self, dtype: torch.dtype) -> Grid:
        """Return the grid with scales that `dtype` represents exactly."""
        scale = self.scale.to(dtype).to(self.scale.dtype)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # underflow in `dtype`
        return Grid(scale, self.zero, self.low, self.high)


def wide(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32, so that later results are rounded only once."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def kept_in(dtype: torch.dtype, factors: Tensor) -> Tensor:
    """Return positive factors in `dtype`, clamped away from zero and infinity."""
    limits = torch.finfo(dtype)
    return factors.to(dtype).clamp(limits.tiny, limits.max)


def grid_of(
    rows: Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    signed: bool = True,
    observer: Observer = "minmax",
) -> Grid:
    """Return a grid for each row of a (rows, n) tensor.

    If symmetric, Z = 0 and codes range from -(2^(b-1) - 1) to 2^(b-1) - 1, so that -q is also a
    code (one bit has only -1 and 0). Otherwise S = (rmax - rmin) / (qmax - qmin) and Z = round(qmin
    - rmin / S), where the range is widened to include zero, which then has a code.
    """
    check_bits(bits, "a grid has")
    check_finite("the tensor to quantize", rows)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if symmetric and bits > 1:
        low = max(low, -high)
    if observer == "mse":
        return _least_error(rows, low, high, symmetric)
    if observer == "percentile":
        minimum, maximum = _percentiles(rows)
    elif observer == "minmax":
        minimum, maximum = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    else:
        raise ValueError(f"expected observer 'minmax', 'percentile' or 'mse', got {observer!r}")
    return _grid(minimum, maximum, low, high, symmetric)


def _grid(minimum: Tensor, maximum: Tensor, low: int, high: int, symmetric: bool) -> Grid:
    smallest = torch.finfo(minimum.dtype).tiny
    if symmetric:
        scale = torch.maximum(minimum.abs(), maximum.abs()) / max(high, -low)
        scale = torch.where(scale < smallest, torch.ones_like(scale), scale)
        return Grid(scale, torch.zeros_like(scale), low, high)
    minimum, maximum = minimum.clamp(max=0), maximum.clamp(min=0)
    scale = (maximum - minimum) / (high - low)
    scale = torch.where(scale < smallest, torch.ones_like(scale), scale)
    zero = (low - minimum / scale).round().clamp(low, high)
    return Grid(scale, zero, low, high)


def _percentiles(rows: Tensor) -> tuple[Tensor, Tensor]:
    ordered = rows.sort(dim=1).values
    cut = round(0.001 * (rows.shape[1] - 1))
    return ordered[:, cut, None], ordered[:, -1 - cut, None]


def _least_error(rows: Tensor, low: int, high: int, symmetric: bool) -> Grid:
    minimum, maximum = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    best = _grid(minimum, maximum, low, high, symmetric)
    least = (best.dequantize(best.quantize(rows)) - rows).square().sum(1, keepdim=True)
    for step in range(1, 80):
        shrink = 1 - step / 100
        grid = _grid(minimum * shrink, maximum * shrink, low, high, symmetric)
        error = (grid.dequantize(grid.quantize(rows)) - rows).square().sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, grid.scale, best.scale)
        best = Grid(scale, torch.where(better, grid.zero, best.zero), low, high)
    return best


def granularity_of(granularity: Granularity | None, group_size: int | None) -> Granularity:
    """Return the granularity; the default is "group" with a group size, else "channel"."""
    kind: Granularity = granularity or ("channel" if group_size is None else "group")
    if kind not in ("tensor", "channel", "group"):
        raise ValueError(f"expected granularity 'tensor', 'channel' or 'group', got {kind!r}")
    if (kind == "group") != (group_size is not None):
        raise ValueError(
            f"granularity={kind!r} with group_size={group_size}; expected a group_size "
            "with 'group' only"
        )
    return kind


def as_rows(weight: Tensor, granularity: Granularity, group_size: int | None = None) -> Tensor:
    """Reshape a weight into rows with one scale per row."""
    if granularity == "tensor":
        return weight.reshape(1, -1)
    if granularity == "channel":
        return weight.reshape(weight.shape[0], -1)
    width = weight[0].numel()
    if group_size is None or group_size < 1 or width % group_size:
        raise ValueError(f"groups of {group_size} do not divide rows of {width} inputs")
    return weight.reshape(-1, group_size)

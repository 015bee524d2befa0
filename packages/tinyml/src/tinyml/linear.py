"""Weights on an even grid: r = S (q - Z), whole numbers q, a scale S and a zero point Z.

Notable:
- one scale for the tensor, for each output channel, or for each group of inputs;
- the range is the extremes, a percentile, or the one with the least squared error;
- the formula is Jacob et al., "Quantization and Training of Neural Networks for Efficient
  Integer-Arithmetic-Only Inference", 2018, section 2.1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tinyml.layers import QUANTIZABLE, CompressedWeight, compress_weights, empty_like_nothing
from tinyml.pack import pack, unpack

Observer = Literal["minmax", "percentile", "mse"]
Granularity = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class Grid:
    """The grid of rows: `scale` and `zero` (rows, 1), codes from `low` to `high`."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def quantize(self, rows: Tensor) -> Tensor:
        """q = round(r / S) + Z, clamped to the range; int32."""
        codes = (rows / self.scale).round() + self.zero
        return codes.clamp(self.low, self.high).to(torch.int32)

    def dequantize(self, codes: Tensor) -> Tensor:
        """r = S (q - Z)."""
        return self.scale * (codes - self.zero)

    def stored_as(self, dtype: torch.dtype) -> Grid:
        """The same grid with scales that `dtype` holds exactly, so that codes fit what is kept."""
        scale = self.scale.to(dtype).to(self.scale.dtype)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # too small for `dtype`
        return Grid(scale, self.zero, self.low, self.high)


def grid_of(
    rows: Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    signed: bool = True,
    observer: Observer = "minmax",
) -> Grid:
    """The grid for each row of a (rows, n) tensor.

    Symmetric: Z = 0 and codes from -(2^(b-1) - 1) to 2^(b-1) - 1, so that -q is a code too (one bit
    has -1 and 0 only). Otherwise S = (rmax - rmin) / (qmax - qmin), Z = round(qmin - rmin / S), and
    the range is widened to hold zero, which then has a code of its own.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits; a grid has 1 to 8")
    if not torch.isfinite(rows).all():
        raise ValueError("the tensor to quantize holds nan or inf")
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
        raise ValueError(f"observer is {observer!r}; 'minmax', 'percentile' or 'mse'")
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


def as_rows(weight: Tensor, granularity: Granularity, group_size: int | None = None) -> Tensor:
    """A weight as the rows that have a scale each."""
    if granularity == "tensor":
        return weight.reshape(1, -1)
    if granularity == "channel":
        return weight.reshape(weight.shape[0], -1)
    width = weight[0].numel()
    if group_size is None or group_size < 1 or width % group_size:
        raise ValueError(f"groups of {group_size} do not divide rows of {width} inputs")
    return weight.reshape(-1, group_size)


class GridWeight(CompressedWeight):
    """A weight as packed codes, scales and zero points."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, codes: Tensor, grid: Grid, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.bits, self.shape, self.rows = bits, weight.shape, codes.shape
        self.low = grid.low
        self.register_buffer("codes", pack(codes - grid.low, bits))
        self.register_buffer("scale", grid.scale.to(weight.dtype))
        zero = (
            None if not grid.zero.any() else grid.zero.to(torch.int8 if grid.low else torch.uint8)
        )
        self.register_buffer("zero", zero)

    @staticmethod
    def restore(
        weight: Tensor,
        codes: Tensor,
        *,
        bits: int,
        rows: Sequence[int],
        low: int,
        scale: Tensor,
        zero: Tensor | None,
    ) -> GridWeight:
        """What was saved, in place of a weight of this shape."""
        grid = Grid(scale, torch.zeros_like(scale) if zero is None else zero, low, low)
        made = GridWeight(torch.full((*rows,), low), grid, weight, bits)
        made.codes = codes
        return made

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Nothing: the codes are what is kept."""
        return empty_like_nothing(weight)

    def whole_numbers(self) -> Tensor:
        """q, int16, as rows."""
        count = self.shape.numel()
        return (unpack(self.codes, self.bits, count).to(torch.int16) + self.low).view(self.rows)

    def forward(self, _: Tensor) -> Tensor:
        """The dense weight."""
        codes = self.whole_numbers()
        if self.zero is not None:
            codes = codes - self.zero.to(torch.int16)
        return (self.scale * codes).view(self.shape)


@torch.no_grad()
def quantize(
    model: nn.Module,
    bits: int | Mapping[str, int] = 8,
    *,
    granularity: Granularity | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    observer: Observer = "minmax",
    activations: Literal["float", "dynamic"] = "float",
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
) -> nn.Module:
    """A copy of `model` whose weights are `bits`-bit whole numbers on a grid.

    One scale for each output channel (row), unless `group_size` or `granularity` says otherwise.
    `bits` may be given by layer name; other layers stay. activations="dynamic" also rounds the
    inputs of linear layers to int8 as they come and multiplies whole numbers (see `Int8Linear`):
    that is what is faster; weights alone are only smaller.
    """
    granularity = granularity or ("group" if group_size else "channel")
    model = copy.deepcopy(model)
    if activations == "dynamic":
        from tinyml.int8 import with_int8_linears

        if bits != 8 or granularity != "channel" or not symmetric:
            raise ValueError(
                "activations='dynamic' takes bits=8, one symmetric scale a channel; "
                f"got bits={bits}, granularity={granularity!r}, symmetric={symmetric}"
            )
        return with_int8_linears(model, observer)
    if activations != "float":
        raise ValueError(f"activations is {activations!r}; 'float' or 'dynamic'")

    def compress(name: str, layer: nn.Module) -> CompressedWeight | None:
        width = bits.get(name) if isinstance(bits, Mapping) else bits
        if width is None:
            return None
        weight = layer.get_parameter("weight").detach()
        rows = as_rows(weight.float(), granularity, group_size)
        grid = grid_of(rows, width, symmetric=symmetric, observer=observer).stored_as(weight.dtype)
        return GridWeight(grid.quantize(rows), grid, weight, width)

    return compress_weights(model, layers, compress)

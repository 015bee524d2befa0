"""The layers of an integer network: int8 in, int8 out, with the results of integer arithmetic.

The arithmetic follows Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018. Sums of products are int32. They are converted to the next
layer's int8 by one multiplication with a 31-bit integer and one rounding shift per channel. An
activation is a table of 256 codes. Values of different scales are multiplied by 22-bit integers
before they are added. All weights, scales and tables are buffers, so a state dict contains them.

In torch, products and means are computed by float operators, which are faster. Their float32 or
float64 results are exact integers, or are rounded exactly as in the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.conversion import without_autocast
from tinyml.integer.fixed_point import (
    QuantParams,
    compute_scales_for_bias,
    to_common_shift,
    to_fixed_point,
)
from tinyml.integer.steps import (
    Concatenation,
    Geometry,
    MatMul,
    Mul,
    Pool,
    Reshape,
    Step,
    Sum,
    Table,
)
from tinyml.quantization.grid import Grid, compute_grid
from tinyml.quantization.products import EXACT_IN_FLOAT32

#: The number of float64 values that fit in a processor's cache.
_CACHED_VALUES = 2**16
#: A sum of at most this number of products of int8 codes and a bias is within int32.
_MAX_INT32_PRODUCTS = 2**15


class IntegerMatMul(nn.Module):
    """A convolution or linear layer: Z + ((m (sum q_w q_x + b) + 2^(s-1)) >> s)."""

    weight: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor

    def __init__(self, step: MatMul, scales: Sequence[QuantParams], after: QuantParams) -> None:
        super().__init__()
        (before,) = scales
        self.geometry = step.geometry
        self.before = before
        self.after = after
        weight, bias = step.weight, step.bias
        rows = weight.detach().double().reshape(len(weight), -1)
        if rows.shape[1] * 128 * 128 >= 2**31:
            raise ValueError(
                "expected fewer than 2^17 products per sum, so that sums fit in int32, got "
                f"{rows.shape[1]}; split the layer"
            )
        float_bias = rows.new_zeros(len(rows)) if bias is None else bias.detach().double()
        if not torch.isfinite(float_bias).all():
            raise ValueError("expected finite biases and batch normalizations, got nan or inf")
        grid = compute_grid(rows, 8)
        scale = compute_scales_for_bias(rows, grid.scale, float_bias, before, after)
        codes = Grid(scale, grid.zero, grid.low, grid.high).quantize(rows)
        unit = before.scale * scale.view(-1)
        # Padding has the code of zero, so the constant -Z sum(w) is part of the bias.
        int_bias = (float_bias / unit).round() - before.zero * codes.sum(1)
        multiplier, shift = to_fixed_point(unit / after.scale)
        self.register_buffer("weight", codes.to(torch.int8).view(weight.shape))
        self.register_buffer("bias", int_bias.clamp(-(2**31), 2**31 - 1).to(torch.int32))
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift.to(torch.uint8))

    @property
    def has_int32_sums(self) -> bool:
        """Return True if no sum of products and bias can exceed int32."""
        return self.weight[0].numel() <= _MAX_INT32_PRODUCTS

    def forward(self, codes: Tensor) -> Tensor:
        """Map int8 codes (n, channels, height, width) or (..., features) to int8 codes."""
        if self.geometry is None:
            return self._requantize(compute_exact_sums(codes, self.weight), (-1,))
        padded = pad(codes, self.geometry, self.before.zero)
        sums = compute_exact_sums(padded, self.weight, self.geometry)
        # The float64 values of as many images as fit in the processor's cache are computed at once.
        num_images = max(1, _CACHED_VALUES // max(1, sums.shape[1:].numel()))
        parts = [self._requantize(part, (-1, 1, 1)) for part in sums.split(num_images)]
        return torch.cat(parts)

    def _requantize(self, sums: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return int8 codes of sums of products; `shape` broadcasts a value per channel to sums."""
        # float64 is exact for shifts of up to `MAX_SHIFT` bits.
        factor = self.multiplier.double() * torch.exp2(-self.shift.double())
        scaled = sums.double().add_(self.bias.double().view(shape))
        if not self.has_int32_sums:
            scaled.clamp_(-(2**31), 2**31 - 1)  # as in the C program
        scaled.mul_(factor.view(shape)).add_(0.5).floor_().add_(self.after.zero)
        return scaled.clamp_(-128, 127).to(torch.int8)


class RescaledValues(nn.Module):
    """Values of different scales, each multiplied by an integer: m_i (q_i - Z_i)."""

    multiplier: Tensor
    shift: Tensor

    def __init__(self, step: Step, before: Sequence[QuantParams], after: QuantParams) -> None:
        super().__init__()
        self.before, self.after = nn.ModuleList(before), after
        multiplier, shift = to_common_shift(self.compute_factors(step, before, after))
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift)

    @staticmethod
    def compute_factors(_: Any, before: Sequence[QuantParams], after: QuantParams) -> list[float]:
        """Return the factors by which the values are multiplied in the result, S_i / S_out."""
        return [scale.scale / after.scale for scale in before]

    @property
    def zeros(self) -> list[int]:
        """Return the code of 0.0 of each value."""
        return [scale.zero for scale in cast(Iterable[QuantParams], self.before)]

    def scale_values(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Return each value times its integer factor, m_i (q_i - Z_i), as int64."""
        terms = zip(codes, self.zeros, self.multiplier.long(), strict=True)
        return [(value.long() - zero) * factor for value, zero, factor in terms]

    def requantize(self, total: Tensor) -> Tensor:
        """Return int8 codes: Z + ((total + 2^(s-1)) >> s)."""
        shift = self.shift.long()
        half = (torch.ones_like(shift) << shift) >> 1
        codes = ((total + half) >> shift) + self.after.zero
        return codes.clamp(-128, 127).to(torch.int8)


class IntegerSum(RescaledValues):
    """A sum of values of different scales: Z + ((sum m_i (q_i - Z_i) + 2^(s-1)) >> s)."""

    @staticmethod
    def compute_factors(
        step: Sum, before: Sequence[QuantParams], after: QuantParams
    ) -> list[float]:
        """Return the factors by which the values are multiplied, with the signs of the sum."""
        factors = RescaledValues.compute_factors(step, before, after)
        return [sign * factor for sign, factor in zip(step.signs, factors, strict=True)]

    def forward(self, *codes: Tensor) -> Tensor:
        """Add int8 values of equal shape."""
        return self.requantize(functools.reduce(torch.add, self.scale_values(codes)))


class IntegerCat(RescaledValues):
    """A concatenation along channels, with one scale: Z + ((m_i (q_i - Z_i) + 2^(s-1)) >> s)."""

    def forward(self, *codes: Tensor) -> Tensor:
        """Concatenate int8 values along their channels."""
        return torch.cat([self.requantize(value) for value in self.scale_values(codes)], 1)


class IntegerMul(RescaledValues):
    """An elementwise product: Z + ((m (q_a - Z_a) (q_b - Z_b) + 2^(s-1)) >> s)."""

    @staticmethod
    def compute_factors(_: Any, before: Sequence[QuantParams], after: QuantParams) -> list[float]:
        """Return the factor of the product in the result, S_a S_b / S_out."""
        return [before[0].scale * before[1].scale / after.scale]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply int8 values."""
        zero_a, zero_b = self.zeros
        return self.requantize((a.long() - zero_a) * (b.long() - zero_b) * self.multiplier.long())


class IntegerTable(nn.Module):
    """An elementwise function as a table with one output code per input code."""

    table: Tensor

    def __init__(self, step: Table, before: Sequence[QuantParams], after: QuantParams) -> None:
        super().__init__()
        codes = torch.arange(-128, 128, device="cpu")
        values = step.run((codes - before[0].zero) * before[0].scale)
        self.register_buffer("table", after.compute_codes(values.reshape(-1)))

    def forward(self, codes: Tensor) -> Tensor:
        """Look up int8 codes in the table."""
        return self.table[codes.int() + 128]


class IntegerPool(nn.Module):
    """The maximum or mean of int8 windows; the mean rounds halves up."""

    def __init__(self, step: Pool, before: Sequence[QuantParams], _: QuantParams) -> None:
        super().__init__()
        self.geometry = step.geometry
        self.is_maximum = step.is_maximum
        self.scale = before[0]

    def forward(self, codes: Tensor) -> Tensor:
        """Pool int8 codes (n, channels, height, width)."""
        g = self.geometry
        fill = -128 if self.is_maximum else self.scale.zero
        padded = pad(codes, g, fill).float()  # exact for the codes and their sums
        if self.is_maximum:
            return F.max_pool2d(padded, g.kernel, g.stride).to(torch.int8)
        area = g.kernel[0] * g.kernel[1]
        total = F.avg_pool2d(padded, g.kernel, g.stride, divisor_override=1).round().long()
        rounded = torch.div(2 * total + area, 2 * area, rounding_mode="floor")
        return rounded.to(torch.int8)


class IntegerReshape(nn.Module):
    """A reshape of codes; the first dimension remains the batch."""

    def __init__(self, step: Step, *_: Any) -> None:
        super().__init__()
        self.shape = step.shape[1:]

    def forward(self, codes: Tensor) -> Tensor:
        """Reshape int8 codes."""
        return codes.reshape(len(codes), *self.shape)


#: The integer layer of each kind of step. Its arguments are the step, the quantization parameters
#: of the step's sources and those of the step.
LAYERS: dict[type[Step], type[nn.Module]] = {
    MatMul: IntegerMatMul,
    Sum: IntegerSum,
    Mul: IntegerMul,
    Concatenation: IntegerCat,
    Table: IntegerTable,
    Pool: IntegerPool,
    Reshape: IntegerReshape,
}


def compute_exact_sums(codes: Tensor, weight: Tensor, geometry: Geometry | None = None) -> Tensor:
    """Return the exact sums of a linear layer, or of a convolution of padded images, as floats.

    They are exact in float32 if no partial sum exceeds 2^24 (Note [Exact products]). A partial sum
    is at most 128 times the sum of |w| over a filter. Otherwise, and always on a GPU, whose
    convolutions may transform their inputs, the sums are computed in float64, which is exact.
    """
    max_sum = 128 * int(weight.long().abs().flatten(1).sum(1).max())
    is_exact = codes.device.type == "cpu" and max_sum <= EXACT_IN_FLOAT32
    dtype = torch.float32 if is_exact else torch.float64
    with without_autocast(codes.device):  # autocast would round the codes to 16 bits
        if geometry is None:
            return F.linear(codes.to(dtype), weight.to(dtype))
        g = geometry
        # In the channels-last format, sums of one channel may be wrong (pytorch issue 82060).
        layout = torch.channels_last if codes.shape[1] > 1 else torch.contiguous_format
        images = codes.to(dtype, memory_format=layout)
        filters = weight.to(dtype, memory_format=layout)
        return F.conv2d(images, filters, None, g.stride, 0, g.dilation, g.groups)


def pad(codes: Tensor, geometry: Geometry, fill: int) -> Tensor:
    """Return images padded with the code `fill`."""
    rows, columns = geometry.padding
    return F.pad(codes, (columns, columns, rows, rows), value=fill)

"""The layers of an integer network: int8 in, int8 out, and no float in between.

Notable (Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018):
- a sum of products is int32; the step to the next layer's int8 is one multiplication by a 31-bit
  integer and one rounding shift for each channel;
- what an activation does to 256 codes is a table of 256 codes;
- values of different scales are added after each was multiplied with an integer of 22 bits.

Everything that the arithmetic needs is a buffer, so a state dict is the whole network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.integer.convolution import Int8Filters
from tinyml.integer.graph import Geometry, Step
from tinyml.layers import stamp_of
from tinyml.quantization.grid import Grid
from tinyml.quantization.products import Int8Weights

SUM_BITS = 22
"""Bits of the multipliers of a sum: 255 times as much, from 16 inputs, still fits in 34 bits."""


class Scale(nn.Module):
    """The meaning of int8 codes: r = scale (q - zero), in the state dict like any weight.

    Codes of fewer than 8 bits are int8 all the same, from `low` to `high`.
    """

    bits_of_scale: Tensor
    code_of_zero: Tensor
    bits_of_code: Tensor

    def __init__(self, scale: float, zero: int, bits: int = 8) -> None:
        super().__init__()
        # The float64 is kept as its 64 bits, so that model.half() leaves it as it is.
        as_whole = torch.tensor(scale, dtype=torch.float64).view(torch.int64)
        self.register_buffer("bits_of_scale", as_whole)
        self.register_buffer("code_of_zero", torch.tensor(zero, dtype=torch.int32))
        self.register_buffer("bits_of_code", torch.tensor(bits, dtype=torch.int32))

    @property
    def scale(self) -> float:
        """The step between two codes."""
        return float(self.bits_of_scale.view(torch.float64))

    @property
    def zero(self) -> int:
        """The code of 0.0."""
        return int(self.code_of_zero)

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.bits_of_code)

    @property
    def low(self) -> int:
        """The least code."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The largest code."""
        return -1 - self.low

    def codes(self, values: Tensor) -> Tensor:
        """Values as codes, int8."""
        codes = (values.double() / self.scale).add_(0.5).floor_() + self.zero
        return codes.clamp(self.low, self.high).to(torch.int8)


class IntegerProduct(nn.Module):
    """A convolution or a linear layer: Z + (m (sum q_w q_x + b) + 2^(s-1)) >> s."""

    weight: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor

    def __init__(self, step: Step, before: Scale, after: Scale) -> None:
        super().__init__()
        self.geometry, self.before, self.after = step.geometry, before, after
        weight, bias, grid = step.weight, step.bias, step.grid
        assert weight is not None
        assert grid is not None
        rows = weight.detach().double().reshape(len(weight), -1)
        if rows.shape[1] * 128 * 128 >= 2**31:
            raise ValueError(
                f"sums of {rows.shape[1]} products do not fit in int32; split the layer"
            )
        exact = rows.new_zeros(len(rows)) if bias is None else bias.detach().double()
        if not torch.isfinite(exact).all():
            raise ValueError("a bias or batch normalization holds nan or inf")
        scale = scales_for_bias(rows, grid.scale.double(), exact, before, after)
        codes = Grid(scale, grid.zero, grid.low, grid.high).quantize(rows)
        unit = before.scale * scale.view(-1)
        # Padding has the code of zero, so the constant -Z sum(w) joins the bias.
        whole = (exact / unit).round() - before.zero * codes.sum(1)
        multiplier, shift = fixed_point(unit / after.scale)
        self.register_buffer("weight", codes.to(torch.int8).view(weight.shape))
        self.register_buffer("bias", whole.clamp(-(2**31), 2**31 - 1).to(torch.int32))
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift.to(torch.uint8))
        self._prepared: tuple[object, Int8Weights | Int8Filters] | None = None

    def forward(self, codes: Tensor) -> Tensor:
        """(n, channels, height, width) or (..., features), int8."""
        product = self.prepared()
        if isinstance(product, Int8Filters):
            sums = product.product(product.padded(codes, self.before.zero))
            return self._requantize(sums, (-1, 1, 1))
        flat = codes.reshape(-1, codes.shape[-1])
        out = self._requantize(product.product(flat), (-1,))
        return out.view(*codes.shape[:-1], len(self.weight))

    def prepared(self) -> Int8Weights | Int8Filters:
        """The weights as the exact product takes them."""
        key = stamp_of(self.weight)
        if self._prepared is None or self._prepared[0] != key:
            made = (
                Int8Weights(self.weight, largest=128)
                if self.geometry is None
                else Int8Filters(self.weight, self.geometry)
            )
            self._prepared = key, made
        return self._prepared[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_prepared": None}

    def _requantize(self, sums: Tensor, shape: tuple[int, ...]) -> Tensor:
        if int(self.shift.max()) > 44:
            whole = (sums.long() + self.bias.long().view(shape)).clamp(-(2**31), 2**31 - 1)
            return shifted(
                whole * self.multiplier.long().view(shape), self.shift.long().view(shape),
                self.after,
            )  # fmt: skip
        # The same in float64, which is exact here: a result that is not clamped is below 2^8, so
        # it has at most 8 + 44 bits before the rounding; m / 2^s is a float64 as it stands.
        factor = self.multiplier.double() * torch.exp2(-self.shift.double())
        scaled = sums.double().add_(self.bias.double().view(shape))
        scaled.mul_(factor.view(shape)).add_(0.5).floor_().add_(self.after.zero)
        return scaled.clamp_(self.after.low, self.after.high).to(torch.int8)


class Mixed(nn.Module):
    """Values of different scales, each times an integer, so that they add up: m_i (q_i - Z_i).

    `factors` are what the values count for in the result: S_i / S_out, with a sign in a sum.
    """

    multiplier: Tensor
    shift: Tensor

    def __init__(self, before: Sequence[Scale], factors: Sequence[float], after: Scale) -> None:
        super().__init__()
        self.before, self.after = nn.ModuleList(before), after
        multiplier, shift = common_shift(factors)
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift)

    @property
    def zeros(self) -> list[int]:
        """The code of 0.0 of each value."""
        return [scale.zero for scale in cast(Iterable[Scale], self.before)]

    def moved(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """m_i (q_i - Z_i), int64."""
        parts = zip(codes, self.zeros, self.multiplier.long(), strict=True)
        return [(value.long() - zero) * m for value, zero, m in parts]

    def back(self, total: Tensor) -> Tensor:
        """int8: Z + (total + 2^(s-1)) >> s."""
        return shifted(total, self.shift.long(), self.after)


class IntegerSum(Mixed):
    """Z + (sum m_i (q_i - Z_i) + 2^(s-1)) >> s: values of different scales, added."""

    def forward(self, *codes: Tensor) -> Tensor:
        """int8 values of one shape."""
        return self.back(functools.reduce(torch.add, self.moved(codes)))


class IntegerCat(Mixed):
    """Channels of several values, each brought to one scale."""

    def forward(self, *codes: Tensor) -> Tensor:
        """int8 values that differ in their channels."""
        return torch.cat([self.back(value) for value in self.moved(codes)], 1)


class IntegerGate(Mixed):
    """Z + (m (q_a - Z_a) (q_b - Z_b) + 2^(s-1)) >> s, of two values that may broadcast."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """int8 values."""
        first, second = self.zeros
        return self.back((a.long() - first) * (b.long() - second) * self.multiplier.long())


class IntegerTable(nn.Module):
    """A function of one number, as the 256 codes that the 256 codes go to."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, codes: Tensor) -> Tensor:
        """int8 values."""
        return self.table[codes.int() + 128]


class IntegerPool(nn.Module):
    """The largest or the mean of int8 windows; the mean rounds half up."""

    def __init__(self, geometry: Geometry, largest: bool, scale: Scale) -> None:
        super().__init__()
        self.geometry, self.largest, self.scale = geometry, largest, scale

    def forward(self, codes: Tensor) -> Tensor:
        """(n, channels, height, width)."""
        g = self.geometry
        rows, columns = g.padding
        if rows or columns:
            fill = -128 if self.largest else self.scale.zero
            codes = F.pad(codes, (columns, columns, rows, rows), value=fill)
        if self.largest:  # pairwise: a few comparisons of whole planes
            return self._over_windows(codes, torch.maximum)
        total = self._over_windows(codes.to(torch.int32), torch.add)
        count = g.kernel[0] * g.kernel[1]
        rounded = torch.div(2 * total + count, 2 * count, rounding_mode="floor")
        return rounded.to(torch.int8)

    def _over_windows(self, values: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (rows, columns), (down, right) = self.geometry.kernel, self.geometry.stride
        for dim, size, step in ((2, rows, down), (3, columns, right)):
            count = (values.shape[dim] - size) // step + 1
            end = (count - 1) * step + 1
            every = (slice(None),) * dim + (slice(None, None, step),)
            shifts = [values.narrow(dim, first, end)[every] for first in range(size)]
            values = functools.reduce(reduce, shifts)
        return values


class IntegerReshape(nn.Module):
    """Another shape of the same codes, the batch first."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, codes: Tensor) -> Tensor:
        """int8 values."""
        return codes.reshape(len(codes), *self.shape)


def scales_for_bias(
    rows: Tensor, scale: Tensor, bias: Tensor, before: Scale, after: Scale
) -> Tensor:
    """The scales (rows, 1) of a weight, no finer than its bias allows: it counts S_w S_in.

    30 bits hold it, however small the weights are; a filter of zeros has its bias alone, which no
    scale may round away.
    """
    least = bias.abs().view(-1, 1) / before.scale / 2**30
    fine = torch.full_like(least, after.scale / before.scale / 2**12)
    return torch.maximum(scale, least).where(rows.any(1, keepdim=True), fine)


def shifted(scaled: Tensor, shift: Tensor, after: Scale) -> Tensor:
    """Z + round(scaled / 2^shift), halves up, clamped to the codes that there are."""
    half = torch.where(shift > 0, torch.ones_like(shift) << (shift - 1).clamp(min=0), 0)
    codes = ((scaled + half) >> shift) + after.zero
    return codes.clamp(after.low, after.high).to(torch.int8)


def fixed_point(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Positive factors as m / 2^s: m from 2^30 to below 2^31 (int32), s (int64)."""
    mantissa, exponent = torch.frexp(factors.double())
    multiplier = (mantissa * 2**31).round().long()
    shift = 31 - exponent.long()
    multiplier, shift = (
        torch.where(multiplier == 2**31, multiplier >> 1, multiplier),
        torch.where(multiplier == 2**31, shift - 1, shift),
    )
    if (shift < 1).any():
        raise ValueError("a scale grows by 2^31 in one layer; the calibration range must be wrong")
    # 62 bits hold any int32 times any multiplier; a longer shift only says zero.
    return multiplier.to(torch.int32), shift.clamp(max=62)


def common_shift(factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Factors as m_i / 2^s with one s, the largest |m_i| of about `SUM_BITS` bits."""
    largest = max(abs(factor) for factor in factors)
    exponent = math.frexp(largest)[1]
    shift = SUM_BITS - exponent
    if shift < 0:
        raise ValueError("a scale grows by 2^22 in a sum; the calibration range must be wrong")
    shift = min(shift, 62)
    multipliers = [round(factor * 2.0**shift) for factor in factors]
    return torch.tensor(multipliers, dtype=torch.int32), torch.tensor(shift, dtype=torch.uint8)

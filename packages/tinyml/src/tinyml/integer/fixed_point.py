"""Fixed-point arithmetic: int8 codes of real numbers, and factors as a multiplier and a shift."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: Bits of the multipliers that rescale the inputs of additions, concatenations and products. In an
#: addition, a difference of codes is below 2^8, so its product with a multiplier is below 2^30.
SUM_BITS = 22
#: The largest shift of a sum of products. A result that is not clamped is below 2^8, so it has at
#: most 8 + 44 bits before rounding, which float64 represents.
MAX_SHIFT = 44


class QuantParams(nn.Module):
    """The quantization parameters of a value, as buffers: a code q represents scale (q - zero)."""

    bits_of_scale: Tensor
    code_of_zero: Tensor

    def __init__(self, scale: float, zero: int) -> None:
        super().__init__()
        # model.half() would round a float64 buffer, so its bits are stored as int64.
        float_scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        self.register_buffer("bits_of_scale", float_scale.view(torch.int64))
        code_of_zero = torch.tensor(zero, dtype=torch.int32, device="cpu")
        self.register_buffer("code_of_zero", code_of_zero)

    @property
    def scale(self) -> float:
        """Return the difference between the values of two neighboring codes."""
        return float(self.bits_of_scale.view(torch.float64))

    @property
    def zero(self) -> int:
        """Return the code of 0.0."""
        return int(self.code_of_zero)

    def compute_codes(self, values: Tensor) -> Tensor:
        """Return the nearest int8 codes of float values; halves are rounded up."""
        codes = (values.double() / self.scale).add_(0.5).floor_() + self.zero
        return codes.clamp(-128, 127).to(torch.int8)


def compute_scales_for_bias(
    rows: Tensor, scale: Tensor, bias: Tensor, before: QuantParams, after: QuantParams
) -> Tensor:
    """Return the scales S_w (rows, 1) of a weight: `scale`, or others if the bias needs them.

    The bias is stored in units of S_w S_in, with the scale S_in of `before`. It must fit in 30
    bits, even if the weights are tiny. A filter of zeros outputs only its bias, so its unit is
    2^-12 of the output's scale, which rounds the bias finely.
    """
    min_scale = bias.abs().view(-1, 1) / before.scale / 2**30
    bias_scale = torch.full_like(min_scale, after.scale / before.scale / 2**12)
    return torch.maximum(scale, min_scale).where(rows.any(1, keepdim=True), bias_scale)


def to_fixed_point(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive factors as m / 2^s, with int32 m in [2^30, 2^31) and int64 s.

    Shifts are limited to `MAX_SHIFT`, so m is smaller for factors below 2^-14. Raise `ValueError`
    if a factor is 2^30 or more.
    """
    shift = (31 - torch.frexp(factors.double())[1].long()).clamp(max=MAX_SHIFT)
    if (shift < 1).any():
        largest = float(factors.max())
        raise ValueError(f"expected factors below 2^30, got {largest:.3g}; check the calibration")
    # A mantissa just below 1 would be rounded to 2^31.
    multiplier = (factors.double() * torch.exp2(shift.double())).round().clamp(max=2**31 - 1)
    return multiplier.to(torch.int32), shift


def to_common_shift(factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return int32 m_i and uint8 s for factors m_i / 2^s, where |m_i| <= 2^22 (`SUM_BITS`).

    Raise `ValueError` if a factor is 2^22 or more.
    """
    largest = max(abs(factor) for factor in factors)
    exponent = math.frexp(largest)[1]
    shift = SUM_BITS - exponent
    if shift < 0:
        raise ValueError(f"expected factors below 2^22, got {largest:.3g}; check the calibration")
    shift = min(shift, 62)
    multipliers = [round(factor * 2.0**shift) for factor in factors]
    return (
        torch.tensor(multipliers, dtype=torch.int32, device="cpu"),
        torch.tensor(shift, dtype=torch.uint8, device="cpu"),
    )

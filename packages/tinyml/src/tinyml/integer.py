"""A network that computes with whole numbers from its first layer to its last.

Notable (Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018):
- a layer's sum is int32; the step to the next layer's int8 is one multiplication by a 31-bit
  integer and one rounding shift for each channel: no float, and the same bits on every machine;
- there is no ReLU layer: after one the range starts at zero, whose code is the lowest, and clamping
  to int8 is the ReLU. There is no batch normalisation either: it is folded into the weights;
- padding is the input's zero point, so that the constant -Z sum(w) can join the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.grid import Observer, grid_of
from tinyml.products import Int8Weights

_LOW, _HIGH = -128, 127


class Scale(nn.Module):
    """The meaning of a layer's int8: r = scale (q - zero), in the state dict like any weight."""

    bits_of_scale: Tensor
    code_of_zero: Tensor

    def __init__(self, scale: float, zero: int) -> None:
        super().__init__()
        # The float64 is kept as its 64 bits, so that model.half() leaves it as it is.
        self.register_buffer(
            "bits_of_scale", torch.tensor(scale, dtype=torch.float64).view(torch.int64)
        )
        self.register_buffer("code_of_zero", torch.tensor(zero, dtype=torch.int32))

    @property
    def scale(self) -> float:
        """The step between two codes."""
        return float(self.bits_of_scale.view(torch.float64))

    @property
    def zero(self) -> int:
        """The code of 0.0."""
        return int(self.code_of_zero)


class IntegerModel(nn.Module):
    """The int8 form of a float `nn.Sequential`, calibrated on batches of inputs.

    Takes Conv2d, Linear, BatchNorm (after either), ReLU (after those), MaxPool2d, AvgPool2d,
    AdaptiveAvgPool2d(1), Flatten, Dropout and Identity, nested as you like.
    """

    def __init__(
        self, model: nn.Sequential, batches: Sequence[Tensor], *, observer: Observer = "minmax"
    ) -> None:
        super().__init__()
        if not batches:
            raise ValueError("an integer model needs at least one batch of inputs to calibrate on")
        blocks = _blocks(model)
        values = torch.cat(list(batches))
        self.input = _scale_of(values, observer)
        self.layers = nn.ModuleList()
        current = self.input
        with torch.no_grad():
            for block in blocks:
                values = block(values)
                if isinstance(block, _Product):
                    after = _scale_of(values, observer)
                    self.layers.append(IntegerProduct(block, current, after))
                    current = after
                else:
                    self.layers.append(_integer_pool(block, current))
        self.output = current

    def forward(self, inputs: Tensor) -> Tensor:
        """Float inputs -> float outputs, through whole numbers."""
        codes = self.integers(self.quantize(inputs))
        return (codes.float() - self.output.zero) * self.output.scale

    def quantize(self, inputs: Tensor) -> Tensor:
        """Float inputs as int8."""
        codes = (inputs.double() / self.input.scale).round() + self.input.zero
        return codes.clamp(_LOW, _HIGH).to(torch.int8)

    def integers(self, codes: Tensor) -> Tensor:
        """int8 inputs -> int8 outputs; no float in between."""
        for layer in self.layers:
            codes = layer(codes)
        return codes


class IntegerProduct(nn.Module):
    """A convolution or a linear layer on int8, to int8."""

    weight: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor

    def __init__(self, block: _Product, before: Scale, after: Scale) -> None:
        super().__init__()
        self.geometry = block.geometry
        self.before, self.after = before, after
        self._products: tuple[object, list[Int8Weights]] | None = None
        rows = block.weight.double().reshape(len(block.weight), -1)
        if not torch.isfinite(block.bias).all():
            raise ValueError("a bias or batch normalisation holds nan or inf")
        if rows.shape[1] * 128 * 128 >= 2**31:
            raise ValueError(
                f"sums of {rows.shape[1]} products do not fit in int32; split the layer"
            )
        grid = grid_of(rows, 8)
        codes = grid.quantize(rows)
        step = before.scale * grid.scale.view(-1)
        bias = (block.bias.double() / step).round() - before.zero * codes.sum(1)
        multiplier, shift = fixed_point(step / after.scale)
        self.register_buffer("weight", codes.to(torch.int8))
        self.register_buffer("bias", bias.clamp(-(2**31), 2**31 - 1).to(torch.int32))
        self.register_buffer("multiplier", multiplier)
        self.register_buffer("shift", shift.to(torch.uint8))

    def forward(self, codes: Tensor) -> Tensor:
        """(n, channels, height, width) or (n, features), int8."""
        weights = self._weights()
        if self.geometry is None:
            return self._requantize(weights[0].product(codes))
        patches, height, width = _patches(codes, self.geometry, self.before.zero)
        parts = [
            weight.product(inputs.contiguous())
            for inputs, weight in zip(patches.chunk(len(weights), dim=1), weights, strict=True)
        ]
        out = self._requantize(torch.cat(parts, dim=1))
        return out.view(len(codes), height, width, -1).permute(0, 3, 1, 2).contiguous()

    def _weights(self) -> list[Int8Weights]:
        key = self.weight.data_ptr(), self.weight._version
        if self._products is None or self._products[0] != key:
            parts = self.weight.chunk(1 if self.geometry is None else self.geometry.groups)
            self._products = key, [Int8Weights(part, largest=128) for part in parts]
        return self._products[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_products": None}

    def _requantize(self, sums: Tensor) -> Tensor:
        sums = (sums.long() + self.bias.long()).clamp(-(2**31), 2**31 - 1)
        scaled = sums * self.multiplier.long()
        shift = self.shift.long()
        rounded = (scaled + (1 << (shift - 1))) >> shift
        return (rounded + self.after.zero).clamp(_LOW, _HIGH).to(torch.int8)


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


@dataclass(frozen=True)
class _Geometry:
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: int


class _Product(nn.Module):
    """A float convolution or linear layer with what follows it folded in."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight.detach()
        zeros = self.weight.new_zeros(len(self.weight))
        self.bias = zeros if layer.bias is None else layer.bias.detach()
        self.relu = False
        self.geometry: _Geometry | None = None
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or layer.dilation != (1, 1):
                raise ValueError(f"{layer}: zero padding and no dilation are what is supported")
            if isinstance(layer.padding, str):
                raise ValueError(f"{layer}: give the padding as numbers")
            self.geometry = _Geometry(
                _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding), layer.groups
            )

    def fold(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        if norm.running_var is None or norm.running_mean is None:
            raise ValueError(f"{norm} keeps no statistics; there is nothing to fold")
        factor = (norm.running_var + norm.eps).rsqrt()
        if norm.weight is not None:
            factor = factor * norm.weight.detach()
        shift = 0 if norm.bias is None else norm.bias.detach()
        self.weight = self.weight * factor.view(-1, *(1,) * (self.weight.dim() - 1))
        self.bias = (self.bias - norm.running_mean) * factor + shift

    def forward(self, values: Tensor) -> Tensor:
        if self.geometry is None:
            out = F.linear(values, self.weight, self.bias)
        else:
            g = self.geometry
            out = F.conv2d(values, self.weight, self.bias, g.stride, g.padding, groups=g.groups)
        return out.relu() if self.relu else out


def _blocks(model: nn.Sequential) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for layer in _flat(model):
        last = blocks[-1] if blocks else None
        open_product = isinstance(last, _Product) and not last.relu
        if isinstance(layer, nn.Conv2d | nn.Linear):
            blocks.append(_Product(layer))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and open_product:
            assert isinstance(last, _Product)
            last.fold(layer)
        elif isinstance(layer, nn.ReLU) and open_product:
            assert isinstance(last, _Product)
            last.relu = True
        elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d | nn.Flatten):
            blocks.append(layer)
        elif not isinstance(layer, nn.Dropout | nn.Identity):
            after = type(last).__name__ if last is not None else "the input"
            raise ValueError(f"{layer} after {after} has no integer form here; see IntegerModel")
    return blocks


def _flat(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return [layer for child in model for layer in _flat(child)]
    return [model]


class _Pool(nn.Module):
    """The largest or the mean of int8 windows; the mean rounds half up."""

    def __init__(
        self, kernel: tuple[int, int] | None, stride: tuple[int, int], padding: tuple[int, int],
        largest: bool, scale: Scale,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.largest, self.scale = largest, scale

    def forward(self, codes: Tensor) -> Tensor:
        if self.kernel is None:
            windows = codes.flatten(2)[:, :, None, None]
        else:
            rows, columns = self.padding
            fill = _LOW if self.largest else self.scale.zero
            codes = F.pad(codes, (columns, columns, rows, rows), value=fill)
            windows = codes.unfold(2, self.kernel[0], self.stride[0])
            windows = windows.unfold(3, self.kernel[1], self.stride[1]).flatten(4)
        if self.largest:
            return windows.amax(-1)
        count = windows.shape[-1]
        total = windows.sum(-1, dtype=torch.int64)
        return torch.div(2 * total + count, 2 * count, rounding_mode="floor").to(torch.int8)


def _integer_pool(layer: nn.Module, scale: Scale) -> nn.Module:
    if isinstance(layer, nn.Flatten):
        return layer
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        if layer.output_size not in (1, (1, 1)):
            raise ValueError(f"{layer}: only an output of 1 x 1 is supported")
        return _Pool(None, (1, 1), (0, 0), False, scale)
    assert isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
    if layer.ceil_mode or getattr(layer, "dilation", 1) != 1:
        raise ValueError(f"{layer}: no ceil_mode and no dilation are what is supported")
    if isinstance(layer, nn.AvgPool2d) and not layer.count_include_pad:
        raise ValueError(f"{layer}: count_include_pad=True is what is supported")
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    return _Pool(kernel, stride, _pair(layer.padding), isinstance(layer, nn.MaxPool2d), scale)


def _patches(codes: Tensor, geometry: _Geometry, fill: int) -> tuple[Tensor, int, int]:
    """(n * height * width, channels * kernel) of the output's height and width."""
    rows, columns = geometry.padding
    padded = F.pad(codes, (columns, columns, rows, rows), value=fill)
    windows = padded.unfold(2, geometry.kernel[0], geometry.stride[0])
    windows = windows.unfold(3, geometry.kernel[1], geometry.stride[1])
    height, width = windows.shape[2:4]
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, windows[0, :, 0, 0].numel()), height, width


def _scale_of(values: Tensor, observer: Observer) -> Scale:
    grid = grid_of(values.double().reshape(1, -1), 8, symmetric=False, observer=observer)
    return Scale(float(grid.scale), int(grid.zero))


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])

"""Training of an integer network: floats that are rounded wherever the integers will be.

See Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, section 3. The network runs the steps that `IntegerModel`
is built from, on the same scales, so both round at the same points. Activations that only clamp are
not computed, because rounding to a code clamps as well. Halves round up, as a shift rounds them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tinyml.integer.fixed_point import Scale, scales_for_bias
from tinyml.integer.model import IntegerModel, calibrated
from tinyml.integer.steps import Step
from tinyml.quantization.rounded_weight import RoundedWeight, learned, positive, same_value
from tinyml.validation import require_batches


class Rounding(nn.Module):
    """Rounding of values to the codes of a scale, whose step may be learned."""

    def __init__(self, scale: Scale, learn: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = scale
        self.step = nn.Parameter(torch.tensor(scale.scale, dtype=dtype)) if learn else None

    def now(self) -> Scale:
        """Return the scale with its current step."""
        scale = self.scale
        step = scale.scale if self.step is None else float(positive(self.step.detach()))
        return Scale(step, scale.zero, scale.bits)

    def forward(self, values: Tensor, windows: int = 0) -> Tensor:
        """Return S (q - Z); `windows` is the number of values per mean, or 0 without means."""
        low, high = (end - self.scale.zero for end in (self.scale.low, self.scale.high))
        step = values.new_tensor(self.scale.scale)
        if self.step is not None:
            step = learned(self.step, max(1, values[:1].numel() * high))
        clipped = (values / step).clamp(low, high)
        # Means of codes are often halves; float rounding must not round them down.
        up = 0.5 + (0.25 / windows if windows else 0.0)
        return step * same_value((clipped + up).floor(), clipped)


class Product(nn.Module):
    """The weight and bias of a convolution or linear layer, rounded like the int8 codes."""

    def __init__(self, step: Step, bits: int, learn_scale: bool) -> None:
        super().__init__()
        assert step.weight is not None
        self.weight = nn.Parameter(step.weight.detach().clone())
        self.bias = None if step.bias is None else nn.Parameter(step.bias.detach().clone())
        self.rounded = RoundedWeight(self.weight, bits, None, learn_scale)

    def forward(self, step: Step, values: Tensor, before: Scale, after: Scale) -> Tensor:
        """Return the step's value with the rounded weight and bias."""
        bias: Tensor | None = self.bias
        if bias is not None:
            rows, grid = self.rounded.grid(self.weight.detach())
            scale = scales_for_bias(rows, grid.scale, bias.detach(), before, after)
            unit = before.scale * scale.view(-1)
            bias = unit * same_value((bias / unit).round(), bias / unit)
        # The integers round a row's weights to a coarser scale if its bias is very large. This is
        # ignored, because such a row's products move the output by less than one code.
        return step.product(values, self.rounded(self.weight), bias)


class IntegerTraining(nn.Module):
    """A trainable network; `integers()` returns the equivalent `IntegerModel`."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        bits: int,
        activation_bits: int,
        learn_scale: bool,
    ) -> None:
        super().__init__()
        batches = require_batches(batches)
        self.steps, scales = calibrated(model, batches, bits, activation_bits)
        dtype = next((s.weight.dtype for s in self.steps if s.weight is not None), batches[0].dtype)
        unique = {scale: Rounding(scale, learn_scale, dtype) for scale in scales}
        self.roundings = nn.ModuleList(unique[scale] for scale in scales)
        self.products = nn.ModuleDict()
        for number, step in enumerate(self.steps):
            if step.kind == "product":
                self.products[str(number)] = Product(step, bits, learn_scale)
                step.weight = step.bias = step.grid = None  # stored in `products`, see `integers`

    def forward(self, inputs: Tensor) -> Tensor:
        """Map float inputs to float outputs, with each value rounded to its int8 code."""
        values: dict[Step, Tensor] = {self.steps[0]: self.roundings[0](inputs)}
        for number, step in enumerate(self.steps[1:], 1):
            values[step] = self.value(number, [values[source] for source in step.sources])
        return values[self.steps[-1]]

    def value(self, number: int, sources: Sequence[Tensor]) -> Tensor:
        """Return the value of a step from the values that it reads."""
        step, rounding = self.steps[number], self.roundings[number]
        if step.kind == "product":
            before = self.roundings[self.steps.index(step.sources[0])]
            scales = (cast(Rounding, scale_rounding).now() for scale_rounding in (before, rounding))
            result: Tensor = rounding(self.products[str(number)](step, *sources, *scales))
            return result
        result = step.uncut(*sources)
        if step.kind == "mean":
            assert step.geometry is not None
            return rounding(result, math.prod(step.geometry.kernel))
        return result if step.kind in ("largest", "reshape") else rounding(result)

    @torch.no_grad()
    def integers(self) -> IntegerModel:
        """Return the integer network with the outputs of this one."""
        steps = copy.deepcopy(self.steps)
        for key, product in self.products.items():
            assert isinstance(product, Product)
            step = steps[int(key)]
            step.weight = product.weight.detach().clone()
            step.bias = None if product.bias is None else product.bias.detach().clone()
            step.grid = product.rounded.grid(step.weight)[1]
        now = {rounding: cast(Rounding, rounding).now() for rounding in self.roundings}
        return IntegerModel.of(steps, [now[rounding] for rounding in self.roundings])

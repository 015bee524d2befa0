"""Differentiable rounding: the forward pass rounds to a grid, and the gradient passes through.

The gradient of the rounding is the straight-through estimator (Bengio et al., 2013). If the grid is
computed from the extremes of the weights, every weight has this gradient (Jacob et al., 2018,
section 3.1), even if the quotient of the largest weight and the rounded step is above the largest
code. With a learned step, the gradient of weights outside the range is zero, and autograd computes
the gradient of the step. See equations 3 and 5 and section 2.2 of Esser et al., "Learned Step Size
Quantization", 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinyml.compressed_weight import CompressedWeight
from tinyml.quantization.grid import Grid, as_rows, compute_grid, widen


class RoundedWeight(CompressedWeight):
    """A dense trainable weight that the layer reads in rounded form."""

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        group_size: int | None,
        learn_scale: bool,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        self.bits = bits
        self.group_size = group_size
        rows = self._as_rows(weight.detach())
        high = 2 ** (bits - 1) - 1
        step = 2 * rows.abs().mean(1, keepdim=True) / high**0.5  # as in LSQ
        step = step.minimum(rows.abs().amax(1, keepdim=True) / high)  # the largest useful step
        self.step = nn.Parameter(make_positive(step)) if learn_scale else None

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the dense weight, which is the trained tensor."""
        return weight

    def format(self) -> list[int]:
        """Return the bits and the width of the groups (0 for one scale per output)."""
        return [self.bits, self.group_size or 0]

    def compute_rows_and_grid(self, weight: Tensor) -> tuple[Tensor, Grid]:
        """Return the weight as rows, and their current grid."""
        rows = self._as_rows(weight)
        # The extremes of a 16-bit row may have a scale below the normal numbers of its type.
        grid = compute_grid(widen(rows.detach()), self.bits).round_scales(rows.dtype)
        grid = Grid(grid.scale.to(rows), grid.zero.to(rows), grid.low, grid.high)
        if self.step is not None:
            scale = make_positive(self.step.detach())
            grid = Grid(scale, torch.zeros_like(scale), -grid.high, grid.high)
        return rows, grid

    def _as_rows(self, weight: Tensor) -> Tensor:
        weight = weight.t() if self.transposed else weight
        return as_rows(weight, self.group_size)

    def _restore_shape(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows.view(weight.shape[::-1]).t() if self.transposed else rows.view(weight.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight, differentiable in the weight and in a learned step."""
        rows, grid = self.compute_rows_and_grid(weight)
        if self.step is None:
            rounded = grid.dequantize(grid.quantize(rows.detach()))
            return self._restore_shape(attach_gradient(rounded, rows), weight)
        step = make_positive(self.step)
        # LSQ multiplies the gradient of a step that n values use by (n q_max)^-0.5.
        step = attach_gradient(step, step * (rows.shape[1] * grid.high) ** -0.5)
        return self._restore_shape(round_through(rows, step, grid.low, grid.high), weight)


def round_through(rows: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """Return step * round(rows / step), with codes clamped to `low` and `high`."""
    clipped = (rows / step).clamp(low, high)
    return step * attach_gradient(clipped.round(), clipped)


def make_positive(step: Tensor) -> Tensor:
    """Return the absolute value of a step, at least the smallest normal number."""
    return step.abs().clamp(min=torch.finfo(step.dtype).tiny)


def attach_gradient(value: Tensor, source: Tensor) -> Tensor:
    """Return exactly `value`, with the gradient of `source`."""
    return _GradientOf.apply(value.detach(), source)


class _GradientOf(torch.autograd.Function):
    generate_vmap_rule = True  # for `torch.func`

    @staticmethod
    def forward(value: Tensor, source: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]

"""Train with the rounding in place, so that the weights settle where rounding does no harm.

Notable:
- the forward pass sees rounded weights, the gradient passes the rounding as if it were not there
  (the straight-through estimator; Bengio et al., 2013) and is zero where the range cuts off;
- with `learn_scale` the step is a parameter too (Esser et al., "Learned Step Size Quantization",
  2020, equation 3 and section 2.2), from autograd rather than a formula of its own;
- what is trained is what is stored: `convert` gives the same outputs to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinyml.layers import (
    QUANTIZABLE,
    CompressedWeight,
    check_bits,
    compress_weights,
    compressed_weight,
    is_conv1d,
    plain_copy,
    weight_of,
)
from tinyml.quantization.grid import Granularity, Grid, as_rows, grid_of
from tinyml.quantization.grid_weight import GridWeight


def prepare_qat(
    model: nn.Module,
    bits: int = 4,
    *,
    granularity: Granularity | None = None,
    group_size: int | None = None,
    learn_scale: bool = False,
    layers: Sequence[type[nn.Module]] = QUANTIZABLE,
    protect: Sequence[str] = (),
) -> nn.Module:
    """A copy of `model` to train, whose layers act with rounded weights. See `convert`."""
    kind = granularity or ("group" if group_size else "channel")
    check_bits(bits, "symmetric training takes", least=2)

    def compress(name: str, layer: nn.Module) -> CompressedWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        return RoundedWeight(weight, bits, kind, group_size, learn_scale, transposed)

    return compress_weights(plain_copy(model), layers, compress, protect)


@torch.no_grad()
def convert(model: nn.Module) -> nn.Module:
    """A copy of a model from `prepare_qat` that stores whole numbers instead of the weights."""
    model = copy.deepcopy(model)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(compressed_weight(layer), RoundedWeight)
    }
    if not layers:
        raise ValueError("no layer trains with rounding; prepare_qat(model) makes such a model")
    stored: dict[int, GridWeight] = {}
    for layer in layers.values():
        rounded = cast(RoundedWeight, compressed_weight(layer))
        weight = cast(Any, layer).parametrizations.weight.original.detach()
        if id(rounded) not in stored:
            rows, grid = rounded.grid(weight)
            stored[id(rounded)] = GridWeight(
                grid.quantize(rows), grid, weight, rounded.bits, transposed=rounded.transposed
            )
        # Exchanged in place: taking a parametrization off would take it off the original too,
        # because torch gives both copies of a layer one class.
        slot = cast(Any, layer).parametrizations.weight
        slot[0] = stored[id(rounded)]
        slot.original = nn.Parameter(slot[0].right_inverse(weight), weight.requires_grad)
    return model


class RoundedWeight(CompressedWeight):
    """A dense weight that the layer sees rounded."""

    def __init__(
        self,
        weight: Tensor,
        bits: int,
        granularity: Granularity,
        group_size: int | None,
        learn_scale: bool,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        self.bits, self.granularity, self.group_size = bits, granularity, group_size
        rows = self._rows(weight.detach())
        high = 2 ** (bits - 1) - 1
        step = 2 * rows.abs().mean(1, keepdim=True) / high**0.5
        self.step = nn.Parameter(step.clamp(min=1e-8)) if learn_scale else None

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The dense weight, which is what is trained."""
        return weight

    def format(self) -> list[int]:
        """Bits and the width of the rows with a scale each (0: a channel, -1: the tensor)."""
        return [self.bits, self.group_size or -(self.granularity == "tensor")]

    def grid(self, weight: Tensor) -> tuple[Tensor, Grid]:
        """The weight as rows, and their grid now."""
        rows = self._rows(weight)
        grid = grid_of(rows.detach(), self.bits)
        if self.step is not None:
            scale = self.step.detach().abs().clamp(min=1e-8)
            grid = Grid(scale, torch.zeros_like(scale), -grid.high, grid.high)
        return rows, grid

    def _rows(self, weight: Tensor) -> Tensor:
        weight = weight.t() if self.transposed else weight
        return as_rows(weight, self.granularity, self.group_size)

    def _shaped(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows.view(weight.shape[::-1]).t() if self.transposed else rows.view(weight.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """The rounded weight, differentiable in the weight and, if it learns, the step."""
        rows, grid = self.grid(weight)
        if self.step is None:
            rounded = round_through(rows, grid.scale, grid.low, grid.high)
            return self._shaped(rounded, weight)
        # Esser et al.: the step's gradient is a sum over many weights, so it is scaled down.
        share = (rows.shape[1] * grid.high) ** -0.5
        step = self.step.abs().clamp(min=1e-8)
        step = _same_value(step, step * share)
        return self._shaped(round_through(rows, step, grid.low, grid.high), weight)


def round_through(rows: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """scale * round(rows / scale) in range, with the rounding invisible to the gradient."""
    clipped = (rows / scale).clamp(low, high)
    return scale * _same_value(clipped.round(), clipped)


def _same_value(value: Tensor, gradient_of: Tensor) -> Tensor:
    """`value`, to the bit, with the gradient of `gradient_of`."""
    return _ValueOf.apply(value.detach(), gradient_of)


class _ValueOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]

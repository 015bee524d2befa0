"""The steps of a float network: products, sums, tables and pools of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyml.quantization.grid import Grid


@dataclass(frozen=True)
class Geometry:
    """The window of a convolution or pooling: (rows, columns) per field."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


@dataclass(eq=False)
class Step:
    """A value computed from earlier values; `kind` determines which fields are relevant."""

    #: One of input, product, sum, gate, cat, table, largest, mean and reshape.
    kind: str
    name: str
    sources: list[Step]
    shape: tuple[int, ...]
    weight: Tensor | None = None
    bias: Tensor | None = None
    #: The grid of the weight, with one row per output.
    grid: Grid | None = None
    geometry: Geometry | None = None
    signs: tuple[float, ...] = ()
    function: Callable[[Tensor], Tensor] | None = None
    #: The folded activations that clamp the range, in order.
    cuts: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    operator: str = ""

    def run(self, *values: Tensor) -> Tensor:
        """Return the float value of the step."""
        result = self.uncut(*values)
        for cut in self.cuts:
            result = cut(result)
        return result

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the step's convolution or linear layer with this weight."""
        if (g := self.geometry) is None:
            return F.linear(values, weight, bias)
        return F.conv2d(values, weight, bias, g.stride, g.padding, g.dilation, g.groups)

    def uncut(self, *values: Tensor) -> Tensor:
        """Return the float value of the step before its range is clamped."""
        first, g = values[0], self.geometry
        if self.kind == "product":
            assert self.weight is not None
            return self.product(first, self.weight, self.bias)
        if self.kind == "sum":
            return sum(
                (value * sign for value, sign in zip(values, self.signs, strict=True)),
                torch.zeros(()),
            )
        if self.kind == "gate":
            return first * values[1]
        if self.kind == "cat":
            return torch.cat(values, 1)
        if self.kind == "table":
            assert self.function is not None
            return self.function(first)
        if self.kind == "reshape":
            return first.reshape(len(first), *self.shape[1:])
        assert g is not None
        if self.kind == "largest":
            return F.max_pool2d(first, g.kernel, g.stride, g.padding)
        return F.avg_pool2d(first, g.kernel, g.stride, g.padding)

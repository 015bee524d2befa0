"""The steps of a float network: products, sums, tables and pools of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


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
    geometry: Geometry | None = None
    signs: tuple[float, ...] = ()
    function: Callable[[Tensor], Tensor] | None = None
    #: The folded activations that clamp the range, in order.
    cuts: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    operator: str = ""

    def run(self, *values: Tensor) -> Tensor:
        """Return the float value of the step."""
        result = self._uncut(*values)
        for cut in self.cuts:
            result = cut(result)
        return result

    def _uncut(self, *values: Tensor) -> Tensor:
        """Return the float value of the step before its range is clamped."""
        first, g = values[0], self.geometry
        if self.kind == "product":
            assert self.weight is not None
            if g is None:
                return F.linear(first, self.weight, self.bias)
            options = g.stride, g.padding, g.dilation, g.groups
            return F.conv2d(first, self.weight, self.bias, *options)
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

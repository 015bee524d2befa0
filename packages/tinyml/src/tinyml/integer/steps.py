"""The steps of a float network: products, sums, elementwise functions and pooling of values."""

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
    """A value of a network, computed from the values of earlier steps."""

    name: str
    sources: list[Step]
    #: The shape of the value; its first dimension is the batch.
    shape: tuple[int, ...]
    #: Folded activations that clamp the value, in order.
    clamps: list[Callable[[Tensor], Tensor]] = field(default_factory=list, kw_only=True)

    def run(self, *values: Tensor) -> Tensor:
        """Return the float value of the step from the values of its sources."""
        result = self._compute_unclamped(*values)
        for clamp in self.clamps:
            result = clamp(result)
        return result

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        """Return the float value before the folded activations."""
        raise NotImplementedError


class Input(Step):
    """The input of the network."""


@dataclass(eq=False)
class MatMul(Step):
    """A convolution, or a linear layer if there is no geometry."""

    weight: Tensor
    bias: Tensor | None = None
    geometry: Geometry | None = None

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        (value,) = values
        if self.geometry is None:
            return F.linear(value, self.weight, self.bias)
        g = self.geometry
        return F.conv2d(value, self.weight, self.bias, g.stride, g.padding, g.dilation, g.groups)


@dataclass(eq=False)
class Sum(Step):
    """The sum of two values, or their difference: each value is multiplied by its sign."""

    signs: tuple[float, float]

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        (a, b), (sign_a, sign_b) = values, self.signs
        return a * sign_a + b * sign_b


class Mul(Step):
    """The elementwise product of two values, with broadcasting."""

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        a, b = values
        return a * b


class Concatenation(Step):
    """The concatenation of several values along their channels."""

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        return torch.cat(values, 1)


@dataclass(eq=False)
class Table(Step):
    """An elementwise function, such as an activation."""

    function: Callable[[Tensor], Tensor]

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        return self.function(*values)


@dataclass(eq=False)
class Pool(Step):
    """The maximum or the mean of windows; the mean includes the zeros of the padding."""

    geometry: Geometry
    is_maximum: bool

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        (value,) = values
        g = self.geometry
        if self.is_maximum:
            return F.max_pool2d(value, g.kernel, g.stride, g.padding)
        return F.avg_pool2d(value, g.kernel, g.stride, g.padding)


class Reshape(Step):
    """A reshape in which the first dimension remains the batch."""

    def _compute_unclamped(self, *values: Tensor) -> Tensor:
        (value,) = values
        return value.reshape(len(value), *self.shape[1:])

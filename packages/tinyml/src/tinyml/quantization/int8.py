"""A linear layer that multiplies int8 weights and inputs exactly (Note [Exact products])."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tinyml.conversion import without_autocast
from tinyml.layers import get_weight, put_outputs_first
from tinyml.quantization.fastest_linear import FastestLinear
from tinyml.quantization.grid import compute_grid, widen
from tinyml.quantization.products import (
    fits_float32,
    is_int8_exact,
    multiply_in_float32,
    multiply_in_float64,
    multiply_in_int8,
)
from tinyml.size import as_integers
from tinyml.validation import check_finite


class Int8Linear(FastestLinear):
    """A layer y = (q_x q_w^T) s_x s_w + bias, with a scale per token and a scale per output.

    Inputs are rounded to int8 at each call. Results have the type of the inputs. With
    may_stay_float=True, the layer computes in float with the dense weight for numbers of tokens for
    which the integer product is not clearly faster. `explain` returns the choice and the times.
    `.to(dtype)` converts the bias and the type of `weight`; the codes and their scales remain the
    same. Scales are float64 if the weight is, and float32 otherwise.
    """

    weight_codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Module, *, may_stay_float: bool = False) -> None:
        super().__init__(cast(Tensor | None, linear.bias))
        weight = put_outputs_first(linear, get_weight(linear))
        self.out_features, self.in_features = weight.shape
        if not may_stay_float:
            self.reference = "float32"
        self.dtype = weight.dtype
        check_finite("the weight", weight)
        grid = compute_grid(widen(weight), 8)
        self.register_buffer("weight_codes", grid.quantize(widen(weight)).to(torch.int8))
        self.register_buffer("scale", grid.scale.view(-1))

    @property
    def weight(self) -> Tensor:
        """Return the dense weight that the codes represent."""
        return (self.weight_codes * self.scale[:, None]).to(self.dtype)

    def stored(self) -> tuple[Any, Any]:
        """Return the codes and their scales."""
        return self._buffers["weight_codes"], self._buffers["scale"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        # The codes were rounded with these scales, so a conversion must not round the scales.
        # Conversions leave integers unchanged, so `fn` receives the bits of the scales as integers.
        scale = self.scale
        super()._apply(fn, recurse)
        with torch.inference_mode(mode=False):
            self.scale = fn(as_integers(scale)).view(scale.dtype)
        return self

    def is_correct(self, inputs: Tensor) -> bool:
        """Return True if int8 instructions are exact for inputs of this shape."""
        return is_int8_exact(self.weight_codes, inputs)

    def compute_untimed(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the reference: the float product, or exact sums of the codes."""
        if self.reference == "float":
            return super().compute_untimed(inputs)
        return self._multiply(inputs, partial(multiply_in_float64, self.weight_codes))

    def _multiply_in_int8(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, partial(multiply_in_int8, self.weight_codes))

    def _multiply_in_float32(self, inputs: Tensor) -> Tensor:
        def prepare() -> tuple[Tensor, bool]:
            return self.weight_codes.float(), not fits_float32(self.weight_codes)

        dense, in_parts = self.get_prepared("float32", prepare)
        with without_autocast(inputs.device):  # autocast would round the codes to 16 bits
            return self._multiply(inputs, partial(multiply_in_float32, dense, in_parts=in_parts))

    def _multiply(self, inputs: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        if not inputs.is_floating_point():
            raise TypeError(f"expected inputs of a floating-point type, got {inputs.dtype}")
        tokens = widen(inputs.reshape(-1, self.in_features))
        min_extreme = 128 * torch.finfo(tokens.dtype).tiny  # then the scale is a normal number
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=min_extreme).div_(127)
        sums = product(tokens.div(scale).round_()).to(tokens.dtype)
        # Multiply by the weights' scales first: a sum times the scale of large inputs may overflow.
        return self.add_bias_and_cast(sums.mul_(self.scale).mul_(scale), inputs)

    kernel: ClassVar[str] = "int8"
    implementations: ClassVar[dict[str, Callable[[Any, Tensor], Tensor]]] = {
        "int8": _multiply_in_int8,
        "float32": _multiply_in_float32,
        "float": FastestLinear.compute_in_float,
    }

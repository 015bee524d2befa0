"""A linear layer that multiplies int8 weights and inputs exactly (Note [Exact products])."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tinyml.layers import get_weight, put_outputs_first
from tinyml.quantization.fastest_linear import DECISION_TOKENS, FastestLinear
from tinyml.quantization.grid import compute_grid, widen
from tinyml.quantization.products import Int8Weights
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
        self.always = None if may_stay_float else "int8"
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

    def explain(self, tokens: Sequence[int] = DECISION_TOKENS) -> list[str]:
        """Return the timing of the exact products for each number of tokens.

        If the layer may stay in float, the timing of its implementations precedes that of the
        products.
        """
        weights = self._get_weights()
        products = [
            f"{n} tokens: {weights.get_timing(self.make_example(n).float())}" for n in tokens
        ]
        if self.always:
            return products
        return [f"{a}; {b}" for a, b in zip(super().explain(tokens), products, strict=True)]

    def _multiply(self, inputs: Tensor) -> Tensor:
        if not inputs.is_floating_point():
            raise TypeError(f"expected inputs of a floating-point type, got {inputs.dtype}")
        tokens = widen(inputs.reshape(-1, self.in_features))
        min_extreme = 128 * torch.finfo(tokens.dtype).tiny  # then the scale is a normal number
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=min_extreme).div_(127)
        sums = self._get_weights().compute_product(tokens.div(scale).round_()).to(tokens.dtype)
        # Multiply by the weights' scales first: a sum times the scale of large inputs may overflow.
        return self.add_bias_and_cast(sums.mul_(self.scale).mul_(scale), inputs)

    def _get_weights(self) -> Int8Weights:
        weights: Int8Weights = self.get_prepared("int8", lambda: Int8Weights(self.weight_codes))
        return weights

    implementations: ClassVar[dict[str, Callable[[Any, Tensor], Tensor]]] = {
        "int8": _multiply,
        "float": FastestLinear.compute_in_float,
    }

"""A linear layer that multiplies integers: int8 weights, and inputs rounded dynamically.

The result is defined by integer arithmetic, so it has the same bits on every machine. Only the time
depends on the exact product that is used (see `products`). `smoothquant` first moves a part of the
range of large inputs into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from tinyml.conversion import dense_copy, evaluation_mode, with_version_counter
from tinyml.layers import (
    is_conv1d,
    layers_of,
    outputs_first,
    protected_modules,
    weight_identity,
    weight_of,
)
from tinyml.quantization.calibration import watch_inputs
from tinyml.quantization.fastest_linear import SHOWN_TOKENS, FastestLinear, with_fastest_linears
from tinyml.quantization.grid import grid_of, wide
from tinyml.quantization.products import Int8Weights
from tinyml.state_dict_check import match_optional_buffers
from tinyml.validation import Progress, check_finite, require_batches

_LEAST = 128 * torch.finfo(torch.float32).tiny


class Int8Linear(FastestLinear):
    """A layer y = (q_x q_w^T) s_x s_w + bias, with a scale per token and a scale per output.

    With may_stay_float=True the fastest implementation is used for each number of tokens: this
    product, bfloat16 inputs with the stored weights, or the dense weight in float. `explain`
    returns the choice and the times. `.to(dtype)` converts the bias and the results; the codes and
    their scales remain the same.
    """

    weight_codes: Tensor
    scale: Tensor
    divide: Tensor | None

    def __init__(
        self,
        linear: nn.Module,
        *,
        may_stay_float: bool = False,
        divide: Tensor | None = None,
    ) -> None:
        super().__init__(cast(Tensor | None, linear.bias))
        weight = outputs_first(linear, weight_of(linear))
        self.out_features, self.in_features = weight.shape
        self.always, self.dtype = None if may_stay_float else "int8", weight.dtype
        self.transposed = is_conv1d(linear)
        # SmoothQuant divides each input by a factor and multiplies its weights by the same
        # factor. Both use the stored factor, after it was rounded to `dtype`.
        if divide is not None:
            limits = torch.finfo(self.dtype)
            divide = divide.to(self.dtype).clamp(limits.tiny, limits.max)
        self.register_buffer("divide", divide)
        weight = weight.float() if self.divide is None else weight.float() * wide(self.divide)
        grid = grid_of(weight, 8)
        codes = grid.quantize(weight).to(torch.int8)
        self.register_buffer("weight_codes", with_version_counter(codes))
        self.register_buffer("scale", with_version_counter(grid.scale.view(-1)))

    @property
    def weight(self) -> Tensor:
        """Return the dense weight that the codes represent."""
        dense = self.weight_codes * self.scale[:, None]
        return (dense if self.divide is None else dense / wide(self.divide)).to(self.dtype)

    def stored(self) -> tuple[Any, Any]:
        """Return the codes and their scales."""
        return self._buffers["weight_codes"], self._buffers["scale"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        # The codes were rounded with these factors, so only the layer's inputs, outputs and bias
        # change their type. A conversion of types leaves integers unchanged.
        exact = {"scale": self.scale, "divide": self.divide}
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            if tensor is not None:
                bits = torch.int32 if tensor.itemsize == 4 else torch.int16
                self._buffers[name] = fn(tensor.view(bits)).view(tensor.dtype)
        return self

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        match_optional_buffers(self, state, prefix, "weight_codes")
        super()._load_from_state_dict(state, prefix, *rest)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight, as an embedding reads them."""
        return (self.weight_codes[index] * self.scale[index][..., None]).to(self.dtype)

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """Return the implementation, the exact product and all times per number of tokens."""
        weights = self._weights()
        products = [f"{n} tokens: {weights.choice(self.example(n).float())}" for n in tokens]
        if self.always:
            return products
        return [f"{a}; {b}" for a, b in zip(super().explain(tokens), products, strict=True)]

    def _multiply(self, inputs: Tensor) -> Tensor:
        tokens = self._divided(inputs).float()
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(127)
        sums = self._weights().product(tokens.div(scale).round_()).float()
        return self.finished(sums.mul_(scale).mul_(self.scale), inputs)

    def _divided(self, inputs: Tensor) -> Tensor:
        """Return the tokens (n, in), divided by the factors of SmoothQuant.

        The quotient is not rounded to 16 bits, because the product rounds it later.
        """
        if self.divide is not None:
            inputs = inputs.float() / self.divide.float()
        return inputs.reshape(-1, self.in_features)

    def _weights(self) -> Int8Weights:
        weights: Int8Weights = self.prepared("int8", lambda: Int8Weights(self.weight_codes))
        return weights

    def _weights_alone(self, inputs: Tensor) -> Tensor:
        """Multiply bfloat16 inputs by the stored weights, which are a quarter of float32's size."""
        tokens = self._divided(inputs).bfloat16()
        ones = torch.ones(self.out_features, dtype=torch.bfloat16, device=tokens.device)
        sums = torch._weight_int8pack_mm(tokens, self.weight_codes, ones)
        return self.finished(sums.float().mul_(self.scale), inputs)

    implementations: ClassVar[dict[str, Callable[[Any, Tensor], Tensor]]] = {
        "int8": _multiply,
        "weights alone": _weights_alone,
        "float": FastestLinear.by_dense_weight,
    }


def with_int8_linears(
    model: nn.Module,
    activations: Literal["dynamic", "auto"] = "dynamic",
    protected: Collection[str] = (),
    divide: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace linear layers by int8 layers in place; with "auto" only those that become faster.

    `divide` maps the name of a layer to the factors by which its inputs are divided.
    """
    auto = activations == "auto"

    def make(name: str, linear: nn.Module) -> Int8Linear | None:
        over = (divide or {}).get(name)
        table = Int8Linear(linear, may_stay_float=auto, divide=over)
        return table if not auto or table.gains() else None

    return with_fastest_linears(model, make, protected, progress)


@torch.no_grad()
def smoothquant(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    alpha: float = 0.5,
    activations: Literal["dynamic", "auto"] = "dynamic",
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return `quantize(model, activations=...)` of a model whose inputs were smoothed first.

    Each input is divided by s = max|x|^alpha / max|w|^(1 - alpha), and its weights are multiplied
    by s, so that the weights take over part of the inputs' range (Xiao et al., "SmoothQuant", 2023,
    equation 4). Layers that share their weight with another layer are not smoothed.
    """
    if activations not in ("dynamic", "auto"):
        raise ValueError(f"expected activations 'dynamic' or 'auto', got {activations!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"expected 0 <= alpha <= 1, got {alpha}")
    model, divide = dense_copy(model, (nn.Linear,)), {}
    layers = layers_of(model, (nn.Linear,), protect)
    shared = [weight_identity(module) for module in model.modules()]

    largest: dict[str, Tensor] = {}

    def update_largest(name: str, inputs: Tensor) -> None:
        if len(inputs):
            most = inputs.float().abs().amax(0)
            largest[name] = torch.maximum(most, largest.get(name, most))

    with evaluation_mode(model):
        watch_inputs(model, require_batches(batches), layers, update_largest)
    for name, most in largest.items():
        weight = outputs_first(layers[name], weight_of(layers[name])).float()
        check_finite(f"{name}.weight", weight)
        check_finite(f"the inputs of {name}", most)
        most = without_dead_inputs(most).clamp(min=1e-5)
        if shared.count(weight_identity(layers[name])) == 1:
            divide[name] = most**alpha / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)
    return with_int8_linears(model, activations, protected_modules(model, protect), divide)


def without_dead_inputs(size: Tensor) -> Tensor:
    """Return the sizes of a layer's inputs with zeros replaced by the median of the other sizes.

    Calibration says nothing about the size of an input that was always zero. A factor of almost
    zero would round its weights to zero, or divide its next value by almost zero.
    """
    alive = size > 0
    return torch.where(alive, size, size[alive].median() if alive.any() else torch.ones_like(size))

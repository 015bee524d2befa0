"""A linear layer that multiplies whole numbers: int8 weights, inputs rounded as they come.

Notable: the answer is defined by the integers alone, so it has the same bits on every machine; only
the time depends on which exact product this machine is good at (see `products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.grid import Observer, grid_of
from tinyml.products import Int8Weights, ShapeClass, fastest, shape_class

_LEAST = 128 * torch.finfo(torch.float32).tiny
_SHOWN_TOKENS = (1, 32, 512)  # one token of a decoder, a small batch, a prompt
WORTH_IT = 1.1
"""How many times faster int8 has to be before "auto" takes it: less is noise."""
_both_times: dict[tuple[ShapeClass, torch.dtype], dict[str, float]] = {}


class Int8Linear(nn.Module):
    """y = (q_x q_w^T) s_x s_w + bias, with a scale for each token and one for each output.

    For inference: it has no gradient. With may_stay_float=True a shape class for which no exact
    product beats float32 here is computed in float32, with the dense weight that the codes stand
    for: never slower, but which of the two it is depends on the machine. `explain` says.
    """

    weight_codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self, linear: nn.Linear, observer: Observer = "minmax", *, may_stay_float: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.may_stay_float = may_stay_float
        weight = linear.weight.detach().float()
        grid = grid_of(weight, 8, observer=observer)
        self.register_buffer("weight_codes", grid.quantize(weight).to(torch.int8))
        self.register_buffer("scale", grid.scale.view(-1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.dtype = linear.weight.dtype
        self._prepared: tuple[Any, Int8Weights, Tensor | None] | None = None
        self._float_wins: dict[Any, bool] = {}

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        return self.weight_codes * self.scale[:, None]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        weights, dense = self._weights()
        if dense is not None and self._stays_float(inputs, dense):
            return F.linear(inputs, dense.to(inputs.dtype), self.bias)
        return self._multiply(weights, inputs)

    def explain(self, tokens: Sequence[int] = _SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        lines = []
        for count in tokens:
            inputs = torch.randn(count, self.in_features, device=self.scale.device)
            weights, dense = self._weights()
            line = str(weights.choice(inputs))
            if dense is not None:
                both = self._both(inputs, dense)
                kind = "float" if self._stays_float(inputs, dense) else "int8"
                listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in both.items())
                line = f"computed in {kind} (whole layer: {listed}); {line}"
            lines.append(line)
        return lines

    def gains(self, tokens: Sequence[int] = _SHOWN_TOKENS) -> bool:
        """Whether int8 is worth it here for any of these numbers of tokens."""
        shapes = ((count, self.in_features) for count in tokens)
        inputs = [torch.randn(s, device=self.scale.device, dtype=self.dtype) for s in shapes]
        dense = self.weight.to(self.dtype)
        return not all(self._stays_float(x, dense) for x in inputs)

    def _multiply(self, weights: Int8Weights, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features).float()
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(127)
        outputs = weights.product(tokens.div(scale).round_()).float()
        outputs.mul_(scale).mul_(self.scale)
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def _stays_float(self, inputs: Tensor, dense: Tensor) -> bool:
        count = inputs.numel() // self.in_features
        key = (count - 1).bit_length(), inputs.dtype, inputs.device, torch.get_num_threads()
        if key not in self._float_wins:
            both = self._both(inputs, dense)
            self._float_wins[key] = both["float"] <= WORTH_IT * both["int8"]
        return self._float_wins[key]

    def _both(self, inputs: Tensor, dense: Tensor) -> dict[str, float]:
        key = shape_class(inputs.reshape(-1, self.in_features), self.out_features), inputs.dtype
        if key not in _both_times:
            weights, dense = self._weights()[0], dense.to(inputs.dtype)
            _both_times[key] = fastest(
                {
                    "int8": lambda: self._multiply(weights, inputs),
                    "float": lambda: F.linear(inputs, dense, self.bias),
                }
            )
        return _both_times[key]

    def _weights(self) -> tuple[Int8Weights, Tensor | None]:
        # A state dict that is loaded, a device or a type: each leaves another tensor or version.
        codes, scale = self.weight_codes, self.scale
        key = codes.data_ptr(), codes._version, scale.data_ptr(), scale._version
        if self._prepared is None or self._prepared[0] != key:
            dense = self.weight.to(self.dtype) if self.may_stay_float else None
            self._prepared = key, Int8Weights(codes), dense
            self._float_wins.clear()
        return self._prepared[1], self._prepared[2]

    def __getstate__(self) -> dict[str, Any]:
        # What is prepared for speed is made anew by whoever copies or unpickles the layer.
        return self.__dict__ | {"_prepared": None, "_float_wins": {}}


def with_int8_linears(
    model: nn.Module,
    observer: Observer = "minmax",
    activations: Literal["dynamic", "auto"] = "dynamic",
) -> nn.Module:
    """Replace every nn.Linear of `model`, in place; return the model."""
    made: dict[int, Int8Linear | None] = {}

    def replace(linear: nn.Linear) -> Int8Linear | None:
        if id(linear) not in made:
            layer = Int8Linear(linear, observer, may_stay_float=activations == "auto")
            gains = activations == "dynamic" or layer.gains()
            made[id(linear)] = layer if gains else None
        return made[id(linear)]

    if isinstance(model, nn.Linear):
        return replace(model) or model
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (layer := replace(child)) is not None:
                setattr(parent, name, layer)
    if not made:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    return model

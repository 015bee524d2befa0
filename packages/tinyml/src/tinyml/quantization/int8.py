"""A linear layer that multiplies whole numbers: int8 weights, inputs rounded as they come.

Notable: the answer is defined by the integers alone, so it has the same bits on every machine; only
the time depends on which exact product this machine is good at (see `products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.layers import compressed_weight, identity, is_conv1d, outputs_first, weight_of
from tinyml.quantization.grid import Observer, grid_of
from tinyml.quantization.products import Int8Weights, ShapeClass, fastest, shape_class

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
        self, linear: nn.Module, observer: Observer = "minmax", *, may_stay_float: bool = False
    ) -> None:
        super().__init__()
        weight = outputs_first(linear, weight_of(linear))
        self.out_features, self.in_features = weight.shape
        self.may_stay_float, self.dtype = may_stay_float, weight.dtype
        weight = weight.float()
        grid = grid_of(weight, 8, observer=observer)
        self.register_buffer("weight_codes", grid.quantize(weight).to(torch.int8))
        self.register_buffer("scale", grid.scale.view(-1))
        bias = cast(Tensor | None, linear.bias)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
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

    def way(self, inputs: Tensor) -> str:
        """The name of the product that is taken for inputs like these."""
        return self._weights()[0].choice(inputs.reshape(-1, self.in_features).float()).way

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


class Int8Embedding(nn.Module):
    """Rows of an `Int8Linear`'s weight: an embedding that is tied to the layer above it."""

    def __init__(self, table: Int8Linear) -> None:
        super().__init__()
        self.table = table

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        return self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        """(...) -> (..., width)."""
        rows = self.table.weight_codes[indices] * self.table.scale[indices][..., None]
        return rows.to(self.table.dtype)


def with_int8_linears(
    model: nn.Module,
    observer: Observer = "minmax",
    activations: Literal["dynamic", "auto"] = "dynamic",
) -> nn.Module:
    """Replace every linear layer of `model`, in place; return the model.

    Layers that share a weight share its codes: an embedding that is tied to the head stays tied.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear or is_linear_alike(m)]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    made: dict[nn.Module, nn.Module] = {}
    tables: dict[tuple[int | None, int], Int8Linear] = {}
    for linear in linears:
        # One bias for each layer; a weight that two biases are added to is two tables.
        key = identity(linear), id(linear.bias)
        if key not in tables:
            table = Int8Linear(linear, observer, may_stay_float=activations == "auto")
            if activations == "auto" and not table.gains():
                continue
            tables[key] = table
        made[linear] = tables[key]
    by_weight = {weight: table for (weight, _), table in tables.items()}
    for module in model.modules():
        if type(module) is nn.Embedding or type(module).__name__ == "ParametrizedEmbedding":
            table_of = by_weight.get(identity(module))
            if table_of is not None and cast(nn.Embedding, module).max_norm is None:
                made[module] = Int8Embedding(table_of)
    if model in made:
        return made[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])
    return model


def is_linear_alike(module: nn.Module) -> bool:
    """A compressed nn.Linear, or a Conv1D."""
    return is_conv1d(module) or (
        type(module).__name__ == "ParametrizedLinear" and compressed_weight(module) is not None
    )

"""A linear layer that multiplies whole numbers: int8 weights, inputs rounded as they come.

Notable: the answer is defined by the integers alone, so it has the same bits on every machine; only
the time depends on which exact product this machine is good at (see `products`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.layers import (
    Replacement,
    compressed_weight,
    identity,
    is_conv1d,
    outputs_first,
    weight_of,
    with_modules,
)
from tinyml.quantization.grid import Observer, grid_of
from tinyml.quantization.products import Int8Weights, fastest, in_order

_LEAST = 128 * torch.finfo(torch.float32).tiny
SHOWN_TOKENS = (1, 32, 512)
"""One token of a decoder, a small batch, a prompt."""
WORTH_IT = 1.1
"""How many times faster int8 has to be before "auto" takes it: less is noise."""
_times: dict[object, dict[str, float]] = {}


def choose(times: Mapping[str, float]) -> str:
    """The fastest, or "float" where that is not slower by more than noise."""
    best, least = in_order(times)[0]
    return "float" if times["float"] <= WORTH_IT * least else best


def close_ones(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Those that exist on this build and device, and give what "float" gives but for rounding."""
    exact, kept = calls["float"]().float(), {}
    for name, call in calls.items():
        try:
            error = (call().float() - exact).norm()
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
        if error <= 0.1 * exact.norm():
            kept[name] = call
    return kept


class Int8Linear(Replacement):
    """y = (q_x q_w^T) s_x s_w + bias, with a scale for each token and one for each output.

    For inference: it has no gradient. With may_stay_float=True each number of tokens is computed by
    what is fastest here: so, or with inputs in bfloat16 and the weights as they are stored, or in
    float with the dense weight that the codes stand for. `explain` says which, and the times.
    """

    weight_codes: Tensor
    scale: Tensor
    bias: Tensor | None
    divide: Tensor | None

    def __init__(
        self, linear: nn.Module, observer: Observer = "minmax", *, may_stay_float: bool = False,
        divide: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        weight = outputs_first(linear, weight_of(linear))
        self.out_features, self.in_features = weight.shape
        self.may_stay_float, self.dtype = may_stay_float, weight.dtype
        self.transposed = is_conv1d(linear)
        weight = weight.float() if divide is None else weight.float() * divide
        # Each input over its own number, the weights times it: the same product (SmoothQuant).
        self.register_buffer("divide", None if divide is None else divide.to(self.dtype))
        grid = grid_of(weight, 8, observer=observer)
        self.register_buffer("weight_codes", grid.quantize(weight).to(torch.int8))
        self.register_buffer("scale", grid.scale.view(-1))
        bias = cast(Tensor | None, linear.bias)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._prepared: tuple[Any, Int8Weights, Tensor | None] | None = None

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        return self._times_divide if self.divide is None else self._times_divide / self.divide

    @property
    def _times_divide(self) -> Tensor:
        return self.weight_codes * self.scale[:, None]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.divide is not None:
            inputs = inputs / self.divide
        weights, dense = self._weights()
        if dense is not None and inputs.numel():
            kind, _ = self._chosen(inputs, dense)
            if kind == "float":
                return F.linear(inputs, dense.to(inputs.dtype), self.bias)
            if kind == "weights alone":
                return self._weights_alone(inputs)
        return self._multiply(weights, inputs)

    def restored(self) -> nn.Module:
        """An nn.Linear."""
        return plain_linear(self.weight.to(self.dtype), self.bias, self.transposed)

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        lines = []
        for count in tokens:
            inputs = torch.randn(count, self.in_features, device=self.scale.device)
            weights, dense = self._weights()
            line = str(weights.choice(inputs))
            if dense is not None:
                kind, times = self._chosen(inputs, dense)
                listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in in_order(times))
                line = f"computed in {kind} (whole layer: {listed}); {line}"
            lines.append(line)
        return lines

    def way(self, inputs: Tensor) -> str:
        """The name of the product that is taken for inputs like these."""
        return self._weights()[0].choice(inputs.reshape(-1, self.in_features).float()).way

    def gains(self, tokens: Sequence[int] = SHOWN_TOKENS) -> bool:
        """Whether anything is faster than float here for any of these numbers of tokens."""
        shapes = ((count, self.in_features) for count in tokens)
        inputs = [torch.randn(s, device=self.scale.device, dtype=self.dtype) for s in shapes]
        dense = self._times_divide.to(self.dtype)
        return any(self._chosen(x, dense)[0] != "float" for x in inputs)

    def _multiply(self, weights: Int8Weights, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features).float()
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(127)
        outputs = weights.product(tokens.div(scale).round_()).float()
        return self._finished(outputs.mul_(scale), inputs)

    def _weights_alone(self, inputs: Tensor) -> Tensor:
        """Inputs and sums as bfloat16, weights as they are stored: a fourth of float32's bytes."""
        tokens = inputs.reshape(-1, self.in_features).bfloat16()
        ones = torch.ones(self.out_features, dtype=torch.bfloat16, device=tokens.device)
        sums = torch._weight_int8pack_mm(tokens, self.weight_codes, ones)
        return self._finished(sums.float(), inputs)

    def _finished(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        outputs.mul_(self.scale)
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def _chosen(self, inputs: Tensor, dense: Tensor) -> tuple[str, dict[str, float]]:
        """What is fastest for so many tokens, and the times of all."""
        count = inputs.numel() // self.in_features
        shape = (count - 1).bit_length(), self.in_features, self.out_features
        key = *shape, inputs.dtype, inputs.device, torch.get_num_threads()
        if key not in _times:
            weights, dense = self._weights()[0], dense.to(inputs.dtype)
            probe = torch.randn_like(inputs)
            calls: dict[str, Callable[[], Tensor]] = {
                "int8": lambda: self._multiply(weights, probe),
                "weights alone": lambda: self._weights_alone(probe),
                "float": lambda: F.linear(probe, dense, self.bias),
            }
            _times[key] = fastest(close_ones(calls))
        return choose(_times[key]), _times[key]

    def _weights(self) -> tuple[Int8Weights, Tensor | None]:
        # A state dict that is loaded, a device or a type: each leaves another tensor or version.
        codes, scale = self.weight_codes, self.scale
        key = codes.data_ptr(), codes._version, scale.data_ptr(), scale._version
        if self._prepared is None or self._prepared[0] != key:
            dense = self._times_divide.to(self.dtype) if self.may_stay_float else None
            self._prepared = key, Int8Weights(codes), dense
        return self._prepared[1], self._prepared[2]

    def __getstate__(self) -> dict[str, Any]:
        # What is prepared for speed is made anew by whoever copies or unpickles the layer.
        return self.__dict__ | {"_prepared": None}


class Int8Embedding(Replacement):
    """Rows of an `Int8Linear`'s weight: an embedding that is tied to the layer above it."""

    def __init__(self, table: Int8Linear) -> None:
        super().__init__()
        self.table = table

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        return self.table.weight

    def restored(self) -> nn.Module:
        """An nn.Embedding, no longer tied."""
        return nn.Embedding.from_pretrained(self.weight.to(self.table.dtype), freeze=False)

    def forward(self, indices: Tensor) -> Tensor:
        """(...) -> (..., width)."""
        rows = self.table.weight_codes[indices] * self.table.scale[indices][..., None]
        return rows.to(self.table.dtype)


def plain_linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    """An nn.Linear of this weight; a Conv1D, which it would have to be, cannot be made here."""
    if transposed:
        raise ValueError("its layers were Conv1D and are replaced; compress the model before that")
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made


def with_int8_linears(
    model: nn.Module,
    observer: Observer = "minmax",
    activations: Literal["dynamic", "auto"] = "dynamic",
    held: Collection[str] = (),
    divide: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Replace every linear layer of `model` but those that are `held`, in place; return the model.

    Layers that share a weight share its codes: an embedding that is tied to the head stays tied.
    `divide` holds what the inputs of a layer are divided by, by its name.
    """
    linears = [
        module
        for name, module in model.named_modules()
        if name not in held and (type(module) is nn.Linear or is_linear_alike(module))
    ]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    names = {module: name for name, module in model.named_modules()}
    made: dict[nn.Module, nn.Module] = {}
    tables: dict[tuple[int | None, int], Int8Linear] = {}
    for linear in linears:
        # One bias for each layer; a weight that two biases are added to is two tables.
        key = identity(linear), id(linear.bias)
        if key not in tables:
            over = (divide or {}).get(names[linear])
            auto = activations == "auto"
            table = Int8Linear(linear, observer, may_stay_float=auto, divide=over)
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
    return with_modules(model, made)


def is_linear_alike(module: nn.Module) -> bool:
    """A compressed nn.Linear, or a Conv1D."""
    return is_conv1d(module) or (
        type(module).__name__ == "ParametrizedLinear" and compressed_weight(module) is not None
    )

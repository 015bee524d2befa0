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
    check_finite,
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


def listed(times: Mapping[str, float]) -> str:
    """Names and milliseconds, the fastest first."""
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in in_order(times))


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


class FastestLinear(Replacement):
    """In place of a linear layer: y = x w^T + bias by what is fastest here for so many tokens.

    For inference: it has no gradient. Subclasses say which `ways` there are, "float" among them.
    """

    bias: Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype
    transposed: bool
    group_size: int = 0

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._prepared: tuple[Any, ...] | None = None

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        raise NotImplementedError

    def ways(self, inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Every way to compute the layer for these inputs."""
        raise NotImplementedError

    def example(self, tokens: int) -> Tensor:
        """Inputs of so many tokens."""
        device = next(self.buffers()).device
        return torch.randn(tokens, self.in_features, device=device, dtype=self.dtype)

    def times(self, inputs: Tensor) -> dict[str, float]:
        """The milliseconds of each way for so many tokens, measured the first time."""
        count = (inputs.numel() // self.in_features - 1).bit_length()
        shape = count, self.in_features, self.out_features, self.group_size
        key = type(self), *shape, inputs.dtype, inputs.device, torch.get_num_threads()
        if key not in _times:
            _times[key] = fastest(close_ones(self.ways(torch.randn_like(inputs))))
        return _times[key]

    def gains(self, tokens: Sequence[int] = SHOWN_TOKENS) -> bool:
        """Whether anything is faster than float here for any of these numbers of tokens."""
        return any(choose(self.times(self.example(count))) != "float" for count in tokens)

    def restored(self) -> nn.Module:
        """An nn.Linear."""
        if self.transposed:  # a Conv1D, which it would have to be, cannot be made here
            raise ValueError(
                "its layers were Conv1D and are replaced; compress the model before that"
            )
        return self.dense()

    def dense(self) -> nn.Linear:
        """The same layer with the dense weight."""
        weight, bias = self.weight, self.bias
        made = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
        made.weight = nn.Parameter(weight.clone())
        if bias is not None:
            made.bias = nn.Parameter(bias.clone())
        return made

    def finished(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """With the bias, in the inputs' type and shape."""
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def __getstate__(self) -> dict[str, Any]:
        # What is prepared for speed is made anew by whoever copies or unpickles the layer.
        return self.__dict__ | {"_prepared": None}


class Int8Linear(FastestLinear):
    """y = (q_x q_w^T) s_x s_w + bias, with a scale for each token and one for each output.

    With may_stay_float=True each number of tokens is computed by what is fastest here: so, or with
    inputs in bfloat16 and the weights as they are stored, or in float with the dense weight that
    the codes stand for. `explain` says which, and the times.
    """

    weight_codes: Tensor
    scale: Tensor
    divide: Tensor | None

    def __init__(
        self, linear: nn.Module, observer: Observer = "minmax", *, may_stay_float: bool = False,
        divide: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cast(Tensor | None, linear.bias))
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

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        dense = self.weight_codes * self.scale[:, None]
        return (dense if self.divide is None else dense / self.divide).to(self.dtype)

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        inputs = input if self.divide is None else input / self.divide
        way = "int8"
        if self.may_stay_float and inputs.numel():
            way = choose(self.times(inputs))
        return self.ways(inputs)[way]()

    def ways(self, inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Integers, stored weights with inputs in bfloat16, and float32 with the dense weight."""
        return {
            "int8": lambda: self._multiply(inputs),
            "weights alone": lambda: self._weights_alone(inputs),
            "float": lambda: F.linear(inputs, self._weights()[1].to(inputs.dtype), self.bias),
        }

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        lines = []
        for count in tokens:
            inputs = self.example(count)
            line = str(self._weights()[0].choice(inputs.float()))
            if self.may_stay_float:
                times = self.times(inputs)
                line = f"computed in {choose(times)} (whole layer: {listed(times)}); {line}"
            lines.append(line)
        return lines

    def _multiply(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features).float()
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(127)
        sums = self._weights()[0].product(tokens.div(scale).round_()).float()
        return self.finished(sums.mul_(scale).mul_(self.scale), inputs)

    def _weights_alone(self, inputs: Tensor) -> Tensor:
        """Inputs and sums as bfloat16, weights as they are stored: a fourth of float32's bytes."""
        tokens = inputs.reshape(-1, self.in_features).bfloat16()
        ones = torch.ones(self.out_features, dtype=torch.bfloat16, device=tokens.device)
        sums = torch._weight_int8pack_mm(tokens, self.weight_codes, ones)
        return self.finished(sums.float().mul_(self.scale), inputs)

    def _weights(self) -> tuple[Int8Weights, Tensor]:
        """The codes as the product takes them, and the dense weight if it may be needed."""
        # A state dict that is loaded, a device or a type: each leaves another tensor or version.
        codes, scale = self.weight_codes, self.scale
        key = codes.data_ptr(), codes._version, scale.data_ptr(), scale._version
        if self._prepared is None or self._prepared[0] != key:
            dense = codes * scale[:, None] if self.may_stay_float else scale
            self._prepared = key, Int8Weights(codes), dense.to(self.dtype)
        return self._prepared[1], self._prepared[2]


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

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (..., width)."""
        rows = self.table.weight_codes[input] * self.table.scale[input][..., None]
        return rows.to(self.table.dtype)


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
        if name not in held
        and (type(module) is nn.Linear or is_linear_alike(module))
        and identity(module) is not None  # a weight that is made of others is not in its layer
    ]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    names = {module: name for name, module in model.named_modules()}
    for linear in linears:
        check_finite(f"{names[linear]}.weight".lstrip("."), weight_of(linear))
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

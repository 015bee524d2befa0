"""Linear layers that are computed by what is fastest here for so many tokens.

Notable: "float" is always among the ways and is left only for one that is clearly faster (see
`timing`), so such a layer is not slower than the float one. What is prepared for a way is made when
it is first taken, beside the stored weight, and never in a state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.layers import (
    Replacement,
    check_finite,
    compressed_weight,
    identity,
    is_conv1d,
    stamp_of,
    weight_of,
    with_modules,
)
from tinyml.timing import Timing, measure
from tinyml.whole_state import guarded_loading

SHOWN_TOKENS = (1, 32, 512)
"""One token of a decoder, a small batch, a prompt."""
_SMALL_MS = 0.1  # asking takes 5 microseconds of Python where a core is slow
_timings: dict[object, Timing] = {}


class FastestLinear(Replacement):
    """In place of a linear layer: y = x w^T + bias, for inference: it has no gradient."""

    bias: Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype
    transposed: bool
    group_size: int = 0
    always: str | None = None
    """A way that is taken without measuring."""
    ways: ClassVar[dict[str, str]] = {"float": "_by_dense_weight"}
    """The method of each way, inputs -> outputs."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._kept: dict[str, Any] = {}
        self._stamp: list[tuple[int, int]] = []
        self._taken: dict[Any, str] = {}

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        raise NotImplementedError

    def stored(self) -> tuple[Any, Any]:
        """The codes and their scales."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        # A microsecond here is a tenth of what a small layer takes: no context, no registry.
        input = input.detach() if input.requires_grad else input
        outputs: Tensor = getattr(self, self.ways[self.always or self._way(input)])(input)
        return outputs

    def _way(self, inputs: Tensor) -> str:
        tokens = inputs.numel() // self.in_features
        if not tokens or torch.compiler.is_compiling():
            return "float"  # nothing can be timed inside a compiled graph
        key = (tokens - 1).bit_length(), inputs.dtype, inputs.device, torch.get_num_threads()
        if (way := self._taken.get(key)) is None:
            way = self._taken[key] = self.timing(inputs).way
        return way

    def timing(self, inputs: Tensor) -> Timing:
        """What is fastest for inputs like these, measured the first time that a shape is met."""
        shape = (inputs.numel() // self.in_features - 1).bit_length(), self.group_size
        key = (
            type(self), *shape, self.in_features, self.out_features,
            inputs.dtype, inputs.device, torch.get_num_threads(),
        )  # fmt: skip
        if key not in _timings:
            like = torch.randn_like(inputs)
            calls = {n: partial(getattr(self, method), like) for n, method in self.ways.items()}
            close = {name: call for name, call in calls.items() if _agree(call, calls["float"])}
            _timings[key] = measure(close, "float")
        return _timings[key]

    def gains(self) -> bool:
        """Whether anything is faster than float here for any of `SHOWN_TOKENS`."""
        one = self.timing(self.example(1))
        if one.way == "float" and one.milliseconds["float"] < _SMALL_MS:
            return False  # asking which way is the fastest takes more than a twentieth of it
        return any(self.timing(self.example(count)).way != "float" for count in SHOWN_TOKENS)

    def example(self, tokens: int) -> Tensor:
        """Inputs of so many tokens."""
        device = next(self.buffers()).device
        return torch.randn(tokens, self.in_features, device=device, dtype=self.dtype)

    def explain(self, tokens: Sequence[int] = SHOWN_TOKENS) -> list[str]:
        """For so many tokens on this machine: what is computed, and the times that say so."""
        return [f"{n} tokens: computed in {self.timing(self.example(n))}" for n in tokens]

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What a way makes of the stored weight, once for as long as that is the same."""
        if torch.compiler.is_compiling():
            return make()  # a graph has no tensors to keep
        # A state dict that is loaded, a device or a type: each leaves another tensor or version.
        if self._stamp != (stamp := stamp_of(*self.stored())):
            self._kept, self._stamp = {}, stamp
        if (kept := self._kept.get(name)) is None:
            kept = self._kept[name] = make()
        return kept

    def _by_dense_weight(self, inputs: Tensor) -> Tensor:
        dense = self.kept("float", self._dense)
        dense = dense if dense.dtype is inputs.dtype else dense.to(inputs.dtype)
        return F.linear(inputs, dense, self._buffers["bias"])

    def dense_kept(self) -> Tensor:
        """The dense weight, which stays in memory once it was needed."""
        dense: Tensor = self.kept("float", self._dense)
        return dense

    def _dense(self) -> Tensor:
        return self.weight.contiguous()

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, as an embedding reads them."""
        return F.embedding(index, self.dense_kept())

    def divided(self, inputs: Tensor, divide: Tensor | None) -> Tensor:
        """The tokens (n, in), each input over its own number where the weights are times it.

        The quotient is not rounded to the 16 bits of its parts: what follows rounds it, once.
        """
        if divide is not None:
            inputs = inputs.float() / divide.float()
        return inputs.reshape(-1, self.in_features)

    def finished(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """With the bias, in the inputs' type and shape."""
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

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

    def __getstate__(self) -> dict[str, Any]:
        # What is prepared for speed is made anew by whoever copies or unpickles the layer.
        return self.__dict__ | {"_kept": {}, "_stamp": [], "_taken": {}}


class TiedEmbedding(Replacement):
    """Rows of a `FastestLinear`'s weight: an embedding that is tied to the layer above it."""

    def __init__(self, table: FastestLinear) -> None:
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
        return self.table.rows(input)


def _agree(call: Callable[[], Tensor], exact: Callable[[], Tensor]) -> bool:
    """Whether a way exists on this build and device, and is right but for rounding."""
    try:
        error = (call().float() - exact().float()).norm()
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool(error <= 0.1 * exact().float().norm())


def with_fastest_linears(
    model: nn.Module, make: Callable[[str, nn.Module], FastestLinear | None], held: Collection[str]
) -> nn.Module:
    """Replace every linear layer of `model` but those that are `held`, in place; return the model.

    Layers that share a weight share what `make(name, layer)` gives: an embedding that is tied to
    the head stays tied. Where it gives None they stay as they are.
    """
    linears = {
        module: name
        for name, module in model.named_modules()
        if name not in held
        and (type(module) is nn.Linear or is_linear_alike(module))
        and identity(module) is not None  # a weight that is made of others is not in its layer
    }
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    for linear, name in linears.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(linear))
    made: dict[nn.Module, nn.Module] = {}
    tables: dict[tuple[int | None, int], FastestLinear | None] = {}
    for linear, name in linears.items():
        # One bias for each layer; a weight that two biases are added to is two tables.
        key = identity(linear), id(linear.bias)
        if key not in tables:
            tables[key] = make(name, linear)
        if (table := tables[key]) is not None:
            made[linear] = table
    by_weight = {weight: table for (weight, _), table in tables.items()}
    for module in model.modules():
        if type(module) is nn.Embedding or type(module).__name__ == "ParametrizedEmbedding":
            table = by_weight.get(identity(module))
            if table is not None and cast(nn.Embedding, module).max_norm is None:
                made[module] = TiedEmbedding(table)
    return guarded_loading(with_modules(model, made))


def is_linear_alike(module: nn.Module) -> bool:
    """A compressed nn.Linear, or a Conv1D."""
    return is_conv1d(module) or (
        type(module).__name__ == "ParametrizedLinear" and compressed_weight(module) is not None
    )
